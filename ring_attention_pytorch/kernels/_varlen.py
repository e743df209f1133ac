"""Tiles as sequences of one call, for a kernel that takes many sequences of different lengths.

Packed documents make many small tiles. Tiles with equal bounds and ascending rows are one call.
Each tile is a sequence that begins at its own first row and column (`cu_seqlens`) and has the
tile's length (`seqused`). The kernel does not write rows and columns between tiles. One tile or two
are calls of their own.

Forward, columns can be in several sequences and in any order: with lengths given, the kernel reads
only the beginnings of sequences in `cu_seqlens_k`. If each column needs a gradient of its own,
columns ascend too. A sequence is read to the end of its last block, so NaN or inf in the first
tokens of the next one can leak into it.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from ring_attention_pytorch.geometry.tiles import Tile
from ring_attention_pytorch.kernels._flash import aligned, from_bottom_right
from ring_attention_pytorch.runtime.accumulate import GradAccumulator, OutputAccumulator
from ring_attention_pytorch.runtime.graph_pool import outside_graph_pool
from ring_attention_pytorch.runtime.interfaces import Tiles
from ring_attention_pytorch.runtime.uploads import uploaded

_MOST = 256  # sequences per call: with more, flash-attn 4 looks them up in another way
_FEW = 2  # so few tiles are calls of their own: with lengths the kernel is a twentieth slower
_ALIGNED = 4  # 32-bit numbers that kernels load at once


class VarlenCall(NamedTuple):
    """The tiles of one call, of all samples.

    `sequences` are flash attention's keyword arguments; a single tile needs none. `row_gaps` are
    the indices of rows between tiles, and, if keys are disjoint, `col_gaps` the indices of columns;
    None if there is no gap.
    """

    rows: slice
    cols: slice
    left: int  # from the bottom right
    right: int
    sequences: Mapping[str, Tensor] = MappingProxyType({})
    row_gaps: Tensor | None = None
    col_gaps: Tensor | None = None

    def flat(self, *tensors: Tensor) -> list[Tensor]:
        """Return tensors [b, n, h, d] in the call's layout: samples one after another."""
        given = aligned(*tensors)
        if not self.sequences:
            return given
        return [t.flatten(0, 1) for t in given]

    def flat_by_head(self, t: Tensor) -> Tensor:
        """Return a tensor [b, h, n], such as lse, in the call's layout."""
        if self.sequences:
            t = rearrange(t, "b h n -> h (b n)")
        return t.contiguous()

    def alloc(self, total: GradAccumulator, at: slice) -> Tensor:
        """Return memory for the call's gradient of these rows, or columns."""
        blank = total.alloc(at, flat=bool(self.sequences))
        return blank.flatten(0, 1) if self.sequences else blank

    def blank_rows(self, result: OutputAccumulator) -> dict[str, Tensor]:
        """Return memory for the call's out and lse; none for sequences, whose layout differs."""
        if self.sequences:
            return {}
        out, lse = result.alloc(self.rows)
        return dict(out=out, lse=lse)

    def of_rows(self, t: Tensor, batch: int) -> Tensor:
        """Return the call's result for rows as [b, n, h, d], 0 between tiles."""
        return _filled(self._by_sample(t, batch), 1, self.row_gaps, 0.0)

    def of_cols(self, t: Tensor, batch: int) -> Tensor:
        """Return the call's result for columns as [b, m, h_kv, d], 0 between tiles."""
        return _filled(self._by_sample(t, batch), 1, self.col_gaps, 0.0)

    def of_lse(self, lse: Tensor, batch: int) -> Tensor:
        """Return the call's lse as [b, h, n], -inf between tiles."""
        if self.sequences:
            lse = rearrange(lse, "h (b n) -> b h n", b=batch)
        return _filled(lse, 2, self.row_gaps, -torch.inf)

    def _by_sample(self, t: Tensor, batch: int) -> Tensor:
        return t.unflatten(0, (batch, -1)) if self.sequences else t


def packs(tiles: Sequence[Tile], like: Tensor, disjoint_keys: bool) -> list[VarlenCall]:
    """Pack all tiles into calls for samples like these, each tile into the first that it fits.

    With disjoint_keys no column is in two tiles of a call. Cached in `Tiles`.
    """
    batch, device = len(like), like.device

    def make() -> list[VarlenCall]:
        runs = in_runs(tiles, disjoint_keys, max(1, _MOST // batch))
        return outside_graph_pool(
            lambda: [_pack(run, disjoint_keys, batch, device) for run in runs], device
        )

    if isinstance(tiles, Tiles):
        return tiles.once(("packs", disjoint_keys, batch, device), make)
    return make()


def in_runs(
    tiles: Sequence[Tile], disjoint_keys: bool = False, most: int = _MOST
) -> list[list[Tile]]:
    """Group tiles with equal bounds into runs of at most `most`, in which rows ascend.

    With disjoint_keys columns ascend, too.

    >>> a, b, c = slice(0, 4), slice(4, 7), slice(7, 9)
    >>> tiles = [Tile(t, t, None, 0) for t in (a, b, c)] + [Tile(b, a, None, None)]
    >>> for disjoint_keys in (False, True):
    ...     runs = in_runs(tiles, disjoint_keys)
    ...     [[(t.rows.start, t.cols.start) for t in run] for run in runs]
    [[(0, 0), (4, 0), (7, 7)]]
    [[(0, 0), (7, 7)], [(4, 0)]]
    """
    joined = _joined(_cut(tiles))
    if len(joined) <= _FEW:
        # the widest tile's gradients can fill the whole place, the others are added there
        widest_first = sorted(joined, key=lambda tile: tile.cols.start - tile.cols.stop)
        return [[tile] for tile in widest_first]
    runs: list[list[Tile]] = []
    unfilled: dict[tuple[int, int], list[list[Tile]]] = defaultdict(list)
    for tile in joined:
        alike = unfilled[from_bottom_right(tile)]
        run = next((run for run in alike if _follows(tile, run[-1], disjoint_keys)), None)
        if run is None:
            run = []
            runs.append(run)
            alike.append(run)
        run.append(tile)
        if len(run) == most:
            alike.remove(run)
    return runs


def _follows(tile: Tile, last: Tile, disjoint_keys: bool) -> bool:
    ascends = last.rows.stop <= tile.rows.start
    return ascends and (not disjoint_keys or last.cols.stop <= tile.cols.start)


def _cut(tiles: Sequence[Tile]) -> Iterator[Tile]:
    """Yield the tiles; full ones are cut where rows of other tiles begin or end."""
    ends = set()
    for tile in tiles:
        ends |= {tile.rows.start, tile.rows.stop}
    borders = sorted(ends)
    for tile in tiles:
        if tile[2:] != (None, None):
            yield tile
            continue
        first = bisect_left(borders, tile.rows.start)
        last = bisect_right(borders, tile.rows.stop)
        for start, stop in pairwise(borders[first:last]):
            yield tile._replace(rows=slice(start, stop))


def _joined(tiles: Iterable[Tile]) -> list[Tile]:
    """List the tiles in order, each full one joined to the tile of the same rows on its right.

    The right tile's bounds, from its bottom right, hold for both: each of its rows sees a column,
    and therefore all columns left of the tile.
    """
    joined: list[Tile] = []
    for tile in sorted(tiles, key=lambda t: (t.rows.start, t.cols.start)):
        rows, cols, left, right = tile
        while joined and left is None and _shows_all_before(joined[-1], rows, cols.start):
            start = joined.pop().cols.start
            width = cols.start - start
            cols = slice(start, cols.stop)
            right = None if right is None else right + width
        joined.append(Tile(rows, cols, left, right))
    return joined


def _shows_all_before(tile: Tile, rows: slice, col: int) -> bool:
    """True if a tile is full, has these rows, and ends at that column."""
    return (tile.rows, tile.cols.stop, *tile[2:]) == (rows, col, None, None)


def _pack(run: list[Tile], disjoint_keys: bool, batch: int, device: torch.device) -> VarlenCall:
    """Make one call of a run of tiles; its numbers are copied to the device together."""
    rows = [tile.rows for tile in run]
    cols = [tile.cols for tile in run]
    left, right = from_bottom_right(run[0])
    pack = VarlenCall(_spanned(rows), _spanned(cols), left, right)
    if len(run) == 1:
        return pack
    numbers = [*_sequences(rows, batch), *_sequences(cols, batch), _gaps(rows)]
    numbers.append(_gaps(cols) if disjoint_keys else [])
    cu_q, used_q, cu_k, used_k, row_gaps, col_gaps = _on_device(numbers, device)
    sequences = dict(
        cu_seqlens_q=cu_q,
        seqused_q=used_q,
        cu_seqlens_k=cu_k,
        seqused_k=used_k,
    )
    return pack._replace(
        sequences=sequences,
        row_gaps=row_gaps.long() if len(row_gaps) else None,
        col_gaps=col_gaps.long() if len(col_gaps) else None,
    )


def _spanned(side: list[slice]) -> slice:
    return slice(min(at.start for at in side), max(at.stop for at in side))


def _sequences(side: list[slice], batch: int) -> tuple[list[int], list[int]]:
    """Return the starts of the sequences of all samples and the end, and the lengths.

    >>> _sequences([slice(3, 5), slice(6, 9)], batch=2)
    ([0, 3, 6, 9, 12], [2, 3, 2, 3])
    """
    span = _spanned(side)
    length = span.stop - span.start
    all_starts = []
    for i in range(batch):
        starts = [i * length + at.start - span.start for at in side]
        all_starts += starts
    lengths = [at.stop - at.start for at in side]
    return [*all_starts, batch * length], lengths * batch


def _gaps(side: list[slice]) -> list[int]:
    """List the indices between ascending spans, counted from the first span's start."""
    first = side[0].start
    gaps: list[int] = []
    for a, b in pairwise(side):
        gaps += range(a.stop - first, b.start - first)
    return gaps


def _on_device(lists: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """Copy lists to the device as int32 in one copy, each aligned for kernels."""
    each = [torch.tensor(numbers, dtype=torch.int32) for numbers in lists]
    padded = [F.pad(t, (0, -len(t) % _ALIGNED)) for t in each]
    moved = uploaded(torch.cat(padded), device).split([len(t) for t in padded])
    return [t[: len(numbers)] for t, numbers in zip(moved, lists)]


def _filled(t: Tensor, dim: int, at: Tensor | None, value: float) -> Tensor:
    return t if at is None else t.index_fill_(dim, at, value)
