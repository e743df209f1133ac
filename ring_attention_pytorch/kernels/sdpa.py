"""PyTorch's own flash attention on the CPU, with its log-sum-exp and its backward.

The op supports full and causal tiles (its diagonal starts at the top left, as ours does) and an
additive mask. Causal tiles are passed in pieces, because it computes many hidden scores. Every
other band is passed some rows at a time, with a small mask of their own.

The op must not get an empty tile: it divides by the length. The lse of a row that sees no key is 0
or, by dtype and CPU, NaN. It assumes a last stride of 1 for all inputs. It fills hidden causal
scores with `-inf * scale`, which is -inf only if scale is positive.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from ring_attention_pytorch.geometry.tiles import Tile, band, buckets
from ring_attention_pytorch.runtime.accumulate import OutputAccumulator
from ring_attention_pytorch.runtime.interfaces import (
    FEATURES,
    Capabilities,
    Grads,
    KVBlock,
    Residuals,
    ScoreMods,
    Traits,
)
from ring_attention_pytorch.runtime.tape import opaque

_SMALLEST = 256  # keys of the largest causal tile that is not worth cutting


class _Call(NamedTuple):
    """One call of the op: `mask` is additive, `unseen` marks rows that see no key, None if none."""

    rows: slice
    cols: slice
    causal: bool
    mask: Tensor | None
    unseen: Tensor | None


CAN = Capabilities(
    devices=("cpu",),
    dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    traits=Traits(taped=True),
    features=FEATURES - {"softclamp", "unusual_scale", "alibi", "mask_mod", "dropout"},
)


def forward(
    q: Tensor, keys: KVBlock, tiles: Sequence[Tile], terms: ScoreMods, result: OutputAccumulator
) -> None:
    d_v = keys.v.shape[-1]
    width = max(q.shape[-1], d_v)  # the op needs equal head sizes of k and v
    q, k, v = (_heads_first(t, width) for t in (q, keys.k, keys.v))
    for call in _calls(q, keys, tiles, terms):
        part, part_lse = _attention(
            q[:, :, call.rows], k[:, :, call.cols], v[:, :, call.cols],
            call.causal, call.mask, terms.scale,
        )  # fmt: skip
        if call.unseen is not None:
            part_lse = part_lse.masked_fill(call.unseen.unsqueeze(1), -torch.inf)
            part = part.masked_fill(rearrange(call.unseen, "b n -> b 1 n 1"), 0.0)
        result.add(call.rows, part.transpose(1, 2)[..., :d_v], part_lse)


def backward(
    saved: Residuals, keys: KVBlock, tiles: Sequence[Tile], terms: ScoreMods, grads: Grads
) -> None:
    q, k, v, out, dout = saved.q, keys.k, keys.v, saved.out, saved.dout
    d, d_v = k.shape[-1], v.shape[-1]
    if q.dtype == torch.float16 or saved.dlse is not None:
        # parts of gradients, or dlse, can overflow 16 bits
        q, k, v, out, dout = (t.to(saved.lse.dtype) for t in (q, k, v, out, dout))
    if saved.dlse is not None:
        # an extra column, in which v is 0, out 1 and dout -dlse, subtracts dlse from delta
        column = rearrange(saved.dlse, "b h n -> b n h 1")
        out, v = F.pad(out, (0, 1), value=1.0), F.pad(v, (0, 1))
        dout = torch.cat((dout, -column), -1)
    # rows that see no key at all: any finite lse keeps exp(-inf - lse) at 0
    lse = saved.lse.clamp(min=torch.finfo(saved.lse.dtype).min)
    width = max(d, v.shape[-1])
    q, k, v, out, dout = (_heads_first(t, width) for t in (q, k, v, out, dout))
    for call in _calls(q, keys, tiles, terms):
        rows, cols = (slice(None), slice(None), call.rows), (slice(None), slice(None), call.cols)
        parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout[rows], q[rows], k[cols], v[cols], out[rows], lse[rows],
            0.0,  # dropout
            call.causal, attn_mask=call.mask, scale=terms.scale,
        )  # fmt: skip
        places = (call.rows, d), (call.cols, d), (call.cols, d_v)
        for total, (at, width), part in zip(grads, places, parts):
            total.add(at, part.transpose(1, 2)[..., :width])


def _heads_first(t: Tensor, width: int) -> Tensor:
    """Return `[b, n, h, d]` as `[b, h, n, width]`, with zeros, and with a last stride of 1.

    `contiguous()` leaves any stride to a size of 1, which padding would take over; einops would
    take 0.6 us more.
    """
    if t.stride(-1) != 1:
        t = t.clone(memory_format=torch.contiguous_format)
    t = t.transpose(1, 2)
    return t if t.shape[-1] == width else F.pad(t, (0, width - t.shape[-1]))


@opaque
def _attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the op's out `[b, h, n, d]` and lse, corrected to be NaN where scores are."""
    # from torch itself: torch.ops takes the host 4 us more
    out, lse = torch._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask, scale=scale
    )
    if mask is not None and (bad := _bad(k, lse)) is not None:
        # -inf added to NaN is NaN: compute without these keys, then mark the rows that see any
        k, seen = k.masked_fill(bad.unsqueeze(-1), 0.0), mask == 0
        bad = bad.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        out, lse = torch._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=scale
        )
        spoiled = (seen & bad.unsqueeze(2)).any(-1)
        out = out.masked_fill(spoiled.unsqueeze(-1), torch.nan)
        lse = lse.masked_fill(spoiled, torch.nan)
    if torch.count_nonzero(lse).item() == lse.numel():
        return out, lse
    # rows that the op takes for rows without keys: all their scores are NaN
    lost = (lse == 0) & (q.isnan().any(-1) | k.isnan().any())
    return out.masked_fill(lost.unsqueeze(-1), torch.nan), lse.masked_fill(lost, torch.nan)


def _bad(k: Tensor, lse: Tensor) -> Tensor | None:
    """Mark keys [b, h_kv, m] that have NaN, if any lse is NaN; None if no key has."""
    if not lse.isnan().any():
        return None
    bad = k.isnan().any(-1)
    return bad if bad.any() else None


def _calls(q: Tensor, keys: KVBlock, tiles: Sequence[Tile], terms: ScoreMods) -> Iterator[_Call]:
    for tile in tiles:
        simple = tile.left is None and tile.right in (None, 0)
        cut = _pieces if simple else buckets
        for part in cut(tile, terms.bucket_size):
            causal = part[2:] == (None, 0)
            whole = part[2:] == (None, None)
            seen = mask = unseen = None
            if not (causal or whole):
                seen = band(part, q.device)
            if keys.key_mask is not None:
                visible = keys.key_mask[:, part.cols]
                unseen = _unseen(visible, part)
                upright = rearrange(visible, "b j -> b 1 1 j")
                seen = upright & (True if seen is None else seen)
            if seen is not None:
                mask = torch.zeros_like(seen, dtype=q.dtype)
                mask.masked_fill_(~seen, -torch.inf)
            yield _Call(part.rows, part.cols, causal, mask, unseen)


def _pieces(tile: Tile, bucket_size: int) -> Iterator[Tile]:
    """Split a causal tile into small causal tiles along its diagonal and full ones below it.

    The op computes whole blocks of 256 rows by 512 keys: a quarter too much for a causal tile of
    2048. In pieces that tile takes 8 % less CPU time backward and 3 % less forward; one of 1024
    takes 15 % and 5 % less.
    """
    rows, cols = tile.rows, tile.cols
    size, smallest = cols.stop - cols.start, min(_SMALLEST, bucket_size)
    if tile.right is None or size <= smallest:
        yield tile
        return
    half = -(-size // (2 * smallest)) * smallest
    row, col = rows.start + half, cols.start + half
    above, below = slice(rows.start, row), slice(row, rows.stop)
    left, right = slice(cols.start, col), slice(col, cols.stop)
    yield from _pieces(Tile(above, left, None, 0), bucket_size)
    yield Tile(below, left, None, None)
    yield from _pieces(Tile(below, right, None, 0), bucket_size)


def _unseen(visible: Tensor, tile: Tile) -> Tensor:
    """Mark rows [b, n] of a tile that see no key; `visible` [b, m] marks its unmasked keys."""
    n, m = tile.rows.stop - tile.rows.start, visible.shape[1]
    row = torch.arange(n, device=visible.device)
    before = F.pad(visible.cumsum(dim=1), (1, 0))  # [b, m + 1]: unmasked keys before key j
    ahead = m if tile.right is None else tile.right
    back = n if tile.left is None else tile.left
    end, start = (row + 1 + ahead).clamp(0, m), (row - back).clamp(0, m)
    return before[:, end] == before[:, start]
