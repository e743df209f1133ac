"""Segments: arithmetic progressions of positions, and how packed documents cut them.

Documents cut segments at their borders into *pieces*, whose positions count within their own
document. Queries of a piece see keys of the same document only.
"""

from bisect import bisect_right
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")


class Segment(NamedTuple):
    """The positions `start, start + stride, ...`, `length` of them."""

    start: int
    stride: int
    length: int


Segments = tuple[Segment, ...]


def count(segments: Segments) -> int:
    """Count the tokens in these segments."""
    return sum(s.length for s in segments)


def segment_positions(segments: Segments, device: torch.device | None = None) -> Tensor:
    """Return the positions in the segments, in the order held: int64 `[n]`."""
    parts = [torch.arange(s.length, device=device) * s.stride + s.start for s in segments]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.long, device=device)


def slice_segments(segments: Segments, span: slice) -> Segments:
    """Return the segments of the tokens in `span`, which counts tokens in the order held.

    >>> slice_segments((Segment(0, 1, 4), Segment(12, 1, 4)), slice(3, 6))
    (Segment(start=3, stride=1, length=1), Segment(start=12, stride=1, length=2))
    """
    inside = []
    start = 0
    for position, stride, length in segments:
        first = max(span.start - start, 0)
        last = min(span.stop - start, length)
        if first < last:
            inside.append(Segment(position + first * stride, stride, last - first))
        start += length
    return tuple(inside)


class Piece(NamedTuple):
    """The part of a segment in one document; its positions count the document's own tokens."""

    start: int  # local index among the rank's tokens
    segment: Segment


Pieces = dict[int, list[Piece]]  # by document


def whole_pieces(segments: Segments) -> list[Piece]:
    """Return each segment as a piece of one document."""
    pieces = []
    start = 0
    for segment in segments:
        pieces.append(Piece(start, segment))
        start += segment.length
    return pieces


def pieces_at(segments: Segments, border: int) -> list[Piece]:
    """Return each segment as one piece, or two if the position `border` cuts it.

    >>> [tuple(piece.segment) for piece in pieces_at((Segment(1, 3, 4),), border=5)]
    [(1, 3, 2), (7, 3, 2)]
    """
    pieces = []
    for first, (start, stride, length) in whole_pieces(segments):
        before = -(-(border - start) // stride)
        before = min(max(before, 0), length)
        if before > 0:
            pieces.append(Piece(first, Segment(start, stride, before)))
        if before < length:
            after = Segment(start + before * stride, stride, length - before)
            pieces.append(Piece(first + before, after))
    return pieces


class Run(NamedTuple):
    """Consecutive positions of one document, from `start` to `stop`."""

    document: int
    start: int
    stop: int


@dataclass(frozen=True)
class Documents:
    """The documents of one packed sequence, as runs in order of positions without a gap.

    A document can have several runs: all of its tokens can see one another.

    >>> documents = Documents((Run(0, 0, 3), Run(1, 3, 8)))
    >>> for document, pieces in documents.pieces((Segment(2, 1, 3),)).items():
    ...     print(document, [tuple(piece.segment) for piece in pieces])
    0 [(2, 1, 1)]
    1 [(0, 1, 2)]
    """

    runs: tuple[Run, ...]
    # cached results, freed with these documents: a plan asks for tiles many times
    _known: dict[Hashable, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.runs)  # there can be thousands, and layers look plans up by them

    def once(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """Return `make()`, cached by this key."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    @cached_property
    def starts(self) -> list[int]:
        return [run.start for run in self.runs]

    @cached_property
    def offsets(self) -> list[int]:
        """Position in the sequence minus position in the document, for each run."""
        lengths: dict[int, int] = {}  # of each document so far
        offsets = []
        for document, start, stop in self.runs:
            before = lengths.get(document, 0)
            lengths[document] = before + stop - start
            offsets.append(start - before)
        return offsets

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each document.

        >>> Documents((Run(0, 0, 3), Run(1, 3, 4), Run(0, 4, 9))).lengths
        [8, 1]
        """
        ends = {run.document: run.stop - offset for run, offset in zip(self.runs, self.offsets)}
        return [*ends.values()]  # a document's last run wins

    def pieces(self, segments: Segments) -> Pieces:
        """Return the pieces of a rank's segments by document; cached."""
        return self.once(segments, lambda: self._cut(segments))

    def positions(self, segments: Segments) -> Tensor:
        """Return each held token's position in its document, int64 `[n]`."""
        at = segment_positions(segments)
        runs = torch.searchsorted(torch.tensor(self.starts), at, right=True) - 1
        return at - torch.tensor(self.offsets)[runs]

    def head(self, length: int) -> "Documents":
        """Return the documents of the first `length` tokens."""
        runs = []
        for document, start, stop in self.runs:
            if start < length:
                runs.append(Run(document, start, min(stop, length)))
        return Documents(tuple(runs))

    def _cut(self, segments: Segments) -> Pieces:
        by_document: Pieces = {}
        for first, (position, stride, length) in whole_pieces(segments):
            end = first + length
            number = bisect_right(self.starts, position) - 1
            while first < end:
                document, _, stop = self.runs[number]
                inside = min(end - first, -(-(stop - position) // stride))
                if inside > 0:
                    segment = Segment(position - self.offsets[number], stride, inside)
                    by_document.setdefault(document, []).append(Piece(first, segment))
                    first += inside
                    position += inside * stride
                number += 1
        return by_document
