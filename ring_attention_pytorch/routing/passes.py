"""Passes over all scores, which take nearly all the time of coordinate descent.

`PLAIN` is the PyTorch implementation, `descent_triton.TRITON` the Triton one.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Partition = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]
Slope = Callable[[Tensor, Sequence[Tensor], Tensor], Tensor]


class Passes(NamedTuple):
    """An implementation of both passes."""

    partition: Partition
    slope: Slope
    check: Callable[[torch.device], None]  # raises ValueError if a device can't be used


def partition(scores: Tensor, a: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Count the scores `[..., n]` that are >= -a `[...]`; compute LSE(s / eps) of the others."""
    above = scores >= -a.unsqueeze(-1)
    below = (scores / eps).masked_fill(above, -torch.inf)
    return above.sum(-1).double(), below.logsumexp(-1)


def slope(scores: Tensor, terms: Sequence[Tensor], window: Tensor) -> Tensor:
    """Compute -da/ds of scores `[..., n]` from their windows' terms coef, bound, shift, e."""
    coefs, bounds, shifts, es = terms
    total = torch.zeros_like(scores)
    for step, e in enumerate(es):
        coef = coefs[..., step].index_select(-1, window)
        bound = bounds[..., step].index_select(-1, window)
        shift = shifts[..., step].index_select(-1, window)
        part = coef * ((scores + shift) / e).exp()
        total += part.masked_fill(~(scores < bound) | (coef == 0), 0.0)
    return total


PLAIN = Passes(partition, slope, lambda device: None)
