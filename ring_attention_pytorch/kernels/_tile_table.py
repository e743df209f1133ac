"""Tables of tiles, in which a block of rows or columns finds the tiles that it is part of."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import accumulate
from operator import itemgetter
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ring_attention_pytorch.geometry.tiles import Tile
from ring_attention_pytorch.runtime.interfaces import Tiles
from ring_attention_pytorch.runtime.lasting import lasting


class TileTable(NamedTuple):
    """A table of tiles, and one of blocks of rows or columns, as the Triton kernels read them."""

    tiles: Tensor
    blocks: Tensor  # of each its number, and from which to which tile it looks
    count: int  # type: ignore[assignment]  # which a tuple has, too, for what nobody asks here


def tile_table(
    tiles: Sequence[Tile], side: Literal["rows", "cols"], block: int, of: Tensor, every: bool
) -> TileTable:
    """Return the table for blocks of one side of `of`, made once for tiles that are used again.

    It has those blocks that see anything, or `every` one.
    """
    key = side, block, of.shape[1] if every else None, of.device
    if not isinstance(tiles, Tiles):
        return _table_of(tuple(map(_numbers, tiles)), *key)
    return tiles.once(key, lambda: _make_table([*map(_numbers, tiles)], *key))


def _numbers(tile: Tile) -> tuple[int, ...]:
    rows, cols, left, right = tile
    if left is None:
        left = rows.stop - rows.start
    if right is None:
        right = cols.stop - cols.start
    return rows.start, rows.stop, cols.start, cols.stop, left, right


def _make_table(
    tiles: Sequence[tuple[int, ...]], side: str, block: int, every: int | None, device: torch.device
) -> TileTable:
    start, stop = (0, 1) if side == "rows" else (2, 3)
    tiles = sorted(tiles, key=itemgetter(start))
    starts = [tile[start] for tile in tiles]
    stops = [tile[stop] for tile in tiles]
    stops = list(accumulate(stops, max))  # the last up to each tile
    length = stops[-1] if every is None else every
    by_work = []
    for number in range(-(-length // block)):
        at = number * block
        # where many documents lie, a block looks at the tiles of a few
        first, last = bisect_right(stops, at), bisect_left(starts, at + block)
        if first < last or every is not None:
            work = sum(_seen(tile, at, at + block, side) for tile in tiles[first:last])
            by_work.append((work, number, first, last))
    # those that see the most go first, so that all end together
    by_work.sort(key=itemgetter(0), reverse=True)
    blocks = [block for _, *block in by_work]
    # from pageable memory: the copy ends before this returns, so any stream may read the table
    upload = partial(torch.tensor, dtype=torch.int32, device=device)
    of_tiles, of_blocks = lasting(lambda: (upload(tiles), upload(blocks)), device)
    return TileTable(of_tiles, of_blocks, len(blocks))


def _seen(tile: tuple[int, ...], start: int, stop: int, side: str) -> int:
    """Count how much of the tile's other side is seen by any of these rows, or columns."""
    a0, a1, b0, b1, back, ahead = tile
    if side == "cols":
        a0, a1, b0, b1, back, ahead = b0, b1, a0, a1, ahead, back
    start, stop = max(start, a0), min(stop, a1)
    first = max(b0, start - a0 + b0 - back)
    end = min(b1, stop - a0 + b0 + ahead)
    return max(0, end - first)


_table_of = lru_cache(maxsize=4096)(_make_table)
