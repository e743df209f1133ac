"""Tiles: the visible parts of a block of scores, as arithmetic on ints.

Between two segments of equal stride every mask here is a *band* `-left <= j - i <= right` of local
indices. So a block of scores (my queries x somebody's keys) falls into a few *tiles*, rectangles
with a band each, and ranks never appear in a mask.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ring_attention_pytorch.geometry.segments import (
    Documents,
    Piece,
    Pieces,
    Segments,
    pieces_at,
    starts_of,
)


class Tile(NamedTuple):
    """A rectangle of scores in which query i sees key j where `-left <= j - i <= right`.

    `i` and `j` count from the rectangle's own top left corner; None is no bound. Bounds are
    never negative and every row and column has something visible.
    """

    rows: slice
    cols: slice
    left: int | None
    right: int | None


class Mask(NamedTuple):
    """A mask: which keys a query sees, by position. A window without `causal` reaches both ways."""

    causal: bool = False
    window: int | None = None
    documents: Documents | None = None  # None is a single document
    prefix: int | None = None  # this many first tokens see one another whatever causal says

    @property
    def lasting(self) -> bool:
        """Tell whether the mask will come again: documents and prefixes change with their batch."""
        return self.documents is None and self.prefix is None


def tiles(queries: Segments, keys: Segments, visible: Mask) -> tuple[Tile, ...]:
    """Return the visible tiles of one block, as few and as large as can be, in order of rows.

    Zigzag, rank 1 of 2, its own keys: triangle, rectangle and triangle are one causal tile.

    >>> from ring_attention_pytorch.geometry.layouts import zigzag
    >>> mine = zigzag(rank=1, ring_size=2, length=8)
    >>> tiles(mine, mine, Mask(causal=True))
    (Tile(rows=slice(0, 4, None), cols=slice(0, 4, None), left=None, right=0),)
    """
    # a caller that needs tiles of passing masks again keeps them
    return (_known if visible.lasting else _tiles)(queries, keys, visible)


def _tiles(queries: Segments, keys: Segments, visible: Mask) -> tuple[Tile, ...]:
    found = [tile for some in _by_document(queries, keys, visible) for tile in _join(some)]
    return tuple(sorted(found, key=lambda t: (t.rows.start, t.cols.start)))


_known = lru_cache(maxsize=65536)(_tiles)


def _by_document(queries: Segments, keys: Segments, visible: Mask) -> Iterator[list[Tile]]:
    """Yield the tiles of each document that has any."""
    theirs = _pieces(keys, visible)
    for document, mine in _pieces(queries, visible).items():
        pairs = ((q, k) for q in mine for k in theirs.get(document, ()))
        found = [tile for q, k in pairs if (tile := _tile(q, k, visible)) is not None]
        if found:
            yield found


def _pieces(segments: Segments, visible: Mask) -> Pieces:
    if visible.documents is not None:
        return visible.documents.pieces(segments)
    if visible.prefix is not None:
        return {0: list(pieces_at(segments, visible.prefix))}
    return {0: [Piece(*each) for each in starts_of(segments)]}


def _tile(query: Piece, key: Piece, visible: Mask) -> Tile | None:
    """Return the tile that one pair of pieces shows; None if it shows nothing."""
    (row, q), (col, k) = query, key
    left = right = None
    # position of query i - position of key j = gap + stride * (i - j); segments of unequal
    # strides only ever meet without a mask
    gap, stride = q.start - k.start, q.stride
    if visible.window is not None:
        left, right = (visible.window - gap) // stride, (visible.window + gap) // stride
    within = visible.prefix is not None and max(q.start, k.start) < visible.prefix
    if visible.causal and not within:
        right = gap // stride
    return _trimmed(slice(row, row + q.length), slice(col, col + k.length), left, right)


def _trimmed(rows: slice, cols: slice, left: int | None, right: int | None) -> Tile | None:
    """Return a band's tile without the rows and columns that see nothing, and without idle bounds.

    None is no tile: nothing is visible.
    """
    n, m = rows.stop - rows.start, cols.stop - cols.start
    left, right = n - 1 if left is None else left, m - 1 if right is None else right
    first_row, last_row = max(0, -right), min(n, m + left)
    first_col, last_col = max(0, -left), min(m, n + right)
    if first_row >= last_row or first_col >= last_col or left + right < 0:
        return None
    left, right = left + first_col - first_row, right - first_col + first_row
    return Tile(
        slice(rows.start + first_row, rows.start + last_row),
        slice(cols.start + first_col, cols.start + last_col),
        None if left >= last_row - first_row - 1 else left,
        None if right >= last_col - first_col - 1 else right,
    )


def buckets(tile: Tile, size: int) -> Iterator[Tile]:
    """Yield a tile some rows at a time, each part with only the columns that it sees.

    >>> for part in buckets(Tile(slice(0, 4), slice(0, 4), None, 0), size=2):
    ...     print(part.rows, part.cols, part.right)
    slice(0, 2, None) slice(0, 2, None) 0
    slice(2, 4, None) slice(0, 4, None) 2
    """
    rows, cols, left, right = tile
    for start in range(rows.start, rows.stop, size):
        above = start - rows.start
        part = _trimmed(
            slice(start, min(start + size, rows.stop)),
            cols,
            None if left is None else left - above,
            None if right is None else right + above,
        )
        assert part is not None  # every row of a tile sees something
        yield part


def band(tile: Tile, device: torch.device) -> Tensor:
    """Return what a tile shows, as bool `[rows, columns]`."""
    rows, cols, left, right = tile
    i = torch.arange(rows.stop - rows.start, device=device).unsqueeze(1)
    offset = torch.arange(cols.stop - cols.start, device=device) - i
    seen = torch.ones_like(offset, dtype=torch.bool)
    if left is not None:
        seen &= offset >= -left
    if right is not None:
        seen &= offset <= right
    return seen


def _join(found: list[Tile]) -> list[Tile]:
    """Join neighbouring tiles, in near linear time: one large kernel call beats many small ones.

    Tiles side by side are joined first, for a query that is in one tile only has its result at
    once. The other way comes first if it joins more.
    """
    by_rows, by_columns = _across(_down(_across(found))), _across(_down(found))
    return by_rows if len(by_rows) <= len(by_columns) else by_columns


def _across(found: list[Tile]) -> list[Tile]:
    across: list[Tile] = []
    for tile in sorted(found, key=lambda t: (t.rows.start, t.rows.stop, t.cols.start)):
        across.append(tile)
        while len(across) > 2 and (joined := _staircase(*across[-3:])) is not None:
            across[-3:] = [joined]
        if len(across) > 1 and (joined := _beside(*across[-2:])) is not None:
            across[-2:] = [joined]
    return across


def _down(found: list[Tile]) -> list[Tile]:
    down: list[Tile] = []
    for tile in sorted(found, key=lambda t: (t.cols.start, t.cols.stop, t.rows.start)):
        down.append(tile)
        if len(down) > 1 and (joined := _below(*down[-2:])) is not None:
            down[-2:] = [joined]
    return down


def _beside(a: Tile, b: Tile) -> Tile | None:
    """Join two full tiles side by side; None if they are not."""
    if (*a[2:], *b[2:]) != (None,) * 4 or a.rows != b.rows or a.cols.stop != b.cols.start:
        return None
    return a._replace(cols=slice(a.cols.start, b.cols.stop))


def _below(a: Tile, b: Tile) -> Tile | None:
    """Join two full tiles, one below the other; None if they are not."""
    if (*a[2:], *b[2:]) != (None,) * 4 or a.cols != b.cols or a.rows.stop != b.rows.start:
        return None
    return a._replace(rows=slice(a.rows.start, b.rows.stop))


def _staircase(a: Tile, b: Tile, c: Tile) -> Tile | None:
    """Join a causal square, the full tile below it and the causal square beside that."""
    full_below = b[2:] == (None, None) and b.cols == a.cols and b.rows.start == a.rows.stop
    beside = c.rows == b.rows and c.cols.start == b.cols.stop
    if not (full_below and beside and _is_causal_square(a) and _is_causal_square(c)):
        return None
    return Tile(slice(a.rows.start, c.rows.stop), slice(a.cols.start, c.cols.stop), None, 0)


def _is_causal_square(t: Tile) -> bool:
    """Tell whether a tile is a causal square.

    One query and its own key are causal, too, though nothing is hidden.
    """
    n = t.rows.stop - t.rows.start
    return t.cols.stop - t.cols.start == n and (
        t[2:] == (None, 0) or (n == 1 and t[2:] == (None, None))
    )


def visible_pairs(found: Sequence[Tile]) -> int:
    """Count the (query, key) pairs that the tiles show: the work of a block.

    >>> visible_pairs([Tile(slice(0, 3), slice(0, 3), None, 0)])
    6
    """
    return sum(
        _pairs(t.rows.stop - t.rows.start, t.cols.stop - t.cols.start, *t[2:]) for t in found
    )


def _pairs(n: int, m: int, left: int | None, right: int | None) -> int:
    def hidden(rows: int, cols: int, bound: int | None) -> int:
        """Count the pairs beyond a bound on one side, a trapezium of the rectangle."""
        if bound is None:
            return 0
        longest, steps = cols - 1 - bound, min(rows, cols - 1 - bound)
        return steps * longest - steps * (steps - 1) // 2 if steps > 0 else 0

    return n * m - hidden(n, m, right) - hidden(m, n, left)


def needed_distances(
    queries: tuple[Segments, ...], keys: tuple[Segments, ...], visible: Mask
) -> tuple[int, ...]:
    """Return the ring distances t at which some rank r needs the keys of rank r - t; 0 always.

    They are no count of hops: zigzag with a short window needs distances 0, 1 and P - 1.

    >>> from ring_attention_pytorch.geometry.layouts import all_segments
    >>> four = all_segments("zigzag", 4, 64)
    >>> needed_distances(four, four, Mask(causal=True, window=3))
    (0, 1, 3)
    """
    ring_size = len(queries)
    if visible.window is None and visible.documents is None:
        return tuple(range(ring_size))
    return (0,) + tuple(
        t
        for t in range(1, ring_size)
        if any(any(_by_document(queries[r], keys[r - t], visible)) for r in range(ring_size))
    )
