"""Attention of queries to one rank's keys, with PyTorch's operators: any dtype and mask.

The reference for the GPU kernels, and the fallback where they refuse.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from einops import einsum, rearrange
from torch import Tensor

from ring_attention_pytorch.runtime.rowwise import accumulation_dtype

_SCORES = 1 << 26  # in memory at once


class Scores(NamedTuple):
    """The score terms, and the window: a query sees at most that many tokens before its own."""

    scale: float
    softclamp: float | None = None
    window: int | None = None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    places: tuple[Tensor, Tensor],
    scores_of: Scores,
    slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention of one sequence's queries to some of its keys.

    Args:
        q: `[n, h, d]`.
        k, v: `[m, h_kv, d]` and `[m, h_kv, d_v]`.
        places: the positions of queries `[n]` and of keys `[m]`; no query sees a later key.
        slopes: of ALiBi, `[h]`.

    Returns:
        out `[n, h, d_v]` and lse `[n, h]` in the accumulator's dtype; 0 and -inf for a query that
        sees no key.

    >>> q, k, at = torch.ones(1, 2, 4), torch.ones(3, 1, 4), torch.arange(3)
    >>> out, lse = attend(q, k, k, (at[1:2], at), Scores(0.0))
    >>> lse.exp()
    tensor([[2., 2.]])
    """
    wide = accumulation_dtype(q.dtype)
    rows, cols = places[0].unsqueeze(1), places[1].unsqueeze(0)
    q = rearrange(q.to(wide), "i (g r) d -> i g r d", g=k.shape[1])
    scores = einsum(q, k.to(wide), "i g r d, j g d -> g r i j") * scores_of.scale
    if scores_of.softclamp is not None:
        scores = scores_of.softclamp * torch.tanh(scores / scores_of.softclamp)
    if slopes is not None:
        slopes = rearrange(slopes.to(wide), "(g r) -> g r 1 1", g=k.shape[1])
        scores = scores - slopes * (rows - cols)
    seen = cols <= rows
    if scores_of.window is not None:
        seen = seen & (cols >= rows - scores_of.window)
    scores = scores.masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(dim=-1)
    p = (scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp()
    out = einsum(p, v.to(wide), "g r i j, j g d -> i g r d")
    return rearrange(out, "i g r d -> i (g r) d"), rearrange(lse, "g r i -> i (g r)")


def attend_in_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: int,
    held: tuple[Tensor, Callable[[int], int]],
    scores_of: Scores,
    start: int = 0,
    slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `attend` in blocks of queries, each to the keys that it can see.

    The first query is token `first`. Keys before `start` are hidden. `held` has the keys' tokens
    `[m]`, ascending, and a function that counts the keys before a token.
    """
    tokens, before = held
    step = max(1, _SCORES // max(1, len(k) * q.shape[1]))
    found = []
    for at in range(0, len(q), step):
        rows = torch.arange(first + at, first + min(at + step, len(q)), device=q.device)
        unseen = 0 if scores_of.window is None else first + at - scores_of.window
        keys = slice(before(max(start, unseen)), before(first + at + len(rows)))
        places = rows, tokens[keys]
        found.append(attend(q[at : at + step], k[keys], v[keys], places, scores_of, slopes))
    out, lse = zip(*found)
    return torch.cat(out), torch.cat(lse)


def merged(out: Tensor, lse: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Merge partial results along their first dimension; `sinks` `[h]` are keys without value.

    The formula of `rowwise.merge`, rounded as in decoding: each weight is relative to the lse of
    all parts and sinks.

    Args:
        out: `[parts, ..., h, d_v]`.
        lse: `[parts, ..., h]`, -inf where a part has seen nothing.

    >>> merged(torch.tensor([[[1.0]], [[3.0]]]), torch.zeros(2, 1))[0]
    tensor([[2.]])
    """
    total = lse.logsumexp(dim=0)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.to(total))
    weight = (lse - total.masked_fill(total == -torch.inf, 0.0)).exp()
    return (out * weight.unsqueeze(-1)).sum(dim=0), total


def merged_messages(messages: Tensor) -> Tensor:
    """Merge messages `[parts, ..., d_v + 1]`, out with its lse in the last column, to one.

    >>> merged_messages(torch.tensor([[[1.0, 0.0]], [[3.0, 0.0]]])).round(decimals=2)
    tensor([[2.0000, 0.6900]])
    """
    out, lse = merged(messages[..., :-1], messages[..., -1])
    return torch.cat((out, lse.unsqueeze(-1)), dim=-1)
