"""Tables on the device in which a block of rows or columns finds the tiles that cover it."""

from collections.abc import Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ring_attention_pytorch.geometry.tiles import Tile
from ring_attention_pytorch.runtime.graph_pool import outside_graph_pool
from ring_attention_pytorch.runtime.interfaces import Tiles
from ring_attention_pytorch.runtime.uploads import uploaded

_ALIGNED = 4  # ints: kernels are compiled for tables that begin at a multiple of 16 bytes


class TileTable(NamedTuple):
    """A table of tiles, and one of blocks of rows or columns, as the Triton kernels read them.

    A line of `blocks` has the block's number, and the first and the end of its tiles.
    """

    tiles: Tensor
    blocks: Tensor
    count: int  # type: ignore[assignment]  # hides tuple.count, which is not used here


def tile_table(
    tiles: Sequence[Tile], side: Literal["rows", "cols"], block: int, of: Tensor, every: bool
) -> TileTable:
    """Return the table for blocks of one side of `of`, cached in `Tiles`.

    It has the blocks with a visible score, or `every` block.
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
    tiles: Sequence[tuple[int, ...]],
    side: str,
    block: int,
    every: int | None,
    device: torch.device,
) -> TileTable:
    of_tiles, of_blocks = _tables(tiles, side, block, every)
    filler = of_tiles.new_zeros(-of_tiles.numel() % _ALIGNED)
    both = torch.cat((of_tiles.flatten(), filler, of_blocks.flatten())).int()
    there = outside_graph_pool(lambda: uploaded(both, device), device)
    at = of_tiles.numel() + len(filler)
    return TileTable(
        there[: of_tiles.numel()].view_as(of_tiles), there[at:].view_as(of_blocks), len(of_blocks)
    )


def _tables(
    tiles: Sequence[tuple[int, ...]], side: str, block: int, every: int | None
) -> tuple[Tensor, Tensor]:
    """Build the tables of tiles and of blocks on the host: documents have thousands of blocks."""
    start, stop = (0, 1) if side == "rows" else (2, 3)
    end = max(tile[stop] for tile in tiles) if every is None else every
    at = torch.arange(0, end, block, device="cpu")
    table = torch.tensor(sorted(tiles, key=itemgetter(start)), device="cpu", dtype=torch.int64)
    stops = table[:, stop].cummax(0).values  # the last up to each tile
    # with many documents, a block looks at the tiles of a few only
    first = torch.searchsorted(stops, at, right=True)
    last = torch.searchsorted(table[:, start].contiguous(), at + block)
    seen = _seen(table, first, last, at, block, side)
    # blocks that see the most begin first, so that all end at about the same time
    number = seen.argsort(descending=True, stable=True)
    if every is None:
        number = number[(last > first)[number]]
    return table, torch.stack([number, first[number], last[number]], dim=1)


def _seen(tiles: Tensor, first: Tensor, last: Tensor, at: Tensor, block: int, side: str) -> Tensor:
    """Count the rows or columns of the other side that each block sees, in tiles `first:last`."""
    each = (last - first).clamp(min=0)
    of = torch.repeat_interleave(each)  # the block of each pair of a block and its tile
    before = (each.cumsum(0) - each)[of]
    tile = torch.arange(len(of), device="cpu") - before + first[of]
    a0, a1, b0, b1, back, ahead = tiles[tile].unbind(1)
    if side == "cols":
        a0, a1, b0, b1, back, ahead = b0, b1, a0, a1, ahead, back
    start, stop = at[of].maximum(a0), (at[of] + block).minimum(a1)
    seen = (stop - a0 + b0 + ahead).minimum(b1) - (start - a0 + b0 - back).maximum(b0)
    return torch.zeros_like(at).index_add_(0, of, seen.clamp(min=0))


_table_of = lru_cache(maxsize=4096)(_make_table)
