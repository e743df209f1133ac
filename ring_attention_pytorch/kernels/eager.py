"""Attention on tiles in plain PyTorch: any device, any floating dtype, every feature.

Rows are taken `bucket_size` at a time, so at most `b * h * bucket_size * m` scores exist at
once. Flash attention's algebra (Dao et al. 2022, section 3; backward from lse and delta).
"""

from collections.abc import Iterator, Sequence

import torch
from einops import einsum, rearrange
from torch import Tensor

from ring_attention_pytorch.contract import Can, Grads, Keys, Saved, Terms
from ring_attention_pytorch.layouts import Tile, band, buckets
from ring_attention_pytorch.running import Result, accumulator, merge_

CAN = Can()


def forward(q: Tensor, keys: Keys, tiles: Sequence[Tile], terms: Terms, result: Result) -> None:
    out, lse = result.running()
    for rows, cols, hidden in _buckets(keys, tiles, terms):
        q_, k, v = _grouped(q[:, rows], keys.k[:, cols], keys.v[:, cols])
        scores = _scores(q_, k, terms)[0].masked_fill_(hidden, -torch.inf)
        part_lse = scores.logsumexp(dim=-1)
        p = scores.sub_(_finite(part_lse).unsqueeze(-1)).exp_()
        part = einsum(p, v, "b g r i j, b j g d -> b i g r d")
        part = rearrange(part, "b i g r d -> b i (g r) d")
        merge_(out[:, rows], lse[..., rows], part, rearrange(part_lse, "b g r i -> b (g r) i"))


def backward(saved: Saved, keys: Keys, tiles: Sequence[Tile], terms: Terms, grads: Grads) -> None:
    h_kv, running = keys.k.shape[2], [total.running() for total in grads]
    for rows, cols, hidden in _buckets(keys, tiles, terms):
        q, k, v = _grouped(saved.q[:, rows], keys.k[:, cols], keys.v[:, cols])
        dout = _by_key_head(saved.dout[:, rows], h_kv)
        lse, delta = (
            rearrange(t[..., rows], "b (g r) i -> b g r i 1", g=h_kv)
            for t in (saved.lse, saved.delta)
        )
        scores, slope = _scores(q, k, terms)
        p = scores.masked_fill_(hidden, -torch.inf).sub_(_finite(lse)).exp_()
        dp = einsum(dout, v, "b i g r d, b j g d -> b g r i j")
        ds = dp.sub_(delta).mul_(p).mul_(slope)
        dq = einsum(ds, k, "b g r i j, b j g d -> b i g r d")
        running[0][:, rows] += rearrange(dq, "b i g r d -> b i (g r) d")
        running[1][:, cols] += einsum(ds, q, "b g r i j, b i g r d -> b j g d")
        running[2][:, cols] += einsum(p, dout, "b g r i j, b i g r d -> b j g d")


def _buckets(
    keys: Keys, tiles: Sequence[Tile], terms: Terms
) -> Iterator[tuple[slice, slice, Tensor]]:
    """The tiles, few rows at a time with the keys that those see, and what is hidden in each."""
    for tile in tiles:
        for part in buckets(tile, terms.bucket_size):
            hidden = ~band(part, keys.k.device)
            if keys.key_mask is not None:
                hidden = hidden | ~rearrange(keys.key_mask[:, part.cols], "b j -> b 1 1 1 j")
            yield part.rows, part.cols, hidden


def _scores(q: Tensor, k: Tensor, terms: Terms) -> tuple[Tensor, Tensor | float]:
    """Scores [b, g, r, i, j], and the derivative of each by its q.k."""
    scores = einsum(q, k, "b i g r d, b j g d -> b g r i j").mul_(terms.scale)
    if terms.softclamp is None:
        return scores, terms.scale
    t = scores.div_(terms.softclamp).tanh_()
    return t * terms.softclamp, (1 - t.square()) * terms.scale


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """In the accumulator's dtype; query head i beside its key head i // (h / h_kv)."""
    k, v = (t.to(accumulator(t.dtype)) for t in (k, v))
    return _by_key_head(q, k.shape[2]), k, v


def _by_key_head(t: Tensor, h_kv: int) -> Tensor:
    return rearrange(t.to(accumulator(t.dtype)), "b i (g r) d -> b i g r d", g=h_kv)


def _finite(lse: Tensor) -> Tensor:
    """A row that sees nothing: exp(-inf - 0) is 0, where exp(-inf - -inf) would be NaN."""
    return lse.masked_fill(lse == -torch.inf, 0.0)
