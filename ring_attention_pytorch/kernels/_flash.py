"""Helpers for kernels with flash attention's interface, which return parts in new tensors."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from math import gcd

import torch
from einops import rearrange
from torch import Tensor

from ring_attention_pytorch.geometry.tiles import Tile
from ring_attention_pytorch.runtime.accumulate import GradAccumulator, OutputAccumulator
from ring_attention_pytorch.runtime.interfaces import Grads, KVBlock, Residuals, ScoreMods, Tiles
from ring_attention_pytorch.runtime.streams import side_stream

NO_BOUND = -1
_ALIGNMENT = 16  # bytes that these kernels load at once


def from_bottom_right(tile: Tile) -> tuple[int, int]:
    """Return a tile's (left, right) in flash attention's convention, from the bottom right corner.

    -1 is no bound. Other bounds are never negative: the last row of a tile sees its last column.

    >>> from_bottom_right(Tile(slice(0, 4), slice(0, 6), 1, 2))
    (3, 0)
    """
    rows, cols, left, right = tile
    shift = (cols.stop - cols.start) - (rows.stop - rows.start)
    left = NO_BOUND if left is None else left + shift
    right = NO_BOUND if right is None else right - shift
    return left, right


def windows(tiles: Sequence[Tile]) -> Iterator[tuple[Tile, tuple[int, int]]]:
    """Yield tiles, some of them split, with (left, right) in flash-attn 2's convention.

    flash-attn 2 takes a bound of at least the number of columns for no bound. Next to another bound
    it takes no bound for one of the number of columns. With more rows than columns both are wrong
    for the first rows, so these become a part of their own.

    >>> [(t.rows, window) for t, window in windows([Tile(slice(0, 9), slice(0, 4), None, 1)])]
    [(slice(0, 3, None), (-1, 0)), (slice(3, 9, None), (-1, -1))]
    """
    for tile in tiles:
        for part in _apart(tile):
            yield part, from_bottom_right(part)


def _apart(tile: Tile) -> Iterator[Tile]:
    """Split a tile's rows into those that see all columns on one side and those that do not."""
    rows, cols, left, right = tile
    n, m = rows.stop - rows.start, cols.stop - cols.start
    if left is not None and left >= n - 1:
        left = None
    if right is not None and right >= m - 1:
        right = None
    first: tuple[int | None, int | None]
    if right is not None and right + n - m >= m:  # rows from here on see the last column
        cut, first = m - right, (left, right)
    elif left is not None and right is None and n > m + 1:  # rows up to here see the first
        cut, first = left + 1, (None, None)
    else:
        yield Tile(rows, cols, left, right)
        return
    middle = rows.start + cut
    yield Tile(slice(rows.start, middle), cols, *first)
    left = None if left is None else left - cut
    yield from _apart(Tile(slice(middle, rows.stop), cols, left, None))


def lane(tiles: Sequence[Tile], keys: KVBlock, *memory: Tensor) -> AbstractContextManager[None]:
    """Return the context of one of the calls for these tiles, which writes `memory`.

    It is a side stream, so that calls overlap, if the tiles allow it.
    """
    if isinstance(tiles, Tiles) and tiles.concurrent:
        return side_stream(keys.k.device, keys.own, *memory)
    return nullcontext()


def part(t: Tensor, at: slice) -> Tensor:
    """Slice the tokens of `[b, n, ...]`; return the tensor itself, not a view, for all of them."""
    return t if at == slice(0, t.shape[1]) else t[:, at]


def aligned(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors, each copied to contiguous memory unless a kernel can read it in place."""
    return [t if _readable(t) else t.clone(memory_format=torch.contiguous_format) for t in tensors]


def _readable(t: Tensor) -> bool:
    *strides, last = t.stride()
    return (
        last == 1
        and t.data_ptr() % _ALIGNMENT == 0
        and gcd(*strides) * t.element_size() % _ALIGNMENT == 0
        and min(strides) > 0
    )


def forward_in_windows(
    attend: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    keys: KVBlock,
    tiles: Sequence[Tile],
    terms: ScoreMods,
    result: OutputAccumulator,
) -> None:
    """Compute forward by an op with flash-attn 2's window convention.

    `attend(q, k, v, terms, window)` returns (out, lse).
    """
    for tile, window in windows(tiles) if q.numel() else ():
        with lane(tiles, keys):
            operands = aligned(part(q, tile.rows), part(keys.k, tile.cols), part(keys.v, tile.cols))
            out, lse = attend(*operands, terms, window)
        result.add(tile.rows, out, lse)


def backward_in_windows(
    differentiate: Callable[..., Sequence[Tensor]],
    placed: bool,
    saved: Residuals,
    keys: KVBlock,
    tiles: Sequence[Tile],
    terms: ScoreMods,
    grads: Grads,
) -> None:
    """Compute backward by an op with flash-attn 2's window convention.

    `differentiate(q, k, v, out, dout, lse, terms, window)` returns (dq, dk, dv). If `placed`, its
    last three arguments are the memory for them.
    """
    for tile, window in windows(tiles) if saved.q.numel() else ():
        rows, cols = tile.rows, tile.cols
        places = rows, cols, cols
        room = [total.alloc(at) for total, at in zip(grads, places)] if placed else []
        with lane(tiles, keys, *room):
            operands = aligned(
                part(saved.q, rows),
                part(keys.k, cols),
                part(keys.v, cols),
                part(saved.out, rows),
                part(saved.dout, rows),
            )
            lse = saved.lse[..., rows].contiguous()
            parts = differentiate(*operands, lse, terms, window, *room)
        for total, at, t in zip(grads, places, parts):
            total.add(at, t)


def with_lse_gradient(
    backward: Callable[[Residuals, KVBlock, Sequence[Tile], ScoreMods, Grads], None],
    saved: Residuals,
    keys: KVBlock,
    tiles: Sequence[Tile],
    terms: ScoreMods,
    grads: Grads,
) -> None:
    """Compute the whole backward by a `backward` that supports only the gradient of out.

    dlse adds p * dlse to a score's gradient. A second call computes it, with v = 0 and
    out * dout = -dlse, which is scaled to at most 1 so that it fits in 16 bits.
    """
    backward(saved, keys, tiles, terms, grads)
    if saved.dlse is None or not saved.dlse.numel():
        return
    size = saved.dlse.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)
    out = torch.zeros_like(saved.out)
    out[..., 0] = 1
    dout = -out * rearrange(saved.dlse / size, "b h n -> b n h 1").to(out.dtype)
    nothing = keys._replace(v=torch.zeros_like(keys.v))
    share = Grads(GradAccumulator(saved.q), GradAccumulator(keys.k), GradAccumulator(keys.v))
    backward(replace(saved, out=out, dout=dout, dlse=None), nothing, tiles, terms, share)
    for total, part in zip(grads[:2], share):
        total.begin_update().addcmul_(part.begin_update(), size)
