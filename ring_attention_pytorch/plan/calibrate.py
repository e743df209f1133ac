"""The speeds of a kernel and of a group's links, measured once for each, for the cost model.

The slowest rank counts, so all ranks get the same figures and choose alike.
"""

import json
import socket
import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from statistics import median
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ring_attention_pytorch.comm.messages import Form
from ring_attention_pytorch.comm.symmetric_memory import shared_by
from ring_attention_pytorch.geometry.segments import Segment
from ring_attention_pytorch.geometry.tiles import Tile
from ring_attention_pytorch.kernels import SelectedKernel
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime.accumulate import GradAccumulator, OutputAccumulator
from ring_attention_pytorch.runtime.interfaces import Grads, KVBlock, Residuals, ScoreMods
from ring_attention_pytorch.schedule.cost import choose_transport
from ring_attention_pytorch.schedule.hardware import H200, Hardware, h200_with
from ring_attention_pytorch.schedule.pieces import KVShape, Workload

Seconds = dict[str, float]

ROOM = 8 << 30  # bytes at most for others' keys where neither transport nor memory is given

_BYTES = (1 << 16, 8 << 20, 64 << 20)  # of the messages that are timed
_PULLED = 16 << 20  # bytes, of which symmetric memory keeps one rank's part
_COPIES = 16  # of the longest message within a device
_FLOPS = 1 << 38  # of the block that a kernel computes: half a millisecond on an H200
_ROUNDS = 3
_TIMES = 4  # back to back: a device takes longer than the host to launch the next one
_LAUNCHES = 100  # of a small operation
_known: WeakKeyDictionary[ProcessGroup | Any, dict[Hashable, Seconds]] = WeakKeyDictionary()
_machines: WeakKeyDictionary[ProcessGroup | Any, dict[Hashable, Hardware]] = WeakKeyDictionary()


def measures(like: Tensor, named: str | None) -> bool:
    """Tell whether a plan that names this transport measures; a group's ranks must do alike."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    return named != "ring" and like.is_cuda and not deterministic


def room_left(like: Tensor, ring_size: int) -> int:
    """Return the bytes others' keys may take here: where plans measure, at most half of free ones.

    They are rounded down to a power of two, because they decide in which groups owners come. Of
    two ranks they decide nothing: one owner's keys come in any case. To ask takes 25 to 50 us.
    """
    if ring_size <= 2 or not measures(like, None):
        return ROOM
    free = torch.cuda.mem_get_info(like.device)[0]
    if free >= 2 * ROOM:
        return ROOM
    stats = torch.cuda.memory_stats_as_nested_dict(like.device)  # flat they take ten times longer
    reserved, allocated = (
        stats[f"{of}_bytes"]["all"]["current"] for of in ("reserved", "allocated")
    )
    half = (free + reserved - allocated) // 2
    return min(ROOM, 1 << half.bit_length() >> 1)


def select_transport(
    named: str | None,
    ring: Ring,
    kernel: SelectedKernel,
    blocks: Workload,
    shape: KVShape,
    at_once: int,
    like: Tensor,
    known: Hardware | None = None,
) -> tuple[str, Hardware]:
    """Choose the transport of a plan; return it and the speeds of those that it connects.

    All ranks of the group call this together, if they measure: unless the speeds are `known`.
    """
    machine = h200_with(kernel.name) if like.is_cuda else H200
    degree = ring.size // len(blocks.keys)  # of Ulysses
    if measures(like, named) and ring.group is not None and ring.size > 1:
        machine = known or hardware_of(ring, degree, kernel, shape, like)
        machine = with_calls_of(kernel, machine)
    if named is None:
        near = machine.every(degree) if like.is_cuda else None
        named = choose_transport(blocks, shape, at_once, near)
    return named, machine


def with_calls_of(kernel: SelectedKernel, machine: Hardware) -> Hardware:
    """Return a machine with what a kernel's calls are like; its speeds stay."""
    traits = kernel.traits
    return machine._replace(one_call=traits.fuses_merge, keys_first=traits.keys_first)


def recall(ring: Ring, subject: Hashable) -> Hardware | None:
    """Return the speeds that this rank remembers for a subject; None of a group of several rings.

    Of those some ranks may remember what others don't.
    """
    if ring.several:
        return None
    return _machines.get(ring.group, {}).get((ring.size, subject))


def remember(ring: Ring, subject: Hashable, machine: Hardware) -> None:
    """Remember measured speeds, so that the next plan of such a subject need not ask."""
    _machines.setdefault(ring.group, {})[ring.size, subject] = machine


def hardware_of(
    ring: Ring, degree: int, kernel: SelectedKernel, shape: KVShape, like: Tensor
) -> Hardware:
    """Return this ring's speeds for the cost model; its neighbours are `degree` ranks apart.

    All ranks of the group tell what they know. What any of them does not know is measured.
    """
    known = _known.setdefault(ring.group, {})
    links = "links", ring.size, degree
    speeds = kernel.name, shape.key_heads, shape.heads, shape.d, shape.d_v, like.dtype
    note = [socket.gethostname(), links in known, speeds in known]
    notes = ring.gather_notes("measuring", json.dumps(note).encode())
    hosts, links_known, speeds_known = zip(*map(json.loads, notes))
    with torch.no_grad(), torch.autocast(like.device.type, enabled=False):
        if not all(links_known):
            known[links] = _slowest(ring, _links(ring, degree, hosts, like.device))
        if not all(speeds_known):
            known[speeds] = _slowest(ring, _kernel(kernel, shape, like))
    return hardware_from(known[links] | known[speeds], same_host(hosts, ring.size), shape)


def hardware_from(seconds: Seconds, domain: int, shape: KVShape) -> Hardware:
    """Make the machine that takes so many seconds; what was not measured is as on an H200.

    >>> seconds = {f"near {n}": 1e-4 + n / 100e9 for n in (1 << 16, 8 << 20, 64 << 20)}
    >>> machine = hardware_from(seconds, domain=4, shape=KVShape(1, 32, 8, 128, 128, 2))
    >>> [n for n, _ in machine.hops], machine.domain, machine.forward == H200.forward
    ([0, 65536, 8388608, 67108864], 4, True)
    """
    machine = H200._replace(domain=domain, measured=True)
    least, most = _BYTES[0], _BYTES[-1]
    hops = [(n, seconds[f"near {n}"]) for n in _BYTES if f"near {n}" in seconds]
    if hops:
        machine = machine._replace(hops=((0, hops[0][1]), *hops))
    if f"far {most}" in seconds:
        hop = seconds[f"far {least}"]
        sending = max(seconds[f"far {most}"] - hop, 1e-9)
        machine = machine._replace(network_hop=hop, network=most / sending)
    if "pull" in seconds:
        machine = machine._replace(pull=_PULLED / seconds["pull"])
    if "launches" in seconds:
        launch = seconds["launches"] / _LAUNCHES
        machine = machine._replace(launch=launch, host=H200.host * launch / H200.launch)
    if "memory" in seconds:
        machine = machine._replace(memory=2 * _COPIES * most / seconds["memory"])
    flops = shape._replace(batch=1).pair_flops * _tokens(shape) ** 2
    if "forward" in seconds:
        machine = machine._replace(forward=flops / seconds["forward"])
    if "backward" in seconds:
        machine = machine._replace(backward=2.5 * flops / seconds["backward"])
    return machine


def same_host(hosts: Sequence[str], ring_size: int) -> int:
    """Return how many consecutive ranks of a ring share a host, the least of all rings.

    >>> same_host("aabb", 4), same_host("aaa", 3), same_host("abb", 3), same_host("aaabbb", 2)
    (2, 3, 1, 1)
    """
    for size in range(ring_size, 1, -1):
        if ring_size % size == 0:
            firsts = range(0, len(hosts), size)
            if all(len(set(hosts[first : first + size])) == 1 for first in firsts):
                return size
    return 1


def _slowest(ring: Ring, mine: Seconds | None) -> Seconds:
    """Return the most seconds that any rank of the group took; nothing if one could not measure."""
    notes = ring.gather_notes("speeds", json.dumps(mine).encode())
    by_rank = [json.loads(note) for note in notes]
    if None in by_rank:
        return {}
    slowest: Seconds = {}
    for seconds in by_rank:
        for name, taken in seconds.items():
            slowest[name] = max(taken, slowest.get(name, taken))
    return slowest


def _two_buffers(device: torch.device) -> list[Tensor]:
    return [torch.zeros(_BYTES[-1], dtype=torch.uint8, device=device) for _ in range(2)]


def _links(ring: Ring, degree: int, hosts: Sequence[str], device: torch.device) -> Seconds | None:
    """Time messages between neighbours, and pulls; None if some rank lacks memory.

    Messages of n bytes are "near n" if both neighbours are on this host, and else "far n".
    """
    try:  # all of them or none: from here on ranks wait for one another
        buffers = _two_buffers(device)
    except RuntimeError:  # no memory left: measuring is not worth a failure
        buffers = []
    if b"" in ring.gather_notes("room to measure", b"here" if buffers else b""):
        return None
    sent, received = buffers
    step = degree % ring.size or 1
    after = (ring.rank + step) % ring.size
    before = (ring.rank - step) % ring.size
    mine, *others = (hosts[ring.first + rank] for rank in (ring.rank, after, before))
    kind = "near" if {*others} == {mine} else "far"
    seconds: Seconds = {}
    for n in _BYTES:

        def hop(n: int = n) -> None:
            ring.exchange([(after, sent[:n])], [(before, received[:n])]).wait()

        seconds[f"{kind} {n}"] = _seconds(hop, device, ring)
    seconds["memory"] = _seconds(partial(_copy_often, received, sent), device)
    seconds["launches"] = _host_seconds(sent[:1], device)
    return seconds | _pulls(ring, received[:_PULLED])


def _copy_often(place: Tensor, t: Tensor) -> None:
    for _ in range(_COPIES):
        place.copy_(t)


def _pulls(ring: Ring, into: Tensor) -> Seconds:
    """Time pulls of as many bytes as these, out of all others' memory, if it is shared."""
    if (shared := shared_by(ring, into.device)) is None:
        return {}
    space, group, ranks = shared
    parts = into.chunk(ring.size - 1)
    space.make_room(group, keys=len(parts[0]))
    others = [ranks[(ring.rank + step) % ring.size] for step in range(1, ring.size)]

    def pull() -> None:
        for rank, part in zip(others, parts):
            part.copy_(space.keys.of(rank, Form.of([part.unsqueeze(0)], len(part)))[0][0])

    return {"pull": _seconds(pull, into.device, ring)}


def _kernel(kernel: SelectedKernel, shape: KVShape, like: Tensor) -> Seconds | None:
    """Time one block that is all visible, but not for kernels that hold scores in memory."""
    if not {"eager", "flex"}.isdisjoint(kernel.name.split("+")):
        return {}
    try:
        return _speeds(kernel, shape, like)
    except RuntimeError:  # no memory left: measuring is not worth a failure
        return None


def _speeds(kernel: SelectedKernel, shape: KVShape, like: Tensor) -> Seconds:
    n = _tokens(shape)
    q = like.new_ones((1, n, shape.heads, shape.d))
    k = like.new_ones((1, n, shape.key_heads, shape.d))
    v = like.new_ones((1, n, shape.key_heads, shape.d_v))
    dout = like.new_ones((1, n, shape.heads, shape.d_v))
    keys = KVBlock(k, v, None, (Segment(0, 1, n),))
    terms = ScoreMods(shape.d**-0.5, None, n)
    tiles = [Tile(slice(0, n), slice(0, n), None, None)]

    def forward() -> OutputAccumulator:
        result = OutputAccumulator(q, v)
        kernel.forward(q, keys, tiles, terms, result)
        return result

    out, lse = forward().finalize()

    def backward() -> None:
        saved = Residuals(q, out, lse, dout, None)
        grads = Grads(GradAccumulator(q), GradAccumulator(k), GradAccumulator(v))
        kernel.backward(saved, keys, tiles, terms, grads)

    return {
        "forward": _seconds(forward, like.device),
        "backward": _seconds(backward, like.device),
    }


def _tokens(shape: KVShape) -> int:
    """Return the number of queries and keys of the block that is measured, of one sample.

    With fewer FLOPs a kernel of many launches would be measured as slow as its host.
    """
    pairs = _FLOPS / max(1, shape._replace(batch=1).pair_flops)
    tokens = int(pairs**0.5) // 128 * 128
    return max(128, min(8192, tokens))


def _seconds(
    run: Callable[[], object], device: torch.device, together: Ring | None = None
) -> float:
    """Return the median of a few rounds after a first; ranks of `together` begin each together."""
    seconds = []
    timed = _device_seconds if device.type == "cuda" else _cpu_seconds
    for _ in range(1 + _ROUNDS):
        if together is not None:
            together.gather_notes("timing", b"")
        seconds.append(timed(run, device))
    return median(seconds[1:])


def _cpu_seconds(run: Callable[[], object], _: torch.device) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _device_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return a GPU's seconds of one of several runs, without those that the host takes."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stream = torch.cuda.current_stream(device)
    run()
    begin.record(stream)
    for _ in range(_TIMES):
        run()
    end.record(stream)
    end.synchronize()
    return 1e-3 * begin.elapsed_time(end) / _TIMES


def _host_seconds(t: Tensor, device: torch.device) -> float:
    """Return the host's seconds to launch a small operation so often."""
    seconds = []
    for _ in range(1 + _ROUNDS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(_LAUNCHES):
            t.zero_()
        seconds.append(time.perf_counter() - start)
    return median(seconds[1:])
