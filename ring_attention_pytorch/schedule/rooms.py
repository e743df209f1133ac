"""Where tokens lie in the memory of each rank that the others read: arithmetic on ints.

All that a rank computes on comes together there, own tokens among the others', which are pulled:

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

Span = tuple[slice, slice]  # from somewhere to somewhere else


class Room(NamedTuple):
    """The room of a rank: of so many `tokens` it has computed on those that are `held`.

    `own` tells where its own tokens lie. Those that only others see are behind the held ones.
    """

    tokens: int
    held: int
    own: tuple[Span, ...]

    @classmethod
    def of(cls, chunks: Chunks, rank: int, length: int) -> "Room":
        """Return the room of a rank that has `length` tokens, and computes on these chunks.

        >>> from ring_attention_pytorch.schedule.pieces import Chunk, Segment
        >>> theirs, mine = Chunk(1, 0, Segment(0, 1, 4)), Chunk(0, 1, Segment(4, 1, 3))
        >>> room = Room.of((theirs, mine), rank=0, length=4)
        >>> room.tokens, room.held, *room.own
        (8, 7, (slice(0, 1, None), slice(7, 8, None)), (slice(1, 4, None), slice(4, 7, None)))
        """
        seen = sorted(_own(chunks, rank), key=lambda span: span[0].start)
        spans, end, behind = [], 0, tokens(chunks)
        for mine, at in (*seen, (slice(length, length), slice(0, 0))):
            unseen = mine.start - end
            spans += [(slice(end, mine.start), slice(behind, behind + unseen)), (mine, at)]
            end, behind = mine.stop, behind + unseen
        own = joined_places(span for span in spans if span[0].start < span[0].stop)
        return cls(behind, tokens(chunks), tuple((mine, at) for mine, at in own))

    def find(self, wanted: slice) -> Iterator[Span]:
        """Yield parts of some own tokens, each with its place."""
        for mine, at in self.own:
            start, stop = max(mine.start, wanted.start), min(mine.stop, wanted.stop)
            if start < stop:
                shift = at.start - mine.start
                yield slice(start, stop), slice(start + shift, stop + shift)


class Move(NamedTuple):
    """Some tokens of an owner's room, and where they go in one's own."""

    owner: int
    there: slice
    here: slice


def rooms(program: Program) -> tuple[Room, ...]:
    """Return the rooms of all ranks, for the last block of a program."""
    block, found = len(program.blocks) - 1, []
    for rank, keys in enumerate(program.workload.keys):
        chunks = program.chunks(block, rank) if block else ()
        found.append(Room.of(chunks, rank, count(keys)))
    return tuple(found)


def moves(
    program: Program, transfer: Transfer, rank: int, rooms: Sequence[Room]
) -> tuple[Move, ...]:
    """Return what a rank takes of others' rooms, in the order of its own; joined."""
    found = []
    for owner, start, to, length in program.copies(transfer, rank):
        if owner != rank:
            for part, there in rooms[owner].find(slice(start, start + length)):
                here = slice(to + part.start - start, to + part.stop - start)
                found.append(Move(owner, there, here))
    found.sort(key=lambda move: move.here.start)
    return tuple(
        Move(owner, there, here)
        for owner, of_owner in groupby(found, attrgetter("owner"))
        for there, here in joined_places(move[1:] for move in of_owner)
    )


def _own(chunks: Chunks, rank: int) -> Iterator[Span]:
    for chunk, at in places(chunks, rank):
        yield chunk.cols, at
