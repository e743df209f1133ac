"""Attention on tiles in plain PyTorch: any device, any floating dtype, every feature.

Rows are taken `bucket_size` at a time, so at most `b * h * bucket_size * m` scores exist at once.
The algebra is flash attention's (Dao et al. 2022, section 3; backward from lse and delta).
"""

from collections.abc import Iterator

import torch
from einops import einsum, rearrange
from torch import Tensor

from ring_attention_pytorch.geometry.tiles import Tile, band, buckets
from ring_attention_pytorch.runtime.accumulate import OutputAccumulator
from ring_attention_pytorch.runtime.dropout import Dropout
from ring_attention_pytorch.runtime.interfaces import (
    Capabilities,
    Grads,
    KVBlock,
    MaskMod,
    Residuals,
    ScoreMods,
    Tiles,
    Traits,
)
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype, merge_

CAN = Capabilities(traits=Traits(taped=True))


def forward(
    q: Tensor, keys: KVBlock, tiles: Tiles, terms: ScoreMods, result: OutputAccumulator
) -> None:
    out, lse = result.begin_update()
    for rows, cols, hidden, bias, factor in visible_parts(keys, tiles, terms, q.shape[2]):
        q_, k, v = grouped(q[:, rows], keys.k[:, cols], keys.v[:, cols])
        scores = scores_of(q_, k, terms, bias)[0].masked_fill_(hidden, -torch.inf)
        part_lse = scores.logsumexp(dim=-1)
        p = scores.sub_(finite(part_lse).unsqueeze(-1)).exp_()
        part = einsum(_times_(p, factor), v, "b g r i j, b j g d -> b i g r d")
        part = rearrange(part, "b i g r d -> b i (g r) d")
        merge_(out[:, rows], lse[..., rows], part, rearrange(part_lse, "b g r i -> b (g r) i"))


def backward(saved: Residuals, keys: KVBlock, tiles: Tiles, terms: ScoreMods, grads: Grads) -> None:
    h_kv, running = keys.k.shape[2], [total.begin_update() for total in grads]
    for rows, cols, hidden, bias, factor in visible_parts(keys, tiles, terms, saved.q.shape[2]):
        q, k, v = grouped(saved.q[:, rows], keys.k[:, cols], keys.v[:, cols])
        dout = by_key_head(saved.dout[:, rows], h_kv)
        lse = rearrange(saved.lse[..., rows], "b (g r) i -> b g r i 1", g=h_kv)
        delta = rearrange(saved.delta[..., rows], "b (g r) i -> b g r i 1", g=h_kv)
        scores, slope = scores_of(q, k, terms, bias)
        p = scores.masked_fill_(hidden, -torch.inf).sub_(finite(lse)).exp_()
        dp = _times_(einsum(dout, v, "b i g r d, b j g d -> b g r i j"), factor)
        ds = dp.sub_(delta).mul_(p).mul_(slope)
        dq = einsum(ds, k, "b g r i j, b j g d -> b i g r d")
        running[0][:, rows] += rearrange(dq, "b i g r d -> b i (g r) d")
        running[1][:, cols] += einsum(ds, q, "b g r i j, b i g r d -> b j g d")
        p = _times_(p, factor)
        running[2][:, cols] += einsum(p, dout, "b g r i j, b i g r d -> b j g d")


def visible_parts(
    keys: KVBlock, tiles: Tiles, terms: ScoreMods, h: int
) -> Iterator[tuple[slice, slice, Tensor, Tensor | None, Tensor | None]]:
    """Yield the tiles in parts of few rows, as (rows, columns, hidden, bias, dropout factor).

    `hidden` masks scores, the bias is added to scores, and dropout's factor of probabilities is 0
    or 1 / (1 - rate); they broadcast to [b, g, r, i, j], and the last two can be None.
    """
    dropout = terms.dropout
    marks = None if dropout is None else _marks(keys, tiles, dropout, h)
    for tile in tiles:
        for part in buckets(tile, terms.bucket_size):
            hidden = ~band(part, keys.k.device)
            if keys.key_mask is not None:
                hidden = hidden | ~rearrange(keys.key_mask[:, part.cols], "b j -> b 1 1 1 j")
            if terms.mask_mod is not None:
                hidden = hidden | ~_allowed(keys, tiles, part, terms.mask_mod, h)
            bias = None
            if terms.alibi is not None:
                row_at = tiles.rows_at[part.rows].unsqueeze(1)
                distance = (row_at - tiles.cols_at[part.cols]).abs()
                slopes = rearrange(terms.alibi, "(g r) -> g r 1 1", g=keys.k.shape[2])
                bias = -slopes * distance
            factor = None
            if dropout is not None and marks is not None:
                first, second = marks
                kept = dropout.kept(
                    first[..., part.rows, :],
                    second[..., part.rows, :],
                    tiles.col_numbers[part.cols],
                )
                factor = kept.to(accumulation_dtype(keys.k.dtype))
                factor.mul_(dropout.inverse)
            yield part.rows, part.cols, hidden, bias, factor


def _marks(keys: KVBlock, tiles: Tiles, dropout: Dropout, h: int) -> tuple[Tensor, Tensor]:
    """Return the marks by which dropout draws for each query, int32 [b, g, r, n, 1]."""
    heads = torch.arange(h, dtype=torch.int32, device=keys.k.device)
    return dropout.marks(
        rearrange(_samples(keys, tiles).int(), "b -> b 1 1 1 1"),
        rearrange(heads, "(g r) -> 1 g r 1 1", g=keys.k.shape[2]),
        tiles.row_numbers.unsqueeze(1),
    )


def _times_(t: Tensor, factor: Tensor | None) -> Tensor:
    """Multiply t by dropout's factor in place, unless there is no dropout."""
    return t if factor is None else t.mul_(factor)


def _allowed(keys: KVBlock, tiles: Tiles, part: Tile, mask_mod: MaskMod, h: int) -> Tensor:
    """Return the mask of pairs that the predicate shows, bool [b, g, r, i, j]."""
    b, _, h_kv, _ = keys.k.shape
    seen = mask_mod(
        rearrange(_samples(keys, tiles), "b -> b 1 1 1"),
        rearrange(torch.arange(h, device=keys.k.device), "h -> h 1 1"),
        tiles.rows_at[part.rows].long().unsqueeze(1),
        tiles.cols_at[part.cols].long(),
    )
    shape = b, h, len(tiles.rows_at[part.rows]), len(tiles.cols_at[part.cols])
    return rearrange(seen.expand(shape), "b (g r) i j -> b g r i j", g=h_kv)


def _samples(keys: KVBlock, tiles: Tiles) -> Tensor:
    """Return the samples' numbers in the batch, `[b]`."""
    return torch.arange(tiles.first, tiles.first + len(keys.k), device=keys.k.device)


def scores_of(
    q: Tensor, k: Tensor, terms: ScoreMods, bias: Tensor | None
) -> tuple[Tensor, Tensor | float]:
    """Return scores [b, g, r, i, j], and each score's derivative by q.k."""
    scores = einsum(q, k, "b i g r d, b j g d -> b g r i j").mul_(terms.scale)
    slope: Tensor | float = terms.scale
    if terms.softclamp is not None:
        t = scores.div_(terms.softclamp)
        t.tanh_()
        scores, slope = t * terms.softclamp, (1 - t.square()) * terms.scale
    return scores if bias is None else scores.add_(bias), slope


def grouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast to the accumulator's dtype, and group query heads by key head: i // (h / h_kv)."""
    k = k.to(accumulation_dtype(k.dtype))
    v = v.to(accumulation_dtype(v.dtype))
    return by_key_head(q, k.shape[2]), k, v


def by_key_head(t: Tensor, h_kv: int) -> Tensor:
    return rearrange(t.to(accumulation_dtype(t.dtype)), "b i (g r) d -> b i g r d", g=h_kv)


def finite(lse: Tensor) -> Tensor:
    """Return lse, 0 where a row sees no key: exp(-inf - 0) is 0, exp(-inf - -inf) would be NaN."""
    return lse.masked_fill(lse == -torch.inf, 0.0)
