"""Conditional routing (CoLT5, Ainslie et al. 2023): light branch for all tokens, heavy for a few.

The layers run on one process, or on a sequence sharded over a ring, with equal results.
"""

from ring_attention_pytorch.routing.attention import ConditionalRoutedAttention
from ring_attention_pytorch.routing.autoregressive import ConditionalRoutedAutoregressiveAttention
from ring_attention_pytorch.routing.block import ConditionalRoutedTransformerBlock
from ring_attention_pytorch.routing.cross_attention import ConditionalRoutedCrossAttention
from ring_attention_pytorch.routing.feedforward import ConditionalRoutedFeedForward
from ring_attention_pytorch.routing.image_attention import ConditionalRoutedImageAttention
from ring_attention_pytorch.routing.plan import RoutingPlan
from ring_attention_pytorch.routing.router import CoordinateDescentRouter
from ring_attention_pytorch.routing.selection import select_topk
from ring_attention_pytorch.routing.soft_topk import coordinate_descent, soft_topk
from ring_attention_pytorch.routing.transformer import ConditionalRoutedTransformer

__all__ = [
    "ConditionalRoutedAttention",
    "ConditionalRoutedAutoregressiveAttention",
    "ConditionalRoutedCrossAttention",
    "ConditionalRoutedFeedForward",
    "ConditionalRoutedImageAttention",
    "ConditionalRoutedTransformer",
    "ConditionalRoutedTransformerBlock",
    "CoordinateDescentRouter",
    "RoutingPlan",
    "coordinate_descent",
    "select_topk",
    "soft_topk",
]
