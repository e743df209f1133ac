"""Tangents of attention on tiles in plain PyTorch.

They are the derivatives of out, lse and the gradients as q, k and v move along tq, tk and tv. Keys
have their tangents appended along the head size, k | tk and v | tv, as they are sent. Probabilities
use the final lse, so tiles contribute plain sums. Let A and B be the sums over keys of p * ts and
of p * (ts * v + tv), where ts is a score's tangent. Then d(lse) is A and d(out) is B - A * out.
Dropout applies where p weighs values. The gradients are `eager`'s, differentiated once more.
"""

from collections.abc import Iterator
from typing import NamedTuple

from einops import einsum, rearrange
from torch import Tensor, cat, inf

from ring_attention_pytorch.kernels.eager import (
    by_key_head,
    finite,
    grouped,
    scores_of,
    visible_parts,
)
from ring_attention_pytorch.runtime.interfaces import (
    Grads,
    KVBlock,
    Residuals,
    ScoreMods,
    Tiles,
    tangent_of_delta,
)


class Part(NamedTuple):
    """A few rows of a tile with the keys that they see, in the accumulator's dtype.

    Shapes: q, tq [b, i, g, r, d]; k, tk, v, tv [b, j, g, d]; all other tensors [b, g, r, i, j].
    These are p, the score's tangent ts, its derivative `slope` by q.k, the tangent `tslope` of
    that, and dropout's factor of p, `left`.
    """

    rows: slice
    cols: slice
    q: Tensor
    tq: Tensor
    k: Tensor
    tk: Tensor
    v: Tensor
    tv: Tensor
    p: Tensor
    ts: Tensor
    slope: Tensor | float
    tslope: Tensor | float
    left: Tensor | None

    def less(self, t: Tensor) -> Tensor:
        """Return t [b, g, r, i, j] times dropout's factor."""
        return t if self.left is None else t * self.left


def forward(
    q: Tensor,
    tq: Tensor,
    lse: Tensor,
    keys: KVBlock,
    tiles: Tiles,
    terms: ScoreMods,
    sums: tuple[Tensor, Tensor],
) -> None:
    """Add B [b, n, h, d_v] and A [b, h, n] of these tiles to `sums`."""
    b_sum, a_sum = sums
    for part in _parts(q, tq, lse, keys, tiles, terms):
        pts = part.p * part.ts
        moved = einsum(part.less(pts), part.v, "b g r i j, b j g d -> b i g r d")
        moved += einsum(part.less(part.p), part.tv, "b g r i j, b j g d -> b i g r d")
        b_sum[:, part.rows] += rearrange(moved, "b i g r d -> b i (g r) d")
        a_sum[..., part.rows] += rearrange(pts.sum(-1), "b g r i -> b (g r) i")


def backward(
    saved: Residuals,
    along: Residuals,
    keys: KVBlock,
    tiles: Tiles,
    terms: ScoreMods,
    grads: Grads,
) -> None:
    """Add each gradient's tangent, and behind it the gradient itself, to `grads`.

    `along` has the tangents of `saved`; `grads` have twice the head size.
    """
    h_kv, running = keys.k.shape[2], [total.begin_update() for total in grads]
    delta_along = tangent_of_delta(saved, along)
    for part in _parts(saved.q, along.q, saved.lse, keys, tiles, terms):
        dout = by_key_head(saved.dout[:, part.rows], h_kv)
        tdout = by_key_head(along.dout[:, part.rows], h_kv)
        delta = _of_rows(saved.delta, part, h_kv)
        tlse = _of_rows(along.lse, part, h_kv)
        tdelta = _of_rows(delta_along, part, h_kv)
        p, tp = part.p, part.p * (part.ts - tlse)
        dp = part.less(_by_pair(dout, part.v)) - delta
        tdp = part.less(_by_pair(cat((dout, tdout), -1), cat((part.tv, part.v), -1))) - tdelta
        ds, tds = p * dp, tp * dp + p * tdp
        # d(q.k) and its tangent
        dqk, tdqk = ds * part.slope, tds * part.slope + ds * part.tslope
        dq = cat((_to_rows(tdqk, part.k) + _to_rows(dqk, part.tk), _to_rows(dqk, part.k)), -1)
        dk = cat((_to_cols(tdqk, part.q) + _to_cols(dqk, part.tq), _to_cols(dqk, part.q)), -1)
        p, tp = part.less(p), part.less(tp)
        dv = cat((_to_cols(tp, dout) + _to_cols(p, tdout), _to_cols(p, dout)), -1)
        running[0][:, part.rows] += dq
        running[1][:, part.cols] += dk
        running[2][:, part.cols] += dv


def _parts(
    q: Tensor, tq: Tensor, lse: Tensor, keys: KVBlock, tiles: Tiles, terms: ScoreMods
) -> Iterator[Part]:
    h_kv = keys.k.shape[2]
    for rows, cols, hidden, bias, left in visible_parts(keys, tiles, terms, tq.shape[2]):
        rows_q, both_k, both_v = grouped(q[:, rows], keys.k[:, cols], keys.v[:, cols])
        k, tk = both_k.chunk(2, dim=-1)
        v, tv = both_v.chunk(2, dim=-1)
        along = by_key_head(tq[:, rows], h_kv)
        tqk = _by_pair(cat((along, rows_q), -1), both_k)
        scores, slope = scores_of(rows_q, k, terms, None)
        tslope: Tensor | float = 0.0
        if terms.softclamp is not None:
            # scores are c * t and slope is scale * (1 - t ** 2), with t = tanh(scale * q.k / c)
            tslope = scores * slope * tqk * (-2 * terms.scale / terms.softclamp**2)
        scores = scores if bias is None else scores + bias
        total = rearrange(lse[..., rows], "b (g r) i -> b g r i 1", g=h_kv)
        p = scores.masked_fill(hidden, -inf).sub_(finite(total)).exp_()
        yield Part(rows, cols, rows_q, along, k, tk, v, tv, p, slope * tqk, slope, tslope, left)


def _of_rows(t: Tensor, part: Part, h_kv: int) -> Tensor:
    """Return t [b, h, n] of a part's rows, to broadcast over its keys: [b, g, r, i, 1]."""
    return rearrange(t[..., part.rows], "b (g r) i -> b g r i 1", g=h_kv)


def _by_pair(rows: Tensor, cols: Tensor) -> Tensor:
    return einsum(rows, cols, "b i g r d, b j g d -> b g r i j")


def _to_rows(weights: Tensor, cols: Tensor) -> Tensor:
    found = einsum(weights, cols, "b g r i j, b j g d -> b i g r d")
    return rearrange(found, "b i g r d -> b i (g r) d")


def _to_cols(weights: Tensor, rows: Tensor) -> Tensor:
    return einsum(weights, rows, "b g r i j, b i g r d -> b j g d")
