"""A model of what a transport costs: bytes, FLOPs and links, as pure functions on ints.

It is for choosing, explaining and extrapolating. docs/scaling.md says what it was compared with.
Defaults were measured on H200 GPUs within one NVLink domain. The network is a 400 Gb/s link for
each GPU, which was not measured.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from ring_attention_pytorch.geometry.segments import count
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


def ring_steps(workload: Workload, rank: int, domain: int) -> list[Step]:
    """List the steps of a ring: own block, then each hop, which is as slow as its slowest link."""
    ring_size = len(workload.keys)
    queries = workload.queries[rank]
    steps = []
    before = 0
    for distance in workload.distances:
        keys = workload.keys[(rank - distance) % ring_size]
        visible = tiles(queries, keys, workload.visible)
        tokens = 0 if distance == 0 else count(keys)
        if ring_size > domain or distance - before >= domain:
            steps.append(_step(visible, near=0, far=tokens))
        else:
            steps.append(_step(visible, near=tokens, far=0))
        before = distance
    return steps


def gather_steps(workload: Workload, rank: int, domain: int, at_once: int) -> list[Step]:
    """List the steps of a gather: own block, then each group of owners."""
    queries = workload.queries[rank]
    own = tiles(queries, workload.keys[rank], workload.visible)
    steps = [_step(own, near=0, far=0)]
    for distances in workload.others(at_once):
        chunks = needed(rank, workload, distances)
        if not chunks:
            continue
        near = far = 0
        for chunk in chunks:
            if chunk.owner // domain == rank // domain:
                near += chunk.segment.length
            else:
                far += chunk.segment.length
        visible = tiles(queries, joined(chunks), workload.visible)
        steps.append(_step(visible, near, far))
    return steps


def _step(tiles: Sequence[Tile], near: int, far: int) -> Step:
    rows = sum(tile.rows.stop - tile.rows.start for tile in tiles)
    return Step(near, far, visible_pairs(tiles), rows, len(tiles))


def predict(
    transport: str, steps: Sequence[Step], shape: KVShape, machine: Hardware = H200
) -> Cost:
    """Predict the cost of these steps: what comes next is under way while a step computes.

    Backward the same keys come again, and gradients go the other way. In a ring they go along with
    the keys, in float32; in a gather they go after each step, in `rowwise.wire_dtype`.
    """
    if transport == "ring":
        seconds, grad_bytes = _ring_seconds, shape.wide_bytes
    else:
        seconds, grad_bytes = _gather_seconds, shape.grad_bytes
    tokens = calls = pairs = 0
    for step in steps:
        tokens += step.near + step.far
        calls += step.calls
        pairs += step.pairs
    flops = shape.pair_flops * pairs
    return Cost(
        forward=seconds(steps, shape, machine, 1.0 / machine.forward, 0),
        backward=seconds(steps, shape, machine, 2.5 / machine.backward, grad_bytes),
        ideal=flops / machine.forward + 2.5 * flops / machine.backward,
        received=tokens * (2 * shape.token_bytes + grad_bytes),
        calls=calls,
    )


def _compute_seconds(step: Step, shape: KVShape, machine: Hardware, seconds_a_flop: float) -> float:
    kernel = step.pairs * shape.pair_flops * seconds_a_flop
    merge = step.rows * shape.row_bytes / machine.memory
    return kernel + step.calls * machine.call + merge


def _ring_seconds(
    steps: Sequence[Step],
    shape: KVShape,
    machine: Hardware,
    seconds_a_flop: float,
    grad_bytes: int,
) -> float:
    total = home = 0.0
    computes = _compute_seconds(steps[0], shape, machine, seconds_a_flop)
    # keys of the next step and gradients of the previous one travel while a step computes
    for step in steps[1:]:
        total += max(computes, _hop_seconds(step, shape.token_bytes, machine) + home)
        if grad_bytes:
            home = _hop_seconds(step, grad_bytes, machine)
        computes = _compute_seconds(step, shape, machine, seconds_a_flop)
    return total + computes + home


def _hop_seconds(step: Step, token_bytes: int, machine: Hardware) -> float:
    """Return the seconds of a hop, interpolated; beyond the last one measured at its speed."""
    if step.far:
        return machine.network_hop + step.far * token_bytes / machine.network
    if step.near == 0:
        return 0.0
    nbytes = step.near * token_bytes
    for (less, start), (more, end) in pairwise(machine.hops):
        if nbytes <= more:
            return start + (nbytes - less) * (end - start) / (more - less)
    most, longest = machine.hops[-1]
    return nbytes * longest / most


def _gather_seconds(
    steps: Sequence[Step],
    shape: KVShape,
    machine: Hardware,
    seconds_a_flop: float,
    grad_bytes: int,
) -> float:
    one_round = len(steps) == 2  # calls go side by side
    if one_round:
        machine = machine._replace(call=machine.call * _BESIDE)
    computes = [_compute_seconds(step, shape, machine, seconds_a_flop) for step in steps]
    pulls = [_pull_seconds(step, shape.token_bytes, machine) for step in steps[1:]]
    if one_round and grad_bytes:  # half of own keys is computed while gradients travel
        own, others = computes
        home = _pull_seconds(steps[1], grad_bytes, machine)
        return max(own / 2, pulls[0]) + others + max(own / 2, home)
    if one_round and not steps[1].far:  # half of theirs is computed while the other half comes
        own, others = computes
        half_of_theirs = max(own, pulls[0] / 2) + others / 2
        return max(half_of_theirs, pulls[0]) + others / 2
    total = home = 0.0
    for step, time, pull in zip(steps, computes, [*pulls, 0.0]):
        total += max(time, pull + home)
        if grad_bytes:
            home = _pull_seconds(step, grad_bytes, machine)
    return total + home


def _pull_seconds(step: Step, token_bytes: int, machine: Hardware) -> float:
    """Return the seconds to pull a step's keys: near and far ones at once, over different links."""
    near = step.near * token_bytes / machine.pull
    if step.far == 0:
        return near
    return max(near, machine.network_hop + step.far * token_bytes / machine.network)


def swap_seconds(tokens: int, shape: KVShape, degree: int, machine: Hardware = H200) -> float:
    """Return the seconds to swap heads for sequence and back, forward and backward.

    `tokens` is how many queries, and how many keys, a rank has.
    """
    if degree == 1:
        return 0.0
    query_bytes = shape.batch * shape.heads * (shape.d + shape.d_v) * shape.itemsize
    one_way = tokens * (query_bytes + shape.token_bytes) * (degree - 1) / degree
    speed = machine.swap if degree <= machine.domain else machine.network
    return 2 * one_way / speed


def costs(
    workload: Workload, shape: KVShape, at_once: int, machine: Hardware = H200
) -> dict[str, Cost]:
    """Predict the cost of each transport for a rank in the middle of the ring."""
    rank = len(workload.keys) // 2
    ring = ring_steps(workload, rank, machine.domain)
    gather = gather_steps(workload, rank, machine.domain, at_once)
    return {
        "ring": predict("ring", ring, shape, machine),
        "gather": predict("gather", gather, shape, machine),
    }


def choose_transport(
    workload: Workload, shape: KVShape, at_once: int, machine: Hardware | None = H200
) -> str:
    """Choose the transport for a plan that names none: a pure function, so the same on all ranks.

    A machine of None stands for a CPU, and gives "ring": there nothing runs beside the kernels, so
    fewer, later messages gain nothing.
    """
    if machine is None or len(workload.keys) == 1:
        return "ring"
    by_transport = costs(workload, shape, at_once, machine)
    return min(by_transport, key=lambda name: sum(by_transport[name][:2]))
