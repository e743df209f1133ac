"""Helpers of kernels that return whole parts and have a flash attention's interface."""

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
_ALIGNMENT = 16  # bytes: what these kernels load at once


def from_bottom_right(tile: Tile) -> tuple[int, int]:
    """Return a tile's (left, right) as flash attention counts them, from the bottom right corner.

    There -1 is no bound, and no other bound can be negative: the last row of a tile sees its last
    column.

    >>> from_bottom_right(Tile(slice(0, 4), slice(0, 6), 1, 2))
    (3, 0)
    """
    rows, cols, left, right = tile
    shift = (cols.stop - cols.start) - (rows.stop - rows.start)
    left = NO_BOUND if left is None else left + shift
    right = NO_BOUND if right is None else right - shift
    return left, right


def windows(tiles: Sequence[Tile]) -> Iterator[tuple[Tile, tuple[int, int]]]:
    """Yield tiles with (left, right) as flash-attn 2 counts them, some of them in parts.

    flash-attn 2 reads a bound of as many as there are columns as no bound. Beside another bound it
    reads no bound as one of as many as there are columns. Where rows are more than columns neither
    is true of the first rows.

    >>> [(t.rows, window) for t, window in windows([Tile(slice(0, 9), slice(0, 4), None, 1)])]
    [(slice(0, 3, None), (-1, 0)), (slice(3, 9, None), (-1, -1))]
    """
    for tile in tiles:
        for part in _apart(tile):
            yield part, from_bottom_right(part)


def _apart(tile: Tile) -> Iterator[Tile]:
    """Yield the rows of a tile that see all columns on one side apart from those that do not."""
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
    """Return the context of one of the calls that compute these tiles, and write this memory.

    It is a side stream, beside the other calls, where the tiles allow it.
    """
    if isinstance(tiles, Tiles) and tiles.concurrent:
        return side_stream(keys.k.device, keys.own, *memory)
    return nullcontext()


def part(t: Tensor, at: slice) -> Tensor:
    """Return these tokens of `[b, n, ...]`; all of them are the tensor itself, without a view."""
    return t if at == slice(0, t.shape[1]) else t[:, at]


def aligned(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors where they are if a kernel can read them there, else laid out anew."""
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
    """Compute forward by an op with the windows of flash-attn 2.

    `attend` makes (out, lse) of q, k, v, the terms of scores, and a window.
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
    """Compute backward by an op with the windows of flash-attn 2.

    `differentiate` makes (dq, dk, dv) of q, k, v, out, dout, lse, the terms of scores, and a
    window. If `placed` it is told last where to write them.
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
    """Compute the whole backward by a `backward` that knows only out's gradient.

    A score's share of dlse is p * dlse. A second call gives it: there v is 0 and out * dout is
    -dlse, which is brought to at most 1 for 16 bits to hold it.
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
