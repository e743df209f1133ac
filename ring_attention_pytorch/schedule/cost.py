"""A model of what a transport costs: bytes, FLOPs and links, as pure functions on ints.

It is for choosing, explaining and extrapolating. docs/scaling.md says what it was compared with.
Defaults were measured on H200 GPUs within one NVLink domain. The network is a 400 Gb/s link for
each GPU, which was not measured.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from ring_attention_pytorch.geometry.tiles import Tile, tiles, visible_pairs
from ring_attention_pytorch.schedule.pieces import KVShape, Workload, joined, needed

# bytes and seconds of one NCCL send/recv hop between H200s, both ways at once
_HOPS = ((0, 1.0e-4), (8 << 20, 1.71e-4), (32 << 20, 5.13e-4), (128 << 20, 9.68e-4),
         (512 << 20, 1.68e-3))  # fmt: skip


class Hardware(NamedTuple):
    """Speeds of a device and its links: FLOP/s and bytes/s each way, seconds."""

    forward: float = 600e12  # FLOP/s of a kernel on large tiles
    backward: float = 525e12
    memory: float = 4.3e12  # read and write together
    pull: float = 350e9  # by copy engines within a domain
    swap: float = 280e9  # of heads for sequence within a domain, out of shared memory
    network: float = 45e9  # between domains, for each GPU
    network_hop: float = 2e-5
    call: float = 1e-4  # seconds of a kernel's call on top: to launch, ramp up and end
    domain: int = 8  # GPUs that reach one another by NVLink
    hops: tuple[tuple[int, float], ...] = _HOPS  # bytes and seconds between its neighbours
    measured: bool = False  # whether on the group at hand


H200 = Hardware()
_BESIDE = 0.4  # share of `call` that stays where other calls fill what one leaves idle


class Step(NamedTuple):
    """One block of keys: how many have to have come for it, and what is computed on it."""

    near: int  # keys from within the domain
    far: int  # keys from outside
    pairs: int
    rows: int
    calls: int


class Cost(NamedTuple):
    """The predicted cost of one rank."""

    forward: float  # seconds
    backward: float
    ideal: float  # seconds forward and backward of nothing but the kernel at full speed
    received: int  # bytes, forward and backward
    calls: int  # of the kernel, forward

    @property
    def share(self) -> float:
        """Share of the speed that the kernel alone would reach."""
        return self.ideal / (self.forward + self.backward)


def ring_steps(blocks: Workload, rank: int, domain: int) -> list[Step]:
    """List the steps of a ring: own block, then each hop, which is as slow as its slowest link."""
    size = len(blocks.keys)
    steps = []
    for here, distance in pairwise((0, *blocks.distances)):
        owner = (rank - distance) % size
        found = tiles(blocks.queries[rank], blocks.keys[owner], blocks.visible)
        tokens = 0 if distance == 0 else sum(s.length for s in blocks.keys[owner])
        crosses = size > domain or distance - here >= domain
        steps.append(_step(found, *((0, tokens) if crosses else (tokens, 0))))
    return steps


def gather_steps(blocks: Workload, rank: int, domain: int, at_once: int) -> list[Step]:
    """List the steps of a gather: own block, then each group of owners."""
    own = tiles(blocks.queries[rank], blocks.keys[rank], blocks.visible)
    steps = [_step(own, 0, 0)]
    for chosen in blocks.others(at_once):
        tokens = [0, 0]  # from within the domain, and from outside
        pieces = needed(rank, blocks, chosen)
        for piece in pieces:
            tokens[piece.owner // domain != rank // domain] += piece.segment.length
        if pieces:
            found = tiles(blocks.queries[rank], joined(pieces), blocks.visible)
            steps.append(_step(found, *tokens))
    return steps


def _step(found: Sequence[Tile], near: int, far: int) -> Step:
    rows = sum(t.rows.stop - t.rows.start for t in found)
    return Step(near, far, visible_pairs(found), rows, len(found))


def predict(transport: str, steps: Sequence[Step], job: KVShape, machine: Hardware = H200) -> Cost:
    """Predict the cost of these steps: what comes next is under way while a step computes.

    Backward the same keys come again, and gradients go the other way. In a ring they go along with
    the keys, in float32; in a gather they go after each step, in `rowwise.wire_dtype`.
    """
    hidden = _ring_time if transport == "ring" else _gather_time
    grad = job.wide_bytes if transport == "ring" else job.grad_bytes
    forward = hidden(steps, job, machine, 1.0 / machine.forward, 0)
    backward = hidden(steps, job, machine, 2.5 / machine.backward, grad)
    tokens = sum(s.near + s.far for s in steps)
    flops = job.pair_flops * sum(s.pairs for s in steps)
    return Cost(
        forward, backward, flops / machine.forward + 2.5 * flops / machine.backward,
        tokens * (2 * job.token_bytes + grad), sum(s.calls for s in steps),
    )  # fmt: skip


def _compute(step: Step, job: KVShape, machine: Hardware, second_a_flop: float) -> float:
    traffic = step.rows * job.row_bytes / machine.memory
    return step.pairs * job.pair_flops * second_a_flop + step.calls * machine.call + traffic


def _ring_time(
    steps: Sequence[Step], job: KVShape, machine: Hardware, second_a_flop: float, grad: int
) -> float:
    times = [_compute(s, job, machine, second_a_flop) for s in steps]
    hops = [_hop(s.near, s.far, job.token_bytes, machine) for s in steps[1:]]
    backs = [_hop(s.near, s.far, grad, machine) if grad else 0.0 for s in steps[1:]]
    # keys of the next step and gradients of the previous one travel while a step computes
    total = sum(
        max(time, hop + back) for time, hop, back in zip(times, hops, [0.0, *backs], strict=False)
    )
    return total + times[-1] + (backs[-1] if backs else 0.0)


def _hop(near: int, far: int, each: int, machine: Hardware) -> float:
    if far:
        return machine.network_hop + far * each / machine.network
    return _between_neighbours(near * each, machine.hops) if near else 0.0


def _between_neighbours(nbytes: float, hops: Sequence[tuple[int, float]]) -> float:
    """Return the seconds of a hop, interpolated; beyond the last one measured at its speed."""
    for (a, start), (b, end) in pairwise(hops):
        if nbytes <= b:
            return start + (nbytes - a) * (end - start) / (b - a)
    return nbytes * hops[-1][1] / hops[-1][0]


def _gather_time(
    steps: Sequence[Step], job: KVShape, machine: Hardware, second_a_flop: float, grad: int
) -> float:
    beside = len(steps) == 2  # with one group, calls go side by side
    machine = machine._replace(call=machine.call * (_BESIDE if beside else 1.0))
    times = [_compute(step, job, machine, second_a_flop) for step in steps]
    coming = [_pull(s, job.token_bytes, machine) for s in steps[1:]]
    if beside and grad:  # half of own keys is computed while gradients travel
        own, others = times
        return max(own / 2, *coming) + others + max(own / 2, _pull(steps[1], grad, machine))
    if beside and not steps[1].far:  # half of theirs is computed while the other half comes
        (own, others), (pull,) = times, coming
        return max(max(own, pull / 2) + others / 2, pull) + others / 2
    total, home = 0.0, 0.0
    for step, time, pull in zip(steps, times, [*coming, 0.0]):
        total += max(time, pull + home)
        home = _pull(step, grad, machine) if grad else 0.0
    return total + home


def _pull(step: Step, each: int, machine: Hardware) -> float:
    """Return the seconds to pull a step's keys: near and far ones at once, over different links."""
    wire = machine.network_hop + step.far * each / machine.network if step.far else 0.0
    return max(step.near * each / machine.pull, wire)


def swap_seconds(tokens: int, job: KVShape, degree: int, machine: Hardware = H200) -> float:
    """Return the seconds to swap heads for sequence and back, forward and backward.

    `tokens` is how many queries, and how many keys, a rank has.
    """
    if degree == 1:
        return 0.0
    queries = job.batch * job.heads * (job.d + job.d_v) * job.itemsize
    one_way = tokens * (queries + job.token_bytes) * (degree - 1) / degree
    return 2 * one_way / (machine.swap if degree <= machine.domain else machine.network)


def costs(
    blocks: Workload, job: KVShape, at_once: int, machine: Hardware = H200
) -> dict[str, Cost]:
    """Predict the cost of each transport for a rank in the middle of the ring."""
    rank = len(blocks.keys) // 2
    steps = {
        "ring": ring_steps(blocks, rank, machine.domain),
        "gather": gather_steps(blocks, rank, machine.domain, at_once),
    }
    return {name: predict(name, found, job, machine) for name, found in steps.items()}


def choose_transport(
    blocks: Workload, job: KVShape, at_once: int, machine: Hardware | None = H200
) -> str:
    """Choose the transport for a plan that names none: a pure function, so the same on all ranks.

    A machine of None stands for a CPU, and gives "ring": there nothing runs beside the kernels, so
    fewer, later messages gain nothing.
    """
    if machine is None or len(blocks.keys) == 1:
        return "ring"
    found = costs(blocks, job, at_once, machine)
    return min(found, key=lambda name: found[name].forward + found[name].backward)
