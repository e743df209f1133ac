"""Exact attention over a sequence that is spread over many processes."""

from ring_attention_pytorch import original as _original  # noqa: F401 - adds names of 0.5
from ring_attention_pytorch.balance import balanced
from ring_attention_pytorch.explain import explain_plan
from ring_attention_pytorch.failures import RingError, fail_together
from ring_attention_pytorch.layouts import positions
from ring_attention_pytorch.plan import RingPlan
from ring_attention_pytorch.regular_attention import default_attention
from ring_attention_pytorch.ring_attention import RingAttention
from ring_attention_pytorch.ring_flash_attention import (
    explain_kernel,
    ring_attn,
    ring_flash_attn,
    ring_flash_attn_,
    ring_flash_attn_cuda,
    ring_flash_attn_cuda_,
    ulysses_attn,
)
from ring_attention_pytorch.ring_transformer import RingTransformer
from ring_attention_pytorch.rotary import RingRotaryEmbedding, apply_rotary_pos_emb
from ring_attention_pytorch.routing import (
    ConditionalRoutedAttention,
    ConditionalRoutedAutoregressiveAttention,
    ConditionalRoutedCrossAttention,
    ConditionalRoutedFeedForward,
    ConditionalRoutedImageAttention,
    ConditionalRoutedTransformer,
    ConditionalRoutedTransformerBlock,
    CoordinateDescentRouter,
    RoutingPlan,
    coordinate_descent,
    select_topk,
    soft_topk,
)
from ring_attention_pytorch.sharding import shard_sequence, unshard_sequence
from ring_attention_pytorch.tree_attn_decoding import tree_attn_decode

__version__ = "1.0.0"

__all__ = [
    "ConditionalRoutedAttention",
    "ConditionalRoutedAutoregressiveAttention",
    "ConditionalRoutedCrossAttention",
    "ConditionalRoutedFeedForward",
    "ConditionalRoutedImageAttention",
    "ConditionalRoutedTransformer",
    "ConditionalRoutedTransformerBlock",
    "CoordinateDescentRouter",
    "RingAttention",
    "RingError",
    "RingPlan",
    "RingRotaryEmbedding",
    "RingTransformer",
    "RoutingPlan",
    "apply_rotary_pos_emb",
    "balanced",
    "coordinate_descent",
    "default_attention",
    "explain_kernel",
    "explain_plan",
    "fail_together",
    "positions",
    "ring_attn",
    "ring_flash_attn",
    "ring_flash_attn_",
    "ring_flash_attn_cuda",
    "ring_flash_attn_cuda_",
    "select_topk",
    "shard_sequence",
    "soft_topk",
    "tree_attn_decode",
    "ulysses_attn",
    "unshard_sequence",
]
