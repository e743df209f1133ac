"""Segments: arithmetic progressions of positions, and how packed documents cut them.

Documents cut segments at their borders into *pieces*, whose positions count in their own
document, and only pieces of one document ever meet.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor


class Segment(NamedTuple):
    """The positions `start, start + stride, ...`, `length` of them."""

    start: int
    stride: int
    length: int


Segments = tuple[Segment, ...]


def count(segments: Segments) -> int:
    """Count the tokens of a rank with these segments."""
    return sum(s.length for s in segments)


def segment_positions(segments: Segments, device: torch.device | None = None) -> Tensor:
    """Return the positions that the segments stand for, in the order held: int64 `[n]`."""
    parts = [torch.arange(s.length, device=device) * s.stride + s.start for s in segments]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.long, device=device)


def starts_of(segments: Segments) -> list[tuple[int, Segment]]:
    """Return each segment with the local index at which it starts."""
    return list(zip(accumulate((s.length for s in segments), initial=0), segments))


class Piece(NamedTuple):
    """A part of a segment in one document; its positions count the document's own tokens."""

    start: int  # local index among the tokens held
    segment: Segment


Pieces = dict[int, list[Piece]]  # by document


def pieces_at(segments: Segments, border: int) -> Iterator[Piece]:
    """Yield segments as pieces, cut where they pass the border.

    >>> [tuple(piece.segment) for piece in pieces_at((Segment(1, 3, 4),), border=5)]
    [(1, 3, 2), (7, 3, 2)]
    """
    for at, (start, stride, length) in starts_of(segments):
        before = min(max(-(-(border - start) // stride), 0), length)
        if before > 0:
            yield Piece(at, Segment(start, stride, before))
        if before < length:
            yield Piece(at + before, Segment(start + before * stride, stride, length - before))


class Run(NamedTuple):
    """A run of positions of one document, from `start` to `stop`."""

    document: int
    start: int
    stop: int


@dataclass(frozen=True)
class Documents:
    """The documents of one packed sequence, as runs in order of positions without a gap.

    A document may come in several runs: its tokens see one another wherever they stand.

    >>> documents = Documents((Run(0, 0, 3), Run(1, 3, 8)))
    >>> for document, pieces in documents.pieces((Segment(2, 1, 3),)).items():
    ...     print(document, [tuple(piece.segment) for piece in pieces])
    0 [(2, 1, 1)]
    1 [(0, 1, 2)]
    """

    runs: tuple[Run, ...]
    _pieces: dict[Segments, Pieces] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    @cached_property
    def starts(self) -> list[int]:
        return [run.start for run in self.runs]

    @cached_property
    def offsets(self) -> list[int]:
        """Positions in the sequence less those in the document, one number for each run."""
        held: dict[int, int] = {}
        found = []
        for document, start, stop in self.runs:
            before = held.get(document, 0)
            held[document] = before + stop - start
            found.append(start - before)
        return found

    def pieces(self, segments: Segments) -> Pieces:
        """Return the pieces of a rank's segments by document, made once."""
        if segments not in self._pieces:
            found: Pieces = {}
            for at, segment in starts_of(segments):
                for document, piece in self._cut(at, segment):
                    found.setdefault(document, []).append(piece)
            self._pieces[segments] = found
        return self._pieces[segments]

    def positions(self, segments: Segments) -> Tensor:
        """Return each held token's position in its document, int64 `[n]`."""
        found = torch.empty(count(segments), dtype=torch.long)
        for pieces in self.pieces(segments).values():
            for start, segment in pieces:
                found[start : start + segment.length] = segment_positions((segment,))
        return found

    def head(self, length: int) -> "Documents":
        """Return the documents of the first so many tokens."""
        kept = (run for run in self.runs if run.start < length)
        return Documents(tuple(run._replace(stop=min(run.stop, length)) for run in kept))

    def _cut(self, at: int, segment: Segment) -> Iterator[tuple[int, Piece]]:
        position, stride, length = segment
        end, number = at + length, bisect_right(self.starts, position) - 1
        while at < end:
            document, _, stop = self.runs[number]
            here = min(end - at, -(-(stop - position) // stride))
            if here > 0:
                of_it = Segment(position - self.offsets[number], stride, here)
                yield document, Piece(at, of_it)
                at, position = at + here, position + here * stride
            number += 1
