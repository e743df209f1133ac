"""Tiles that one call can do whose kernel takes many sequences by cumulative lengths.

Packed documents make many small tiles, and most of them follow one another: such a run is one
call, each tile a sequence of it. What lies between them belongs to the allotment of the one before
and is not used.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from ring_attention_pytorch.contract import Tiles
from ring_attention_pytorch.kernels._whole import aligned, from_bottom_right
from ring_attention_pytorch.layouts import Tile

Side = tuple[slice, ...]


class Pack(NamedTuple):
    """Tiles of one bound, for one call.

    `sequences` are those of all samples, as flash attention names them; None is a single tile,
    which needs none. `gaps` are the rows, and the columns, between tiles, counted from the first.
    """

    rows: slice
    cols: slice
    left: int  # from the bottom right
    right: int
    gaps: tuple[Side, Side]
    sequences: dict[str, Tensor] | None

    def laid(self, *tensors: Tensor) -> list[Tensor]:
        """Tensors [b, n, h, d] as the call takes them: samples one after another."""
        tensors = aligned(*tensors)
        return tensors if self.sequences is None else [t.flatten(0, 1) for t in tensors]

    def laid_by_head(self, t: Tensor) -> Tensor:
        """The same of [b, h, n], as lse is."""
        return (t if self.sequences is None else rearrange(t, "b h n -> h (b n)")).contiguous()

    def found(self, t: Tensor, side: int, batch: int) -> Tensor:
        """[b, n, h, d] of what a call gave, 0 in gaps; side 0 is rows, 1 columns."""
        t = t if self.sequences is None else t.unflatten(0, (batch, -1))
        for gap in self.gaps[side]:
            t[:, gap] = 0
        return t

    def found_by_head(self, lse: Tensor, batch: int) -> Tensor:
        """[b, h, n] of the lse that a call gave, -inf in gaps."""
        lse = lse if self.sequences is None else rearrange(lse, "h (b n) -> b h n", b=batch)
        for gap in self.gaps[0]:
            lse[..., gap] = -torch.inf
        return lse


def packs(tiles: Sequence[Tile], like: Tensor, apart: bool) -> list[Pack]:
    """All tiles, in as few packs as come of taking each as soon as it fits, for samples like these.

    `apart`: no columns are in two tiles of a pack, so that each has its own gradient. Made once
    for tiles that are used again.
    """
    asked = "packs", apart, len(like), like.device
    if isinstance(tiles, Tiles):
        return tiles.once(asked, lambda: _make(tiles, *asked[1:]))
    return _make(tiles, *asked[1:])


def in_runs(tiles: Sequence[Tile], apart: bool) -> list[list[Tile]]:
    """Tiles of one bound, in runs whose rows ascend; if they are apart, their columns do too.

    >>> a, b = slice(0, 4), slice(4, 7)
    >>> tiles = [Tile(a, a, None, 0), Tile(b, a, None, None), Tile(b, b, None, 0)]
    >>> for apart in (False, True):
    ...     [[(t.rows.start, t.cols.stop) for t in run] for run in in_runs(tiles, apart)]
    [[(0, 4), (4, 7)]]
    [[(0, 4)], [(4, 7)]]
    """
    runs: list[list[Tile]] = []
    for tile in _joined(_cut(tiles)):
        bounds = from_bottom_right(tile)
        for run in runs:
            last = run[-1]
            ascends = last.rows.stop <= tile.rows.start
            if apart:
                ascends = ascends and last.cols.stop <= tile.cols.start
            if ascends and bounds == from_bottom_right(last):
                run.append(tile)
                break
        else:
            runs.append([tile])
    return runs


def _cut(tiles: Sequence[Tile]) -> Iterator[Tile]:
    """What shows all, in pieces whose rows begin and end where those of other tiles do."""
    borders = sorted({end for tile in tiles for end in (tile.rows.start, tile.rows.stop)})
    for tile in tiles:
        if tile[2:] != (None, None):
            yield tile
            continue
        ends = [at for at in borders if tile.rows.start <= at <= tile.rows.stop]
        yield from (tile._replace(rows=slice(*ends_of)) for ends_of in pairwise(ends))


def _joined(tiles: Iterable[Tile]) -> list[Tile]:
    """In order, and what shows all joined to the tile of the same rows that follows on its right.

    The bounds of that, from its bottom right, are those of both.
    """
    found: list[Tile] = []
    for tile in sorted(tiles, key=lambda t: (t.rows.start, t.cols.start)):
        rows, cols, left, right = tile
        while found and left is None and _full_left_of(found[-1], rows, cols.start):
            width = cols.start - found[-1].cols.start
            cols = slice(found.pop().cols.start, cols.stop)
            right = None if right is None else right + width
        found.append(Tile(rows, cols, left, right))
    return found


def _full_left_of(tile: Tile, rows: slice, start: int) -> bool:
    return (tile.rows, tile.cols.stop, *tile[2:]) == (rows, start, None, None)


def _make(tiles: Sequence[Tile], apart: bool, batch: int, device: torch.device) -> list[Pack]:
    return [_pack(run, batch, device) for run in in_runs(tiles, apart)]


def _pack(run: list[Tile], batch: int, device: torch.device) -> Pack:
    sides = [tile.rows for tile in run], [tile.cols for tile in run]
    (rows, row_gaps), (cols, col_gaps) = map(_spanned, sides)
    bounds = from_bottom_right(run[0])
    if len(run) == 1:
        return Pack(rows, cols, *bounds, ((), ()), None)
    sequences = {}
    for name, side in zip("qk", sides):
        first, last = min(at.start for at in side), max(at.stop for at in side)
        starts = [i * (last - first) + at.start - first for i in range(batch) for at in side]
        used = [at.stop - at.start for at in side]
        sequences[f"cu_seqlens_{name}"] = [*starts, batch * (last - first)]
        sequences[f"seqused_{name}"] = used * batch
    # from pageable memory: the copy ends before this returns, so any stream may read them
    on_device = {
        name: torch.tensor(numbers, dtype=torch.int32, device=device)
        for name, numbers in sequences.items()
    }
    return Pack(rows, cols, *bounds, (row_gaps, col_gaps), on_device)


def _spanned(side: list[slice]) -> tuple[slice, Side]:
    """All that they span, and what is between them where they ascend."""
    first, last = min(at.start for at in side), max(at.stop for at in side)
    gaps = (slice(a.stop - first, b.start - first) for a, b in pairwise(side))
    return slice(first, last), tuple(gap for gap in gaps if gap.start < gap.stop)
