"""Attention in plain PyTorch, for queries that have few keys each. Patterns are einsum's."""

import torch
from torch import Tensor

from ring_attention_pytorch.runtime.interfaces import ScoreMods


def scores_of(pattern: str, q: Tensor, k: Tensor, terms: ScoreMods) -> Tensor:
    """Return the scores of queries and keys, scaled and clamped."""
    scores = torch.einsum(pattern, q, k) * terms.scale
    if terms.softclamp is None:
        return scores
    return terms.softclamp * torch.tanh(scores / terms.softclamp)


def attended(pattern: str, scores: Tensor, seen: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return out and lse by scores `[..., keys]`; `seen` is bool, and broadcasts to them.

    A query that sees no key has out 0, lse -inf and no gradient.
    """
    blind = ~seen.any(-1)
    scores = scores.masked_fill(~seen, -torch.inf)
    lse = scores.masked_fill(blind[..., None], 0.0).logsumexp(-1)
    weights = (scores - lse[..., None]).exp()
    return torch.einsum(pattern, weights, v), lse.masked_fill(blind, -torch.inf)


def softmax_weights(logits: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return the softmax of logits over a dimension, and its lse, without that dimension.

    Where all logits are -inf weights are 0 and lse -inf, and there is no gradient.

    >>> weights, lse = softmax_weights(torch.tensor([[0.0, -torch.inf], [-torch.inf] * 2]), dim=1)
    >>> weights.tolist(), lse.tolist()
    ([[1.0, 0.0], [0.0, 0.0]], [0.0, -inf])
    """
    top = logits.detach().amax(dim, keepdim=True)
    top = top.masked_fill(top.isinf(), 0.0)
    weights = (logits - top).exp()
    total = weights.sum(dim, keepdim=True)
    empty = total == 0
    safe = total.masked_fill(empty, 1.0)
    lse = (safe.log() + top).masked_fill(empty, -torch.inf)
    return weights / safe, lse.squeeze(dim)
