"""Attention in plain PyTorch, for queries with few keys each; `pattern` is an einsum equation."""

import torch
from torch import Tensor

from ring_attention_pytorch.runtime.interfaces import ScoreMods


def scores_of(pattern: str, q: Tensor, k: Tensor, terms: ScoreMods) -> Tensor:
    """Return the scores of queries and keys, scaled and soft-clamped."""
    scores = torch.einsum(pattern, q, k) * terms.scale
    if terms.softclamp is None:
        return scores
    return terms.softclamp * torch.tanh(scores / terms.softclamp)


def attended(pattern: str, scores: Tensor, seen: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return out and lse for scores `[..., keys]`; `seen` is bool and broadcasts to scores.

    A query that sees no key has out 0, lse -inf and no gradient.

    >>> seen = torch.tensor([[True, True], [False, False]])
    >>> attended("ij,jd->id", torch.zeros(2, 2), seen, torch.tensor([[1.0], [3.0]]))
    (tensor([[2.],
            [0.]]), tensor([0.6931,   -inf]))
    """
    blind = ~seen.any(-1)
    scores = scores.masked_fill(~seen, -torch.inf)
    lse = scores.masked_fill(blind[..., None], 0.0).logsumexp(-1)
    weights = (scores - lse[..., None]).exp()
    return torch.einsum(pattern, weights, v), lse.masked_fill(blind, -torch.inf)
