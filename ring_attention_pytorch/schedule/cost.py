"""A model of a transport's time: bytes, FLOPs and links, as pure functions on ints.

It is for choosing, explaining and extrapolating. docs/scaling.md compares it with measurements.
"""

from collections.abc import Iterator
from itertools import chain, pairwise
from typing import NamedTuple

from ring_attention_pytorch.geometry.tiles import Tile, tiles, visible_pairs
from ring_attention_pytorch.schedule.hardware import H200, Hardware
from ring_attention_pytorch.schedule.pieces import (
    KVShape,
    Workload,
    in_two_stages,
    needed,
    rounds_of,
    tokens,
)
from ring_attention_pytorch.schedule.policy import keys_arrive_late
from ring_attention_pytorch.schedule.relays import Machines, messages
from ring_attention_pytorch.schedule.steps import (
    KEYS,
    Block,
    Part,
    Program,
    Schedule,
    Transfer,
    gather,
    ring,
)

# host time, in launches of small operations: of a part or a transfer by a tape, or by the Python
# that decides on its operations; of the rest of a call, with autograd's thread (one and two H100,
# 2k and 4k tokens each)
_TAPED, _DECIDED, _AROUND = 16, 80, 40
# the same of all swaps of heads, forward and backward: by Python (two and four H100; not measured
# with messages), by tapes (four H100; 2k tokens each)
_SWAPS, _SWAPS_TAPED = 280, 110
# share of `call` that stays where other calls use the units that one leaves idle
_OVERLAPPED_CALL_SHARE = 0.4
_ALL_TILES = 0.2  # the same of one call for all tiles: Triton, four H100, 2k and 4k tokens each


class Cost(NamedTuple):
    """The predicted cost of one rank."""

    forward: float  # seconds
    backward: float
    ideal: float  # seconds of the kernel alone at full speed, forward and backward
    received: int  # bytes, forward and backward
    calls: int  # of the kernel, forward

    @property
    def share(self) -> float:
        """Share of the speed of the kernel alone."""
        return self.ideal / (self.forward + self.backward)


class Clock(NamedTuple):
    """Seconds of the parts and transfers of one direction on one rank, and bytes received."""

    parts: dict[Part, float]
    transfers: list[float]
    received: int
    deferred: float  # share of a part that can be computed while its gradients travel

    @classmethod
    def of(
        cls,
        program: Program,
        rank: int,
        shape: KVShape,
        machine: Hardware,
        back: bool,
        relays: Machines = (),
    ) -> "Clock":
        """Return the times of a rank's parts and transfers; `back` has 2.5 times the FLOPs."""
        a_flop = 2.5 / machine.backward if back else 1 / machine.forward
        parts, transfers, received = {}, [], 0
        for part in program.parts:
            parts[part] = part_seconds(program, part, rank, shape, machine, a_flop)
        for transfer in program.transfers:
            token_bytes = transfer.token_bytes(shape)
            if relays:
                near, far = moved_by_relays(program, transfer, rank, relays)
                transfers.append(relayed_seconds(near * token_bytes, far * token_bytes, machine))
            else:
                near, far = moved(program, transfer, rank, machine.domain)
                transfers.append(
                    transfer_seconds(transfer, near * token_bytes, far * token_bytes, machine)
                )
            received += (near + far) * token_bytes
        return cls(parts, transfers, received, machine.deferred_share)


class Spent(NamedTuple):
    """A part that a rank computes, or a transfer in flight to it, between two times in seconds."""

    what: Part | Transfer
    start: float
    stop: float


def predict(
    schedule: Schedule,
    rank: int,
    shape: KVShape,
    machine: Hardware = H200,
    relays: Machines = (),
) -> Cost:
    """Predict one rank's cost of a schedule; `relays` are the ranks' machines, if it has relays."""
    forward = Clock.of(schedule.forward, rank, shape, machine, back=False, relays=relays)
    backward = Clock.of(schedule.backward, rank, shape, machine, back=True, relays=relays)
    visible = [_visible(schedule.forward, part, rank) for part in schedule.forward.parts]
    flops = shape.pair_flops * sum(map(visible_pairs, visible))
    return Cost(
        forward=max(each.stop for each in walked(schedule.forward, forward)),
        backward=max(each.stop for each in walked(schedule.backward, backward)),
        ideal=flops / machine.forward + 2.5 * flops / machine.backward,
        received=forward.received + backward.received,
        calls=sum(map(len, visible)),
    )


def walked(program: Program, clock: Clock) -> Iterator[Spent]:
    """Yield the times of a program's steps: one stream computes, transfers follow one another.

    A low-priority part is computed while nothing else can be, and the rest of it at the end. The
    deferred share of a part overlaps its gradients' transfer, if no wait precedes that.
    """
    arrived: dict[int, float] = {}
    now = link = left = last = 0.0
    yielding = Part(0)  # the low-priority part
    for wait, start, part in program.steps:
        ready = max([now, *(arrived[number] for number in wait)])
        if left and ready > now:
            spent = min(left, ready - now)
            yield Spent(yielding, now, now + spent)
            left -= spent
        now = ready
        for number in start:
            ahead = 0.0 if wait else clock.deferred * last
            begin = max(now - ahead, link)
            link = arrived[number] = begin + clock.transfers[number]
            yield Spent(program.transfers[number], begin, link)
        last = 0.0
        if part is not None and part.low_priority:
            yielding, left = part, left + clock.parts[part]
        elif part is not None:
            last = clock.parts[part]
            yield Spent(part, now, now + last)
            now += last
    if left:
        yield Spent(yielding, now, now + left)


def _visible(program: Program, part: Part, rank: int) -> tuple[Tile, ...]:
    work = program.workload
    return tiles(work.queries[rank], program.segments(part, rank), work.visible)


def part_seconds(
    program: Program,
    part: Part,
    rank: int,
    shape: KVShape,
    machine: Hardware,
    seconds_a_flop: float,
) -> float:
    visible = _visible(program, part, rank)
    kernel = visible_pairs(visible) * shape.pair_flops * seconds_a_flop
    share = 1.0
    if len(program.blocks) == 2 and len(program.parts) > 1 and not program.blocks[1].whole:
        share = _OVERLAPPED_CALL_SHARE  # calls of one round overlap
    if machine.one_call:  # it merges by itself, so there is no further pass over the results
        return kernel + _ALL_TILES * min(len(visible), 1) * machine.call * share
    rows = sum(tile.rows.stop - tile.rows.start for tile in visible)
    merging = rows * shape.row_bytes / machine.memory
    return kernel + len(visible) * machine.call * share + merging


def moved(program: Program, transfer: Transfer, rank: int, domain: int) -> tuple[int, int]:
    """Return how many tokens a rank fetches from within its domain, and from outside.

    For gradients these are the tokens that peers fetch from it: the links carry both at once. A
    hop is as slow as its slowest link.
    """
    size = len(program.workload.keys)
    if transfer.hop:
        block_tokens = tokens(program.chunks(transfer.fetched, rank))
        crosses = size > domain or transfer.distances[0] >= domain
        return (0, block_tokens) if crosses else (block_tokens, 0)
    stages, _, made = program.blocks[transfer.fetched]
    groups = stages[transfer.stage] if transfer.kind == KEYS else chain.from_iterable(stages)
    distances = tuple(chain.from_iterable(groups))
    if made is None:
        chunks = needed(rank, program.workload, distances)
    else:  # perhaps of some of these owners only
        owners = {(rank - distance) % size for distance in distances}
        chunks = tuple(chunk for chunk in made.pieces[rank] if chunk.owner in owners)
    near = far = 0
    for chunk in chunks:
        if chunk.owner == rank:
            continue
        if chunk.owner // domain == rank // domain:
            near += chunk.segment.length
        else:
            far += chunk.segment.length
    return near, far


def moved_by_relays(
    program: Program, transfer: Transfer, rank: int, machines: Machines
) -> tuple[int, int]:
    """Return how many tokens come to a rank from its machine, some to pass on, and from others."""
    near = far = 0
    for sender, receiver, length in messages(program, transfer, machines, relayed=True):
        if receiver == rank and machines[sender] == machines[rank]:
            near += length
        elif receiver == rank:
            far += length
    return near, far


def relayed_seconds(near: int, far: int, machine: Hardware) -> float:
    """Return the seconds of a transfer of messages by way of relays.

    Keys that crossed are passed on while the next transfer's keys cross.
    """
    return max(_hop_seconds(near, 0, machine), _crossing_seconds(far, machine))


def transfer_seconds(transfer: Transfer, near: int, far: int, machine: Hardware) -> float:
    """Return the seconds of a transfer of `near` bytes within the domain and `far` from outside."""
    if transfer.hop:
        return _hop_seconds(near, far, machine)
    return max(near / machine.pull, _crossing_seconds(far, machine))


def _crossing_seconds(nbytes: int, machine: Hardware) -> float:
    """Return the seconds in which bytes cross the network; 0 if there are none."""
    return machine.network_hop + nbytes / machine.network if nbytes else 0.0


def _hop_seconds(near: int, far: int, machine: Hardware) -> float:
    """Return the seconds of a hop, interpolated; beyond the largest size measured, at its speed."""
    if far:
        return _crossing_seconds(far, machine)
    if near == 0:
        return 0.0
    for (less, start), (more, end) in pairwise(machine.hops):
        if near <= more:
            return start + (near - less) * (end - start) / (more - less)
    most, longest = machine.hops[-1]
    return near * longest / most


def host_seconds(schedule: Schedule, taped: bool, machine: Hardware = H200) -> float:
    """Return the seconds the host takes to launch a call's operations, forward and backward.

    >>> from ring_attention_pytorch.geometry.layouts import all_segments
    >>> from ring_attention_pytorch.geometry.tiles import Mask
    >>> two = all_segments("zigzag", 2, 4096)
    >>> both = ring(Workload(two, two, Mask(causal=True)))
    >>> [round(1e3 * host_seconds(both, taped), 1) for taped in (True, False)]
    [1.5, 6.0]
    """
    steps = 0
    for program in (schedule.forward, schedule.backward):
        steps += len(program.parts) + len(program.transfers)
    return (steps * (_TAPED if taped else _DECIDED) + _AROUND) * machine.launch


def swap_launch_seconds(taped: bool, machine: Hardware = H200) -> float:
    """Return the seconds the host takes to swap heads for sequence, forward and backward."""
    return (_SWAPS_TAPED if taped else _SWAPS) * machine.launch


def swap_seconds(tokens: int, shape: KVShape, degree: int, machine: Hardware = H200) -> float:
    """Return the seconds to swap heads for sequence and back, forward and backward.

    `tokens` is the number of queries, and of keys, per rank.
    """
    if degree == 1:
        return 0.0
    one_way = tokens * (shape.query_bytes + shape.token_bytes) * (degree - 1) / degree
    speed = machine.swap if degree <= machine.domain else machine.network
    return 2 * one_way / speed


def costs(
    workload: Workload, shape: KVShape, at_once: int, machine: Hardware = H200
) -> dict[str, Cost]:
    """Predict the cost of each transport for a rank in the middle of the ring."""
    rank = len(workload.keys) // 2
    schedules = (ring(workload), likely_gather(workload, shape, at_once, machine))
    return {each.transport: predict(each, rank, shape, machine) for each in schedules}


def seconds_by(
    transport: str, workload: Workload, shape: KVShape, at_once: int, machine: Hardware = H200
) -> float:
    """Predict the seconds of a transport, forward and backward, for a rank in the middle."""
    rank = len(workload.keys) // 2
    is_ring = transport == "ring"
    schedule = ring(workload) if is_ring else likely_gather(workload, shape, at_once, machine)
    return sum(predict(schedule, rank, shape, machine)[:2])


def likely_gather(
    workload: Workload, shape: KVShape, at_once: int, machine: Hardware = H200
) -> Schedule:
    """Return the schedule of a gather that a plan would make on such a machine.

    Two stages are used only if all ranks are in one NVLink domain.
    """
    if len(workload.keys) > machine.domain:
        rounds = [Block(((distances,),)) for distances in workload.others(at_once)]
        return gather(workload, rounds)
    late = keys_arrive_late(workload, at_once, shape, machine)
    made = (in_two_stages(workload),) if late else rounds_of(workload, at_once)
    return gather(workload, [*map(Block.of, made)])


def choose_transport(
    workload: Workload, shape: KVShape, at_once: int, machine: Hardware | None = H200
) -> str:
    """Choose the transport for a plan that names none: a pure function, so the same on all ranks.

    A machine of None stands for a CPU, and gives "ring": there nothing overlaps kernels, so fewer,
    later messages gain nothing.
    """
    if machine is None or len(workload.keys) == 1:
        return "ring"
    by_transport = costs(workload, shape, at_once, machine)
    return min(by_transport, key=lambda name: sum(by_transport[name][:2]))
