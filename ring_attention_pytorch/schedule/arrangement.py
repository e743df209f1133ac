"""Where tokens lie in the shared memory of each rank: arithmetic on ints.

The keys of one block lie together there, own tokens among those pulled from peers:

    rank 0 of 2, contiguous and causal | own    | own, which only rank 1 sees |
    rank 1                             | pulled | own                         |
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from ring_attention_pytorch.geometry.segments import count
from ring_attention_pytorch.schedule.pieces import Chunks, joined_places, places, tokens
from ring_attention_pytorch.schedule.steps import Program, Transfer

Span = tuple[slice, slice]  # source and destination


class Arrangement(NamedTuple):
    """How `tokens` tokens lie in a rank's memory: the first `held` are those it computes on.

    `own` maps its own tokens to their places. Own tokens that only peers see lie at the end.
    """

    tokens: int
    held: int
    own: tuple[Span, ...]

    @classmethod
    def of(cls, chunks: Chunks, rank: int, length: int) -> "Arrangement":
        """Return the arrangement of a rank that owns `length` tokens and computes on these chunks.

        >>> from ring_attention_pytorch.schedule.pieces import Chunk, Segment
        >>> theirs, mine = Chunk(1, 0, Segment(0, 1, 4)), Chunk(0, 1, Segment(4, 1, 3))
        >>> found = Arrangement.of((theirs, mine), rank=0, length=4)
        >>> found.tokens, found.held, *found.own
        (8, 7, (slice(0, 1, None), slice(7, 8, None)), (slice(1, 4, None), slice(4, 7, None)))
        """
        seen = [(chunk.cols, at) for chunk, at in places(chunks, rank)]
        seen.sort(key=lambda span: span[0].start)
        spans, end, behind = [], 0, tokens(chunks)
        for mine, at in (*seen, (slice(length, length), slice(0, 0))):
            unseen = mine.start - end
            spans += [(slice(end, mine.start), slice(behind, behind + unseen)), (mine, at)]
            end, behind = mine.stop, behind + unseen
        own = joined_places(span for span in spans if span[0].start < span[0].stop)
        return cls(behind, tokens(chunks), tuple((mine, at) for mine, at in own))

    def find(self, wanted: slice) -> Iterator[Span]:
        """Yield the parts of the own tokens `wanted`, each with its place in memory."""
        for mine, at in self.own:
            start, stop = max(mine.start, wanted.start), min(mine.stop, wanted.stop)
            if start < stop:
                shift = at.start - mine.start
                yield slice(start, stop), slice(start + shift, stop + shift)


class Move(NamedTuple):
    """A copy of tokens from an owner's memory (`there`) to a rank's own (`here`)."""

    owner: int
    there: slice
    here: slice


def arrangements(program: Program) -> tuple[Arrangement, ...]:
    """Return each rank's arrangement of the last block of a program."""
    block, arranged = len(program.blocks) - 1, []
    for rank, keys in enumerate(program.workload.keys):
        arranged.append(Arrangement.of(program.chunks(block, rank), rank, count(keys)))
    return tuple(arranged)


def moves(
    program: Program, transfer: Transfer, rank: int, arranged: Sequence[Arrangement]
) -> tuple[Move, ...]:
    """Return the copies that a rank makes from peers' memory: joined, sorted by owner and place."""
    copied = []
    for owner, start, to, length in program.copies(transfer, rank):
        if owner != rank:
            for part, there in arranged[owner].find(slice(start, start + length)):
                here = slice(to + part.start - start, to + part.stop - start)
                copied.append(Move(owner, there, here))
    copied.sort(key=lambda move: move.here.start)
    found = []
    for owner, of_owner in groupby(copied, attrgetter("owner")):
        for there, here in joined_places(move[1:] for move in of_owner):
            found.append(Move(owner, there, here))
    return tuple(found)
