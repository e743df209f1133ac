"""The feed-forward of a block."""

from torch import nn

from ring_attention_pytorch.arguments import check_least, checked, checks_of
from ring_attention_pytorch.nn.norm import RMSNorm


@checked
def feed_forward(dim: int, mult: float | int) -> nn.Sequential:
    """Make a feed-forward: RMSNorm, linear, GELU, linear."""
    with checks_of("a feed-forward"):
        check_least(1, dim=dim)
        check_least(1 / dim, mult=mult)
    inner = int(dim * mult)
    return nn.Sequential(RMSNorm(dim), nn.Linear(dim, inner), nn.GELU(), nn.Linear(inner, dim))
