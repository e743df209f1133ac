"""How fast a kernel and the links of a group are: measured once for each, for the cost model.

The slowest rank counts, so all ranks get the same figures and choose alike.
"""

import json
import socket
import time
from collections.abc import Callable, Hashable
from statistics import median
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ring_attention_pytorch.contract import Grads, Keys, Saved, Terms
from ring_attention_pytorch.cost import H200, Machine, choose_transport
from ring_attention_pytorch.kernels import Chosen
from ring_attention_pytorch.layouts import Segment, Tile
from ring_attention_pytorch.ring import Ring
from ring_attention_pytorch.running import Result, Sum
from ring_attention_pytorch.transports.messages import form_of, room
from ring_attention_pytorch.transports.pieces import Blocks, Job
from ring_attention_pytorch.transports.symmetric import space_of

Seconds = dict[str, float]

ROOM = 8 << 30  # bytes at most for others' keys where neither transport nor memory is given

_BYTES = (1 << 16, 8 << 20, 64 << 20)  # of messages
_FLOPS = 1 << 37  # of the block that a kernel computes: a fraction of a millisecond on an H200
_ROUNDS = 3
_known: WeakKeyDictionary[ProcessGroup, dict[Hashable, Seconds]] = WeakKeyDictionary()


def room_left(like: Tensor) -> int:
    """Bytes that others' keys may take here: on CUDA at most half of what nobody has."""
    if not like.is_cuda:
        return ROOM
    kept = torch.cuda.memory_reserved(like.device) - torch.cuda.memory_allocated(like.device)
    return min(ROOM, (torch.cuda.mem_get_info(like.device)[0] + kept) // 2)


def settle(
    named: str | None,
    ring: Ring,
    kernel: Chosen,
    blocks: Blocks,
    job: Job,
    at_once: int,
    like: Tensor,
) -> tuple[str, Machine]:
    """The transport of a plan, and the machine for which it was chosen if none was named.

    All ranks of the group ask together. On a CPU nothing is measured.
    """
    if named is not None:
        return named, H200
    if not like.is_cuda or ring.size == 1:
        return choose_transport(blocks, job, at_once, None), H200
    machine = machine_of(ring, kernel, job, like)
    return choose_transport(blocks, job, at_once, machine), machine


def machine_of(ring: Ring, kernel: Chosen, job: Job, like: Tensor) -> Machine:
    """What this ring is, as the cost model sees it. All ranks of the group ask together."""
    hosts = [name.decode() for name in ring.gather_bytes(socket.gethostname().encode())]
    links = _once(ring, ("links", ring.size), lambda: _links(ring, hosts, like.device))
    asked = kernel.name, job.key_heads, job.heads, job.d, job.d_v, like.dtype
    speeds = _once(ring, asked, lambda: _kernel(kernel, job, like))
    return machine_from(links | speeds, same_host(hosts), job)


def machine_from(found: Seconds, domain: int, job: Job) -> Machine:
    """The machine that takes so many seconds; what was not measured is as on an H200.

    >>> found = {f"near {n}": 1e-4 + n / 100e9 for n in (1 << 16, 8 << 20, 64 << 20)}
    >>> machine = machine_from(found, domain=4, job=Job(1, 32, 8, 128, 128, 2))
    >>> [n for n, _ in machine.hops], machine.domain, machine.forward == H200.forward
    ([0, 65536, 8388608, 67108864], 4, True)
    """
    machine, (least, *_, most) = H200._replace(domain=domain), _BYTES
    hops = [(n, found[f"near {n}"]) for n in _BYTES if f"near {n}" in found]
    if hops:
        machine = machine._replace(hops=((0, hops[0][1]), *hops))
    if "far" in " ".join(found):
        hop = found[f"far {least}"]
        machine = machine._replace(
            network_hop=hop, network=most / max(found[f"far {most}"] - hop, 1e-9)
        )
    if "pull" in found:
        machine = machine._replace(pull=most / found["pull"])
    for name, times in (("forward", 1.0), ("backward", 2.5)):
        if name in found:
            flops = times * job.pair_flops // job.batch * _tokens(job) ** 2
            machine = machine._replace(**{name: flops / found[name]})
    return machine


def same_host(hosts: list[str]) -> int:
    """How many consecutive ranks share a machine, wherever one counts from.

    >>> same_host(["a", "a", "b", "b"]), same_host(["a", "a", "a"]), same_host(["a", "b", "b"])
    (2, 3, 1)
    """
    sizes = (n for n in range(len(hosts), 0, -1) if len(hosts) % n == 0)
    return next(
        n for n in sizes if all(len({*hosts[i : i + n]}) == 1 for i in range(0, len(hosts), n))
    )


def _once(ring: Ring, what: Hashable, measure: Callable[[], Seconds]) -> Seconds:
    """The most seconds that any rank of the group took; nothing where one of them could not."""
    known = _known.setdefault(ring.group, {})
    if what not in known:
        try:
            mine: Seconds | None = measure()
        except RuntimeError:  # no memory left, say: then it is not worth a failure
            mine = None
        told = [json.loads(note) for note in ring.gather_long(json.dumps(mine).encode())]
        names = {name for each in told for name in each or ()}
        slowest = {n: max(each[n] for each in told if each and n in each) for n in names}
        known[what] = {} if None in told else slowest
    return known[what]


def _links(ring: Ring, hosts: list[str], device: torch.device) -> Seconds:
    """Of messages between neighbours, near where both are on this host, and of pulls."""
    after, before = ((ring.rank + step) % ring.size for step in (1, -1))
    mine, *others = (hosts[ring.first + rank] for rank in (ring.rank, after, before))
    kind = "near" if {*others} == {mine} else "far"
    like = torch.empty(0, device=device)
    sent, received = (room(like, _BYTES[-1]).zero_() for _ in range(2))
    found = {}
    for n in _BYTES:

        def hop(n: int = n) -> None:
            ring.exchange([(after, sent[:n])], [(before, received[:n])]).wait()

        found[f"{kind} {n}"] = _seconds(hop, ring)
    return found | _pulls(ring, received)


def _pulls(ring: Ring, into: Tensor) -> Seconds:
    """Of as many bytes as there is room for, out of all others' memory, where that can be."""
    shared = ring.shared() if into.is_cuda else None
    space = None if shared is None else space_of(shared[0], into.device)
    if space is None:
        return {}
    group, ranks = shared
    parts = into.chunk(ring.size - 1)
    space.make_room(group, len(parts[0]), 0)
    others = [ranks[(ring.rank + step) % ring.size] for step in range(1, ring.size)]

    def pull() -> None:
        for rank, part in zip(others, parts):
            part.copy_(space.keys.of(rank, form_of([part.unsqueeze(0)], len(part)))[0][0])

    return {"pull": _seconds(pull, ring)}


def _kernel(kernel: Chosen, job: Job, like: Tensor) -> Seconds:
    """Of one block that shows everything; no kernel that holds scores in memory is worth it."""
    if not {"eager", "flex"}.isdisjoint(kernel.name.split("+")):
        return {}
    n = _tokens(job)
    q = like.new_ones((1, n, job.heads, job.d))
    k, v = (like.new_ones((1, n, job.key_heads, width)) for width in (job.d, job.d_v))
    dout = like.new_ones((1, n, job.heads, job.d_v))
    keys, terms = Keys(k, v, None, (Segment(0, 1, n),)), Terms(job.d**-0.5, None, n)
    tiles = [Tile(slice(0, n), slice(0, n), None, None)]

    def forward() -> Result:
        result = Result(q, v)
        kernel.forward(q, keys, tiles, terms, result)
        return result

    out, lse = forward().final()

    def backward() -> None:
        saved = Saved(q, out, lse, dout, None)
        kernel.backward(saved, keys, tiles, terms, Grads(Sum(q), Sum(k), Sum(v)))

    return {"forward": _seconds(forward), "backward": _seconds(backward)}


def _tokens(job: Job) -> int:
    """Queries and keys of the block that is measured, of one sample."""
    pairs = _FLOPS / max(1, job.pair_flops // max(1, job.batch))
    return max(128, min(4096, int(pairs**0.5) // 128 * 128))


def _seconds(run: Callable[[], object], together: Ring | None = None) -> float:
    """The median of a few, begun together by all ranks of the group; the first does not count."""
    cuda, found = torch.cuda.is_available(), []
    for _ in range(1 + _ROUNDS):
        if together is not None:
            together.gather_bytes(b"")
        start = time.perf_counter()
        run()
        if cuda:
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return median(found[1:])
