"""Attention to near tokens exactly, and to summaries of far tokens."""

from ring_attention_pytorch.summaries.attention import summary_attn
from ring_attention_pytorch.summaries.layer import Summaries
from ring_attention_pytorch.summaries.module import SummaryAttention
from ring_attention_pytorch.summaries.plan import SummaryPlan
from ring_attention_pytorch.summaries.pooling import summarize

__all__ = ["Summaries", "SummaryAttention", "SummaryPlan", "summarize", "summary_attn"]
