"""The feed-forward of a block."""

from torch import nn

from ring_attention_pytorch.arguments import checked, least_problem
from ring_attention_pytorch.nn.norm import RMSNorm


@checked
def feed_forward(dim: int, mult: float | int) -> nn.Sequential:
    """Make a feed-forward: RMSNorm, then two linear layers with a GELU between."""
    if (problem := least_problem(1, dim=dim) or least_problem(1 / dim, mult=mult)) is not None:
        raise ValueError(f"a feed-forward: {problem}")
    inner = int(dim * mult)
    return nn.Sequential(RMSNorm(dim), nn.Linear(dim, inner), nn.GELU(), nn.Linear(inner, dim))
