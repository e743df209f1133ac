"""A gather over several machines: each key crosses to a machine once. Arithmetic on ints.

    owner 0 ──first leg──► relay 4 ──second leg──► 5, 6, 7      keys: all that 4 to 7 need of 0's
    owner 0 ◄──first leg── relay 4 ◄──second leg── 5, 6, 7      gradients: summed by 4
    owner 0 ──first leg──► 1, 2, 3                              on its own machine: directly

The *relay* of an owner on another machine is the rank of the same index there, so that keys of a
machine's ranks cross in parallel, by a network card each. If that machine has fewer ranks, one of
them is the relay of several owners. Only the ranks' machines decide, in whichever order ranks are.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from ring_attention_pytorch.geometry.segments import count
from ring_attention_pytorch.schedule.hardware import H200
from ring_attention_pytorch.schedule.pieces import (
    Chunk,
    Chunks,
    KVShape,
    Round,
    Workload,
    all_together,
    cached,
    needed,
    tokens,
)
from ring_attention_pytorch.schedule.steps import (
    GRADS,
    Block,
    Program,
    Schedule,
    Transfer,
    gather,
)

Machines = tuple[int, ...]  # the number of each rank's machine, from 0
_EXCHANGE = int(H200.network * H200.hops[0][1])  # bytes that cross in the time of an exchange


class Span(NamedTuple):
    """Tokens `start` to `stop` of an owner's."""

    owner: int
    start: int
    stop: int

    @property
    def cols(self) -> slice:
        """Slice of the owner's keys."""
        return slice(self.start, self.stop)


class Leg(NamedTuple):
    """A message of keys, their spans one behind another. Their gradients return as one."""

    sender: int
    receiver: int
    spans: tuple[Span, ...]

    @property
    def tokens(self) -> int:
        return sum(span.stop - span.start for span in self.spans)

    def find(self, wanted: Span) -> slice:
        """Return the place of a span in the message, in which it must lie as a whole.

        >>> Leg(0, 4, (Span(0, 2, 6), Span(0, 8, 16))).find(Span(0, 9, 11))
        slice(5, 7, None)
        """
        before = 0
        for owner, start, stop in self.spans:
            if owner == wanted.owner and start <= wanted.start and wanted.stop <= stop:
                first = before + wanted.start - start
                return slice(first, first + wanted.stop - wanted.start)
            before += stop - start
        raise ValueError(f"{wanted} is not in {self}")


class Legs(NamedTuple):
    """The messages of one transfer, of all ranks: first legs from owners, second from relays."""

    first: tuple[Leg, ...]
    second: tuple[Leg, ...]


def members(machines: Machines, machine: int) -> tuple[int, ...]:
    """Return the ranks of a machine, in their order in the ring.

    >>> members((0, 1, 0, 1, 1), 1)
    (1, 3, 4)
    """
    return tuple(rank for rank, of in enumerate(machines) if of == machine)


def relay(machines: Machines, machine: int, owner: int) -> int:
    """Return the rank of a machine that passes this owner's keys on to the others there.

    >>> [relay((0, 1, 0, 1, 1), 0, owner) for owner in (1, 3, 4)]
    [0, 2, 0]
    """
    ranks = members(machines, machine)
    return ranks[members(machines, machines[owner]).index(owner) % len(ranks)]


def worth_an_exchange(nbytes: int) -> bool:
    """True if so many bytes take longer to cross than one more exchange."""
    return nbytes >= _EXCHANGE


def legs(pieces: Sequence[Chunks], machines: Machines) -> Legs:
    """Return the messages that bring every rank its chunks; an owner's chunks cross as a union.

    >>> from ring_attention_pytorch.geometry.segments import Segment
    >>> late, early = Chunk(0, 4, Segment(4, 1, 4)), Chunk(0, 2, Segment(2, 1, 4))
    >>> found = legs([(), (), (late,), (early,)], machines=(0, 0, 1, 1))
    >>> found.first, found.second
    ((Leg(sender=0, receiver=2, spans=(Span(owner=0, start=2, stop=8),)),), \
(Leg(sender=2, receiver=3, spans=(Span(owner=0, start=2, stop=6),)),))
    """
    first: dict[tuple[int, int], list[Span]] = {}
    second: dict[tuple[int, int], list[Span]] = {}
    for rank, chunks in enumerate(pieces):
        for owner in sorted({chunk.owner for chunk in chunks} - {rank}):
            spans = [_span(chunk) for chunk in chunks if chunk.owner == owner]
            receiver = rank
            if machines[owner] != machines[rank]:
                receiver = relay(machines, machines[rank], owner)
            first.setdefault((owner, receiver), []).extend(spans)
            if receiver != rank:
                second.setdefault((receiver, rank), []).extend(spans)
    return Legs(_legs_of(first), _legs_of(second))


def _legs_of(spans_by_ends: dict[tuple[int, int], list[Span]]) -> tuple[Leg, ...]:
    """Return a message for each pair of sender and receiver, with the union of its spans."""
    found = []
    for (sender, receiver), spans in sorted(spans_by_ends.items()):
        found.append(Leg(sender, receiver, _union(spans)))
    return tuple(found)


def _span(chunk: Chunk) -> Span:
    return Span(chunk.owner, chunk.first, chunk.first + chunk.segment.length)


def _union(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Return the union of spans, by owner and place.

    >>> _union([Span(1, 0, 2), Span(0, 4, 8), Span(0, 2, 5), Span(1, 2, 3)])
    (Span(owner=0, start=2, stop=8), Span(owner=1, start=0, stop=3))
    """
    found: list[Span] = []
    for span in sorted(spans):
        if found and found[-1].owner == span.owner and span.start <= found[-1].stop:
            last = found.pop()
            span = Span(span.owner, last.start, max(last.stop, span.stop))
        found.append(span)
    return tuple(found)


def _sent_by(rank: int, all_legs: Sequence[Leg]) -> tuple[Leg, ...]:
    return tuple(leg for leg in all_legs if leg.sender == rank)


def _received_by(rank: int, all_legs: Sequence[Leg]) -> tuple[Leg, ...]:
    return tuple(leg for leg in all_legs if leg.receiver == rank)


class Arrived(NamedTuple):
    """A chunk's place in a message: of which legs (0 or 1), by which sender, and where there."""

    leg: int
    sender: int
    at: slice


class Route(NamedTuple):
    """One rank's messages of a transfer, and the places of its block's chunks in them.

    Chunks are in memory order; `here` is each one's slice of the block.
    """

    sends: tuple[tuple[Leg, ...], tuple[Leg, ...]]  # first and second legs
    receives: tuple[tuple[Leg, ...], tuple[Leg, ...]]
    chunks: tuple[tuple[Arrived, slice], ...]

    @classmethod
    def of(cls, pieces: Sequence[Chunks], machines: Machines, rank: int) -> "Route":
        """Return a rank's route, for the chunks of all ranks."""
        first, second = legs(pieces, machines)
        sends = _sent_by(rank, first), _sent_by(rank, second)
        receives = _received_by(rank, first), _received_by(rank, second)
        by_sender = [{leg.sender: leg for leg in each} for each in receives]
        chunks, start = [], 0
        for chunk in pieces[rank]:
            here = slice(start, start + chunk.segment.length)
            start = here.stop
            number, sender = 0, chunk.owner
            if machines[chunk.owner] != machines[rank]:
                by = relay(machines, machines[rank], chunk.owner)
                if by != rank:  # it arrives by the second leg
                    number, sender = 1, by
            at = by_sender[number][sender].find(_span(chunk))
            chunks.append((Arrived(number, sender, at), here))
        return cls(sends, receives, tuple(chunks))


# --- rounds: own machine, then one machine after another ---


def rounds_by_machine(workload: Workload, machines: Machines, at_once: int) -> tuple[Round, ...]:
    """Return rounds of one machine's owners each, at most `at_once` of them, own machine first.

    The others follow by their distance, the difference of the machines' numbers, so that in a
    round no two machines send to one. Rounds in which no rank needs keys are left out.

    >>> from ring_attention_pytorch.geometry.layouts import all_segments
    >>> from ring_attention_pytorch.geometry.tiles import Mask
    >>> four = all_segments("contiguous", 4, 8)
    >>> first, last = rounds_by_machine(Workload(four, four, Mask()), (0, 1, 0, 1), at_once=3)
    >>> [chunk.owner for chunk in first.pieces[0]], [chunk.owner for chunk in last.pieces[0]]
    ([2], [1, 3])
    """
    size, rounds = len(machines), []
    owners = [members(machines, machine) for machine in range(1 + max(machines))]
    for distance in range(len(owners)):
        for first in range(0, max(map(len, owners)), at_once):
            pieces, distances = [], set[int]()
            for rank, machine in enumerate(machines):
                chosen = owners[(machine - distance) % len(owners)][first : first + at_once]
                behind = [(rank - owner) % size for owner in chosen if owner != rank]
                pieces.append(needed(rank, workload, behind))
                distances.update((rank - chunk.owner) % size for chunk in pieces[-1])
            if distances:
                rounds.append(Round.of_stage((tuple(sorted(distances)),), pieces))
    return tuple(rounds)


@cached
def by_relays(workload: Workload, machines: Machines, at_once: int) -> Schedule:
    """Return the schedule of a gather in rounds of one machine's owners."""
    return gather(workload, [*map(Block.of, rounds_by_machine(workload, machines, at_once))])


class Across(NamedTuple):
    """Keys that cross between machines in one call: directly to each rank, or by way of relays."""

    direct: int
    relayed: int


@cached
def across(workload: Workload, machines: Machines) -> Across:
    """Count the keys that cross, directly and by way of relays, which is the least there is.

    >>> from ring_attention_pytorch.geometry.layouts import all_segments
    >>> from ring_attention_pytorch.geometry.tiles import Mask
    >>> four = all_segments("contiguous", 4, 8)
    >>> work = Workload(four, four, Mask())
    >>> across(work, (0, 0, 1, 1)), across(work, (0, 1, 2, 3))
    (Across(direct=16, relayed=8), Across(direct=24, relayed=24))
    """
    pieces = all_together(workload).pieces
    direct = 0
    for rank, chunks in enumerate(pieces):
        others = (chunk for chunk in chunks if machines[chunk.owner] != machines[rank])
        direct += tokens([*others])
    if len({*machines}) in (1, len(machines)):
        return Across(direct, direct)
    relayed = 0
    for leg in legs(pieces, machines).first:
        if machines[leg.sender] != machines[leg.receiver]:
            relayed += leg.tokens
    return Across(direct, relayed)


def relays_spare(workload: Workload, machines: Machines) -> bool:
    """True if fewer keys cross by way of relays: if several ranks of a machine need the same."""
    if len({*machines}) in (1, len(machines)):
        return False
    direct, relayed = across(workload, machines)
    return relayed < direct


# --- how much crosses ---


class Crossing(NamedTuple):
    """Bytes that leave each rank for another machine, in a forward and in a backward call."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]

    @property
    def total(self) -> int:
        """The bytes of all ranks, forward and backward."""
        return sum(self.forward) + sum(self.backward)


def crossing(
    schedule: Schedule, machines: Machines, shape: KVShape, relayed: bool = False
) -> Crossing:
    """Return the bytes that cross in a schedule's calls, `relayed` or directly from the owners."""
    directions = []
    for program in (schedule.forward, schedule.backward):
        sent = [0] * len(machines)
        for transfer in program.transfers:
            token_bytes = transfer.token_bytes(shape)
            for sender, receiver, length in messages(program, transfer, machines, relayed):
                if machines[sender] != machines[receiver]:
                    sent[sender] += token_bytes * length
        directions.append(tuple(sent))
    return Crossing(*directions)


def messages(
    program: Program, transfer: Transfer, machines: Machines, relayed: bool
) -> Iterator[tuple[int, int, int]]:
    """Yield the sender, the receiver and the number of tokens of each message of a transfer."""
    ranks = range(len(machines))
    if relayed:
        pieces = [program.chunks(transfer.fetched, rank) for rank in ranks]
        for leg in chain(*legs(pieces, machines)):
            if transfer.kind == GRADS:  # the same way back
                yield leg.receiver, leg.sender, leg.tokens
            else:
                yield leg.sender, leg.receiver, leg.tokens
        return
    for rank in ranks:
        for copy in program.copies(transfer, rank):
            if copy.peer != rank:
                yield copy.peer, rank, copy.length


def swap_crossing(workload: Workload, machines: Machines, shape: KVShape, degree: int) -> Crossing:
    """Return the bytes that cross when neighbours swap heads for sequence and back, but for lse.

    `shape` has the heads of one rank after the swap, `workload` the tokens before it.
    """
    query_bytes = shape.batch * shape.heads * shape.d * shape.itemsize
    out_bytes = shape.batch * shape.heads * shape.d_v * shape.itemsize

    def swapped(tokens_of: int, results_of: int) -> int:
        """Return the bytes of one rank's queries and keys, and of another one's results."""
        keys = count(workload.keys[tokens_of]) * shape.token_bytes
        queries = count(workload.queries[tokens_of]) * query_bytes
        return keys + queries + count(workload.queries[results_of]) * out_bytes

    forward, backward = [0] * len(machines), [0] * len(machines)
    for rank, machine in enumerate(machines):
        first = rank - rank % degree
        for other in range(first, first + degree):
            if machines[other] != machine:
                forward[rank] += swapped(rank, other)
                backward[rank] += swapped(other, rank)  # gradients go the way back
    return Crossing(tuple(forward), tuple(backward))
