"""Tiles as sequences of one call, for a kernel that takes many of different lengths.

Packed documents make many small tiles. Those of one bound whose rows ascend are one call: each tile
is a sequence that begins at its own first row and column (`cu_seqlens`) and is as long as the tile
(`seqused`). What lies between tiles belongs to none: the kernel does not write it.

Forward, columns may be in several sequences and come in any order: where lengths are given, the
kernel reads no more of `cu_seqlens_k` than where each begins. Where each needs a gradient of its
own they ascend too. A sequence is read to the end of its last block: what is NaN or infinite in
the first tokens of the next may spoil it.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from ring_attention_pytorch.contract import Tiles
from ring_attention_pytorch.kernels._whole import aligned, from_bottom_right
from ring_attention_pytorch.layouts import Tile

_MOST = 256  # sequences of a call: beyond that flash-attn 4 looks them up in another way
_ALIGNED = 4  # numbers of 32 bits: what kernels load at once


class Pack(NamedTuple):
    """The tiles of one call, of all samples.

    `sequences` are as flash attention names them; None is a single tile, which needs none. Gaps
    are the numbers of the rows, and of the columns, between tiles; None is that there are none.
    """

    rows: slice
    cols: slice
    left: int  # from the bottom right
    right: int
    sequences: dict[str, Tensor] | None = None
    row_gaps: Tensor | None = None
    col_gaps: Tensor | None = None

    def flat(self, *tensors: Tensor) -> list[Tensor]:
        """Tensors [b, n, h, d] as the call takes them: samples one after another."""
        tensors = aligned(*tensors)
        return tensors if self.sequences is None else [t.flatten(0, 1) for t in tensors]

    def flat_by_head(self, t: Tensor) -> Tensor:
        """The same of [b, h, n], as lse is."""
        return (t if self.sequences is None else rearrange(t, "b h n -> h (b n)")).contiguous()

    def of_rows(self, t: Tensor, batch: int) -> Tensor:
        """[b, n, h, d] of what the call gave for rows, 0 between tiles."""
        return _filled(self._by_sample(t, batch), 1, self.row_gaps, 0.0)

    def of_cols(self, t: Tensor, batch: int) -> Tensor:
        """[b, m, h_kv, d] of what the call gave for columns, 0 between tiles."""
        return _filled(self._by_sample(t, batch), 1, self.col_gaps, 0.0)

    def of_lse(self, lse: Tensor, batch: int) -> Tensor:
        """[b, h, n] of the lse that the call gave, -inf between tiles."""
        if self.sequences is not None:
            lse = rearrange(lse, "h (b n) -> b h n", b=batch)
        return _filled(lse, 2, self.row_gaps, -torch.inf)

    def _by_sample(self, t: Tensor, batch: int) -> Tensor:
        return t if self.sequences is None else t.unflatten(0, (batch, -1))


def packs(tiles: Sequence[Tile], like: Tensor, disjoint_keys: bool) -> list[Pack]:
    """All tiles, in as few packs as come of taking each as soon as it fits, for samples like these.

    With disjoint_keys no column is in two tiles of a pack. Made once for tiles that are used again.
    """
    batch, device = len(like), like.device

    def make() -> list[Pack]:
        runs = in_runs(tiles, disjoint_keys, max(1, _MOST // batch))
        return [_pack(run, batch, device) for run in runs]

    if isinstance(tiles, Tiles):
        return tiles.once(("packs", disjoint_keys, batch, device), make)
    return make()


def in_runs(
    tiles: Sequence[Tile], disjoint_keys: bool = False, most: int = _MOST
) -> list[list[Tile]]:
    """At most so many tiles of one bound, whose rows ascend; with disjoint_keys columns do too.

    >>> a, b = slice(0, 4), slice(4, 7)
    >>> tiles = [Tile(a, a, None, 0), Tile(b, a, None, None), Tile(b, b, None, 0)]
    >>> for disjoint_keys in (False, True):
    ...     runs = in_runs(tiles, disjoint_keys)
    ...     [[(t.rows.start, t.cols.stop) for t in run] for run in runs]
    [[(0, 4), (4, 7)]]
    [[(0, 4)], [(4, 7)]]
    """
    runs: list[list[Tile]] = []
    for tile in _joined(_cut(tiles)):
        bounds = from_bottom_right(tile)
        for run in runs:
            last = run[-1]
            ascends = last.rows.stop <= tile.rows.start
            if disjoint_keys:
                ascends = ascends and last.cols.stop <= tile.cols.start
            if ascends and bounds == from_bottom_right(last) and len(run) < most:
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
        first, last = bisect_left(borders, tile.rows.start), bisect_right(borders, tile.rows.stop)
        for start, stop in pairwise(borders[first:last]):
            yield tile._replace(rows=slice(start, stop))


def _joined(tiles: Iterable[Tile]) -> list[Tile]:
    """In order, and what shows all joined to the tile of the same rows that follows on its right.

    The bounds of that, from its bottom right, are those of both: each of its rows sees something,
    and so all that lies left of it.
    """
    found: list[Tile] = []
    for tile in sorted(tiles, key=lambda t: (t.rows.start, t.cols.start)):
        rows, cols, left, right = tile
        while found and left is None and _shows_all_before(found[-1], rows, cols.start):
            width = cols.start - found[-1].cols.start
            cols = slice(found.pop().cols.start, cols.stop)
            right = None if right is None else right + width
        found.append(Tile(rows, cols, left, right))
    return found


def _shows_all_before(tile: Tile, rows: slice, col: int) -> bool:
    """Whether the tile shows these rows all that it has, up to that column."""
    return (tile.rows, tile.cols.stop, *tile[2:]) == (rows, col, None, None)


def _pack(run: list[Tile], batch: int, device: torch.device) -> Pack:
    """One call, its numbers brought to the device together."""
    sides = [tile.rows for tile in run], [tile.cols for tile in run]
    rows, cols = map(_spanned, sides)
    start = Pack(rows, cols, *from_bottom_right(run[0]))
    if len(run) == 1:
        return start
    numbers = [*_sequences(sides[0], batch), *_sequences(sides[1], batch), *map(_gaps, sides)]
    cu_q, used_q, cu_k, used_k, row_gaps, col_gaps = _on_device(numbers, device)
    return start._replace(
        sequences=dict(cu_seqlens_q=cu_q, seqused_q=used_q, cu_seqlens_k=cu_k, seqused_k=used_k),
        row_gaps=row_gaps.long() if len(row_gaps) else None,
        col_gaps=col_gaps.long() if len(col_gaps) else None,
    )


def _spanned(side: list[slice]) -> slice:
    return slice(min(at.start for at in side), max(at.stop for at in side))


def _sequences(side: list[slice], batch: int) -> tuple[list[int], list[int]]:
    """Where those of all samples start, and the end; and how long they are.

    >>> _sequences([slice(3, 5), slice(6, 9)], batch=2)
    ([0, 3, 6, 9, 12], [2, 3, 2, 3])
    """
    first, last = _spanned(side).start, _spanned(side).stop
    starts = [i * (last - first) + at.start - first for i in range(batch) for at in side]
    return [*starts, batch * (last - first)], [at.stop - at.start for at in side] * batch


def _gaps(side: list[slice]) -> list[int]:
    """What is between those that ascend, counted from the first."""
    first = side[0].start
    return [i - first for a, b in pairwise(side) for i in range(a.stop, b.start)]


def _on_device(lists: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """int32, each where kernels can load it, by one copy."""
    padded = [-(-len(numbers) // _ALIGNED) * _ALIGNED for numbers in lists]
    whole = torch.zeros(sum(padded), dtype=torch.int32)
    places = [
        slice(start, start + len(numbers))
        for start, numbers in zip(accumulate(padded, initial=0), lists)
    ]
    for at, numbers in zip(places, lists):
        whole[at] = torch.tensor(numbers, dtype=torch.int32)
    # from pageable memory: the copy ends before this returns, so any stream may read it
    moved = whole.to(device)
    return [moved[at] for at in places]


def _filled(t: Tensor, dim: int, at: Tensor | None, value: float) -> Tensor:
    return t if at is None else t.index_fill_(dim, at, value)
