"""Near exactly, far in summary: attention whose far past is compressed (docs/guide/summaries.md)."""

from ring_attention_pytorch.summaries.attention import summary_attn
from ring_attention_pytorch.summaries.plan import SummaryPlan
from ring_attention_pytorch.summaries.pooling import summarize

__all__ = ["SummaryPlan", "summarize", "summary_attn"]
