"""A round in the memory that a machine's ranks share: who holds which keys. Arithmetic on ints.

    round of own machine        the slot of a rank has its own keys
    round of another machine    the slot of a relay has all that has crossed to it

The ranks of a machine copy what they need from the slots of its *holders*, and a holder sums its
machine's gradients of the keys in its slot. So to them a round is like any other: in it the
holders are the owners.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ring_attention_pytorch.geometry.segments import count
from ring_attention_pytorch.schedule.pieces import Chunk, Chunks, Round, tokens
from ring_attention_pytorch.schedule.relays import Leg, Machines, Span, legs, members
from ring_attention_pytorch.schedule.steps import Block, Program, Transfer


class Held(NamedTuple):
    """The keys of one round in the slots of one machine, whose ranks are numbered from 0 here.

    `made` is the round of these ranks: the owner of a chunk is its holder, and `first` the chunk's
    place in the holder's slot. `lengths` are the keys in each slot. `arrived` has the messages from
    other machines, with the holder of each and its place in that slot.
    """

    made: Round
    lengths: tuple[int, ...]
    arrived: tuple[tuple[Leg, int, slice], ...]
    relayed: bool

    @classmethod
    def of(
        cls, pieces: Sequence[Chunks], counts: Sequence[int], machines: Machines, machine: int
    ) -> "Held":
        """Return the keys that a machine holds in a round; rank r of the ring has `counts[r]`.

        >>> from ring_attention_pytorch.geometry.segments import Segment
        >>> late, early = Chunk(0, 4, Segment(4, 1, 4)), Chunk(0, 2, Segment(2, 1, 4))
        >>> held = Held.of([(), (), (late,), (early,)], (8, 8, 8, 8), (0, 0, 1, 1), machine=1)
        >>> held.lengths, [chunk.cols for chunk, in held.made.pieces]
        ((6, 0), [slice(2, 6, None), slice(0, 4, None)])
        """
        number_of = {rank: number for number, rank in enumerate(members(machines, machine))}
        relayed = any(
            machines[chunk.owner] != machines[rank]
            for rank, chunks in enumerate(pieces)
            for chunk in chunks
        )
        lengths = [0 if relayed else counts[rank] for rank in number_of]
        arrived = {}
        for leg in legs(pieces, machines).first:
            if leg.receiver in number_of and leg.sender not in number_of:
                holder = number_of[leg.receiver]
                start = lengths[holder]
                lengths[holder] = start + leg.tokens
                arrived[leg.sender] = leg, holder, slice(start, lengths[holder])
        pieces_here = []
        for rank in number_of:
            chunks = []
            for chunk in pieces[rank]:
                if chunk.owner in number_of:
                    chunks.append(chunk._replace(owner=number_of[chunk.owner]))
                    continue
                leg, holder, at = arrived[chunk.owner]
                span = Span(chunk.owner, chunk.cols.start, chunk.cols.stop)
                first = at.start + leg.find(span).start
                chunks.append(Chunk(holder, first, chunk.segment))
            pieces_here.append(tuple(chunks))
        made = Round.of_stage((distances_inside(len(number_of)),), pieces_here)
        return cls(made, tuple(lengths), tuple(arrived.values()), relayed)


def distances_inside(ranks: int) -> tuple[int, ...]:
    """Return distances between ranks of a machine; 0 is one: a relay uses its own copies."""
    return tuple(range(ranks))


class Inside(NamedTuple):
    """A program as a machine's ranks run it, and the keys they hold in each of its rounds."""

    program: Program
    held: tuple[Held, ...]

    @classmethod
    def of(cls, program: Program, machines: Machines, machine: int) -> "Inside":
        """Return the part of a program, in rounds of one machine's owners each, on a machine."""
        counts = [*map(count, program.workload.keys)]
        held = []
        for number in range(1, len(program.blocks)):
            pieces = [program.chunks(number, rank) for rank in range(len(machines))]
            held.append(Held.of(pieces, counts, machines, machine))
        blocks = (program.blocks[0], *(Block.of(each.made) for each in held))
        ranks = machines.count(machine)
        transfers = tuple(inside(transfer, ranks) for transfer in program.transfers)
        return cls(program._replace(blocks=blocks, transfers=transfers), tuple(held))


def inside(transfer: Transfer, ranks: int) -> Transfer:
    """Return the transfer's part among so many ranks of a machine."""
    return transfer._replace(distances=distances_inside(ranks))


def most_held(held: Sequence[Held]) -> tuple[int, int]:
    """Return the most keys that a rank receives in any of these rounds, and the most in a slot."""
    widest = max(tokens(chunks) for each in held for chunks in each.made.pieces)
    return widest, max(length for each in held for length in each.lengths)
