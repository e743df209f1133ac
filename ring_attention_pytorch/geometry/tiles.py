"""Tiles: the visible parts of a block of scores, as arithmetic on ints.

Between two segments of equal stride every mask here is a *band* `-left <= j - i <= right` of local
indices. A block of scores (my queries x one owner's keys) therefore falls into a few *tiles*,
rectangles with a band each, and ranks never appear in a mask.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import product
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_attention_pytorch.geometry.segments import (
    Documents,
    Piece,
    Pieces,
    Segments,
    count,
    pieces_at,
    whole_pieces,
)


class Tile(NamedTuple):
    """A rectangle of scores in which query i sees key j where `-left <= j - i <= right`.

    `i` and `j` count from the rectangle's own top left corner; None is no bound. Bounds are
    never negative, and every row and column has a visible score.
    """

    rows: slice
    cols: slice
    left: int | None
    right: int | None


_FULL = (None, None)  # bounds of a tile that hides nothing


class Mask(NamedTuple):
    """A mask: which keys a query sees, by position. A window without `causal` reaches both ways."""

    causal: bool = False
    window: int | None = None
    documents: Documents | None = None  # None is a single document
    prefix: int | None = None  # the first `prefix` tokens see one another even if causal

    def once(self, make: Any, *given: Any, **options: Any) -> Any:
        """Return `make(mask, *given, **options)`, cached; `make` has an `lru_cache`.

        Documents change with the batch: their results are cached in them instead, to be freed with
        them. Results for a prefix are not cached.
        """
        if self.documents is None and self.prefix is None:
            return make(self, *given, **options)
        made = partial(make.__wrapped__, self, *given, **options)
        if self.documents is None:
            return made()
        key = make, self._replace(documents=None), given, *options.items()
        return self.documents.once(key, made)


def tiles(queries: Segments, keys: Segments, mask: Mask) -> tuple[Tile, ...]:
    """Return the visible tiles of one block in order of rows, joined to few large ones.

    Zigzag, rank 1 of 2, its own keys: triangle, rectangle and triangle are one causal tile.

    >>> from ring_attention_pytorch.geometry.layouts import zigzag
    >>> mine = zigzag(rank=1, ring_size=2, length=8)
    >>> tiles(mine, mine, Mask(causal=True))
    (Tile(rows=slice(0, 4, None), cols=slice(0, 4, None), left=None, right=0),)
    """
    return mask.once(_tiles, queries, keys)


@lru_cache(maxsize=65536)
def _tiles(mask: Mask, queries: Segments, keys: Segments) -> tuple[Tile, ...]:
    by_document: dict[int, list[Tile]] = {}
    for document, tile in _visible_tiles(queries, keys, mask):
        by_document.setdefault(document, []).append(tile)
    joined = []
    for of_document in by_document.values():
        joined += _join(of_document)
    return tuple(sorted(joined, key=attrgetter("rows.start", "cols.start")))


def _visible_tiles(queries: Segments, keys: Segments, mask: Mask) -> Iterator[tuple[int, Tile]]:
    """Yield the tile of each pair of pieces with a visible score, and its document."""
    of_keys = _pieces(keys, mask)
    for document, of_queries in _pieces(queries, mask).items():
        for query, key in product(of_queries, of_keys.get(document, ())):
            tile = _tile_of_pair(query, key, mask)
            if tile is not None:
                yield document, tile


def _pieces(segments: Segments, mask: Mask) -> Pieces:
    if mask.documents is not None:
        return mask.documents.pieces(segments)
    if mask.prefix is not None:
        return {0: pieces_at(segments, mask.prefix)}
    return {0: whole_pieces(segments)}


def _tile_of_pair(query: Piece, key: Piece, mask: Mask) -> Tile | None:
    """Return the tile of a pair of pieces of one document; None if no score is visible."""
    row, q = query
    col, k = key
    left = right = None
    # position of query i - position of key j = gap + stride * (i - j); segments with unequal
    # strides are paired without a mask only
    gap = q.start - k.start
    if mask.window is not None:
        left = (mask.window - gap) // q.stride
        right = (mask.window + gap) // q.stride
    in_prefix = mask.prefix is not None and max(q.start, k.start) < mask.prefix
    if mask.causal and not in_prefix:
        right = gap // q.stride
    return trim(slice(row, row + q.length), slice(col, col + k.length), left, right)


def trim(rows: slice, cols: slice, left: int | Any, right: int | Any) -> Tile | None:
    """Return a band's tile, without hidden rows and columns and bounds that hide nothing.

    None if no score is visible.
    """
    n = rows.stop - rows.start
    m = cols.stop - cols.start
    if left is None:
        left = n - 1
    if right is None:
        right = m - 1
    first_row, last_row = max(0, -right), min(n, m + left)
    first_col, last_col = max(0, -left), min(m, n + right)
    if first_row >= last_row or first_col >= last_col or left + right < 0:
        return None
    left += first_col - first_row
    right += first_row - first_col
    if left >= last_row - first_row - 1:
        left = None
    if right >= last_col - first_col - 1:
        right = None
    rows = slice(rows.start + first_row, rows.start + last_row)
    cols = slice(cols.start + first_col, cols.start + last_col)
    return Tile(rows, cols, left, right)


def unseen(queries: Iterable[Segments], keys: Segments, mask: Mask) -> Iterator[slice]:
    """Yield the slices of `keys` that none of these queries sees.

    >>> from ring_attention_pytorch.geometry.segments import Segment
    >>> here = (Segment(4, 1, 3),), (Segment(9, 1, 1),)
    >>> [*unseen(here, (Segment(0, 1, 12),), Mask(causal=True, window=1))]
    [slice(0, 3, None), slice(7, 8, None), slice(10, 12, None)]
    """
    shown: list[slice] = []
    for of_rank in queries:
        shown += [tile.cols for tile in tiles(of_rank, keys, mask)]
    stop = 0  # of the keys seen so far
    for cols in sorted(shown, key=attrgetter("start")):
        if cols.start > stop:
            yield slice(stop, cols.start)
        stop = max(stop, cols.stop)
    if stop < count(keys):
        yield slice(stop, count(keys))


def buckets(tile: Tile, size: int) -> Iterator[Tile]:
    """Yield a tile in parts of `size` rows, each with only the columns that its rows see.

    >>> for part in buckets(Tile(slice(0, 4), slice(0, 4), None, 0), size=2):
    ...     print(part.rows, part.cols, part.right)
    slice(0, 2, None) slice(0, 2, None) 0
    slice(2, 4, None) slice(0, 4, None) 2
    """
    rows, cols, left, right = tile
    for start in range(rows.start, rows.stop, size):
        above = start - rows.start
        part_left = None if left is None else left - above
        part_right = None if right is None else right + above
        part = trim(slice(start, min(start + size, rows.stop)), cols, part_left, part_right)
        assert part is not None  # every row of a tile sees something
        yield part


def band(tile: Tile, device: torch.device) -> Tensor:
    """Return the visible scores of a tile, as bool `[rows, columns]`."""
    rows, cols, left, right = tile
    i = torch.arange(rows.stop - rows.start, device=device)
    j = torch.arange(cols.stop - cols.start, device=device)
    offset = j - i.unsqueeze(1)
    visible = torch.ones_like(offset, dtype=torch.bool)
    if left is not None:
        visible &= offset >= -left
    if right is not None:
        visible &= offset <= right
    return visible


def _join(tiles: list[Tile]) -> list[Tile]:
    """Join neighbouring tiles, in near linear time: one large kernel call beats many small ones.

    Tiles side by side are joined first, because a query in a single tile needs no merge. Tiles one
    below the other are joined first if that leaves fewer.
    """
    if len(tiles) == 1:
        return tiles
    by_rows = _join_across(_join_down(_join_across(tiles)))
    by_columns = _join_across(_join_down(tiles))
    return by_rows if len(by_rows) <= len(by_columns) else by_columns


def _join_across(tiles: list[Tile]) -> list[Tile]:
    """Join full tiles side by side, and staircases (`_is_staircase`) into causal squares."""
    joined: list[Tile] = []
    for tile in sorted(tiles, key=attrgetter("rows.start", "rows.stop", "cols.start")):
        joined.append(tile)
        while len(joined) > 2 and _is_staircase(*joined[-3:]):
            joined[-3:] = [_spanned(joined[-3], joined[-1], right=0)]
        if len(joined) > 1:
            a, b = joined[-2:]
            beside = a.rows == b.rows and a.cols.stop == b.cols.start
            if beside and a[2:] == b[2:] == _FULL:
                joined[-2:] = [_spanned(a, b, right=None)]
    return joined


def _join_down(tiles: list[Tile]) -> list[Tile]:
    """Join full tiles, one below the other."""
    joined: list[Tile] = []
    for tile in sorted(tiles, key=attrgetter("cols.start", "cols.stop", "rows.start")):
        joined.append(tile)
        if len(joined) > 1:
            a, b = joined[-2:]
            below = a.cols == b.cols and a.rows.stop == b.rows.start
            if below and a[2:] == b[2:] == _FULL:
                joined[-2:] = [_spanned(a, b, right=None)]
    return joined


def _spanned(first: Tile, last: Tile, right: int | None) -> Tile:
    """Return the tile from the top left of the first to the bottom right of the last."""
    rows = slice(first.rows.start, last.rows.stop)
    cols = slice(first.cols.start, last.cols.stop)
    return Tile(rows, cols, None, right)


def _is_staircase(a: Tile, b: Tile, c: Tile) -> bool:
    """True if b is full, below the causal square a, and left of the causal square c."""
    below = b.cols == a.cols and b.rows.start == a.rows.stop
    beside = c.rows == b.rows and c.cols.start == b.cols.stop
    if not (below and beside and b[2:] == _FULL):
        return False
    return _is_causal_square(a) and _is_causal_square(c)


def _is_causal_square(tile: Tile) -> bool:
    """True if a tile is a causal square.

    One query and its own key count as causal, too, though nothing is hidden.
    """
    n = tile.rows.stop - tile.rows.start
    if tile.cols.stop - tile.cols.start != n:
        return False
    return tile[2:] == (None, 0) or (n == 1 and tile[2:] == _FULL)


def visible_pairs(tiles: Sequence[Tile]) -> int:
    """Count the visible (query, key) pairs of the tiles: the work of a block.

    >>> visible_pairs([Tile(slice(0, 3), slice(0, 3), None, 0)])
    6
    """
    pairs = 0
    for rows, cols, left, right in tiles:
        n = rows.stop - rows.start
        m = cols.stop - cols.start
        pairs += n * m - _hidden_pairs(n, m, right) - _hidden_pairs(m, n, left)
    return pairs


def _hidden_pairs(rows: int, cols: int, bound: int | None) -> int:
    """Count the pairs that a bound on one side hides, a trapezium of the rectangle."""
    if bound is None:
        return 0
    longest = cols - 1 - bound
    steps = min(rows, longest)
    if steps <= 0:
        return 0
    return steps * longest - steps * (steps - 1) // 2


def needed_distances(
    queries: tuple[Segments, ...], keys: tuple[Segments, ...], mask: Mask
) -> tuple[int, ...]:
    """Return the ring distances t at which some rank r needs the keys of rank r - t; 0 always.

    They are not a count of hops: zigzag with a short window needs distances 0, 1 and P - 1.

    >>> from ring_attention_pytorch.geometry.layouts import all_segments
    >>> four = all_segments("zigzag", 4, 64)
    >>> needed_distances(four, four, Mask(causal=True, window=3))
    (0, 1, 3)
    """
    return mask.once(_needed_distances, queries, keys)


@lru_cache(maxsize=1024)
def _needed_distances(
    mask: Mask, queries: tuple[Segments, ...], keys: tuple[Segments, ...]
) -> tuple[int, ...]:
    ranks = range(len(queries))
    if mask.window is None and mask.documents is None:
        return tuple(ranks)
    needed = [0]
    for t in ranks[1:]:
        if any(tiles(queries[r], keys[r - t], mask) for r in ranks):
            needed.append(t)
    return tuple(needed)
