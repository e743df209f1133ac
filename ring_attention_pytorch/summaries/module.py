"""`SummaryAttention`: the layer that sees what is near exactly, and the rest in summary."""

from typing import Any

from beartype import beartype

from ring_attention_pytorch.nn.attention import RingAttention
from ring_attention_pytorch.summaries.layer import Summaries


class SummaryAttention(RingAttention):
    """A causal attention layer whose cost grows linearly: near tokens exactly, others in summary.

    Args:
        dim: model width.
        window, stride, block, distance, pool, gates: as for `Summaries`.
        options: those of `RingAttention`.

    Raises:
        ValueError: arguments are invalid or contradict one another.

    >>> import torch
    >>> attn = SummaryAttention(32, window=8, stride=4, dim_head=8, heads=4)
    >>> attn(torch.randn(1, 37, 32)).shape
    torch.Size([1, 37, 32])
    """

    @beartype
    def __init__(
        self,
        dim: int,
        *,
        window: int,
        stride: int = 16,
        block: int | None = None,
        distance: int | None = None,
        pool: str = "mean",
        gates: bool = False,
        **options: Any,
    ):
        given = Summaries(window, stride, block, distance, pool, gates)
        super().__init__(dim, attn_summaries=given, **({"causal": True} | options))
