"""Measured speeds of a kernel and of a group's links, for plans made with calibrate=True.

They are measured once for each group, and cached for it. The slowest rank counts, so all ranks get
the same figures and make the same choice.
"""

import json
import time
from collections.abc import Callable, Hashable
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
from ring_attention_pytorch.progress import say
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime.accumulate import GradAccumulator, OutputAccumulator
from ring_attention_pytorch.runtime.interfaces import Grads, KVBlock, Residuals, ScoreMods
from ring_attention_pytorch.schedule.hardware import Hardware
from ring_attention_pytorch.schedule.pieces import KVShape

Seconds = dict[str, float]

_BYTES = (1 << 16, 8 << 20, 64 << 20)  # of the messages that are timed
_PULLED = 16 << 20  # bytes; symmetric memory stores one rank's part
_COPIES = 16  # of the longest message within a device
_FLOPS = 1 << 38  # of the block that a kernel computes: half a millisecond on an H200
_ROUNDS = 3
_TIMES = 4  # back to back: a device takes longer than the host to launch the next one
_LAUNCHES = 100  # of a small operation
_known: WeakKeyDictionary[ProcessGroup | Any, dict[Hashable, Seconds]] = WeakKeyDictionary()


def calibrated(
    machine: Hardware,
    ring: Ring,
    degree: int,
    kernel: SelectedKernel,
    shape: KVShape,
    like: Tensor,
) -> Hardware:
    """Return a machine with this ring's speeds; its neighbours are `degree` ranks apart.

    All ranks of the group call this together, and exchange the speeds that they know. A speed that
    any rank lacks is measured.
    """
    known = _known.setdefault(ring.group, {})
    links = "links", ring.size, degree
    speeds = kernel.name, shape.key_heads, shape.heads, shape.d, shape.d_v, like.dtype
    note = [links in known, speeds in known]
    notes = ring.gather_notes("measuring", json.dumps(note).encode())
    links_known, speeds_known = zip(*map(json.loads, notes))
    with torch.no_grad(), torch.autocast(like.device.type, enabled=False):
        if not all(links_known):
            say("measuring the links of %d ranks", ring.size)
            known[links] = _slowest(ring, _links(ring, degree, like.device))
        if not all(speeds_known):
            say("measuring the kernel %s", kernel.name)
            known[speeds] = _slowest(ring, _kernel(kernel, shape, like))
    return with_measured(machine, known[links] | known[speeds], shape)


def with_measured(machine: Hardware, seconds: Seconds, shape: KVShape) -> Hardware:
    """Return the machine with these measured seconds; speeds that were not measured stay.

    >>> from ring_attention_pytorch.schedule.hardware import H200
    >>> seconds = {f"near {n}": 1e-4 + n / 100e9 for n in (1 << 16, 8 << 20, 64 << 20)}
    >>> machine = with_measured(H200, seconds, KVShape(1, 32, 8, 128, 128, 2))
    >>> [n for n, _ in machine.hops], machine.forward == H200.forward
    ([0, 65536, 8388608, 67108864], True)
    """
    usual, machine = machine, machine._replace(measured=True)
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
        machine = machine._replace(launch=launch, host=usual.host * launch / usual.launch)
    if "memory" in seconds:
        machine = machine._replace(memory=2 * _COPIES * most / seconds["memory"])
    flops = shape._replace(batch=1).pair_flops * _tokens(shape) ** 2
    if "forward" in seconds:
        machine = machine._replace(forward=flops / seconds["forward"])
    if "backward" in seconds:
        machine = machine._replace(backward=2.5 * flops / seconds["backward"])
    return machine


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


def _links(ring: Ring, degree: int, device: torch.device) -> Seconds | None:
    """Time messages between neighbours, and pulls; None if some rank lacks memory.

    Messages of n bytes are "near n" if both neighbours are on this machine, otherwise "far n".
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
    machines = {ring.machines[rank] for rank in (ring.rank, after, before)}
    kind = "near" if len(machines) == 1 else "far"
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
    """Time pulls of these sizes from all peers' memory, if it is shared."""
    if (shared := shared_by(ring, into.device)) is None:
        return {}
    space, group, ranks = shared
    parts = into.chunk(ring.size - 1)
    space.reserve(group, keys=len(parts[0]))
    others = [ranks[(ring.rank + step) % ring.size] for step in range(1, ring.size)]

    def pull() -> None:
        for rank, part in zip(others, parts):
            part.copy_(space.keys.peer_view(rank, Form.of([part.unsqueeze(0)], len(part)))[0][0])

    return {"pull": _seconds(pull, into.device, ring)}


def _kernel(kernel: SelectedKernel, shape: KVShape, like: Tensor) -> Seconds | None:
    """Time one fully visible block, except for kernels that store scores."""
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
        result = OutputAccumulator(q, v.shape[-1])
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
    """Return the median of a few rounds after a first; ranks of `together` start each together."""
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
    """Return a GPU's seconds per run, averaged over several, without the host's launch time."""
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
    """Return the host's seconds to launch a small operation `_LAUNCHES` times."""
    seconds = []
    for _ in range(1 + _ROUNDS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(_LAUNCHES):
            t.zero_()
        seconds.append(time.perf_counter() - start)
    return median(seconds[1:])
