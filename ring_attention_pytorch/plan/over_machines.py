"""The choice of the traffic between machines: arithmetic on ints that every rank does alone.

Ulysses can share the heads among any number of neighbours of a machine. A plan takes the number
whose gather sends the fewest bytes from machine to machine. Of equal ones it takes the largest
whose swap of heads inside machines is worth its time.
"""

from collections.abc import Callable, Iterator
from operator import add, attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_attention_pytorch.comm.fabric_relays import Relays
from ring_attention_pytorch.comm.ulysses import key_heads, land
from ring_attention_pytorch.geometry.segments import count
from ring_attention_pytorch.plan.options import Options
from ring_attention_pytorch.runtime.codec import Codec
from ring_attention_pytorch.runtime.rowwise import wire_dtype
from ring_attention_pytorch.schedule.hardware import H200
from ring_attention_pytorch.schedule.pieces import KVShape, Workload
from ring_attention_pytorch.schedule.relays import (
    Crossing,
    Machines,
    across,
    crossing,
    members,
    swap_crossing,
)
from ring_attention_pytorch.schedule.steps import ring

_SLOWER = int(H200.pull / H200.network)  # a byte between machines takes so many times as long

_SHOWN = 5  # other ways, in a description


class Way(NamedTuple):
    """A way to send keys: heads are shared by `degree` ranks of a machine, keys go by `transport`.

    `crossing` are the bytes that all ranks together send to other machines, forward and backward.
    """

    transport: str
    degree: int
    relayed: bool
    crossing: int
    swapped: int = 0  # bytes that stay in machines, for Ulysses

    def __str__(self) -> str:
        name = f"{self.transport} by relays" if self.relayed else self.transport
        return name if self.degree == 1 else f"ulysses={self.degree}, {name}"


def shape_of(
    q: Tensor, k: Tensor, v: Tensor, degree: int = 1, codec: Codec | None = None
) -> KVShape:
    """Return the shapes that a transport works for, if so many neighbours share the heads.

    With a codec k and v are encoded.

    >>> import torch
    >>> q, k = torch.empty(1, 5, 8, 4), torch.empty(1, 5, 2, 4)
    >>> [shape_of(q, k, k, degree)[1:3] for degree in (1, 2, 4)]
    [(8, 2), (4, 1), (2, 1)]
    """
    (b, _, heads, d), grouped = q.shape, k.shape[2]
    if degree > 1:
        heads, grouped = heads // degree, len(key_heads(heads, grouped, degree)[0])
    wide = wire_dtype(q.dtype) != q.dtype
    d_v, encoded = (v.shape[3], 0) if codec is None else (codec.d_v, sum(codec.widths))
    return KVShape(b, heads, grouped, d, d_v, q.dtype.itemsize, wide, encoded)


def degrees(machines: Machines, heads: int) -> Iterator[int]:
    """Yield the numbers of neighbours on one machine that divide ranks and heads, from 1 on.

    >>> [*degrees((0,) * 4 + (1,) * 4, heads=12)], [*degrees((0, 0, 0, 1), 4)]
    ([1, 2, 4], [1])
    """
    size = len(machines)
    for degree in range(1, size + 1):
        if size % degree or heads % degree:
            continue
        groups = [{*machines[first : first + degree]} for first in range(0, size, degree)]
        if all(len(group) == 1 for group in groups):
            yield degree


def ways(
    blocks: Workload,
    machines: Machines,
    qkv: tuple[Tensor, ...],
    codec: Codec | None = None,
) -> list[Way]:
    """Return all ways to send keys, by the bytes that cross. On one machine there are none."""
    if not any(machines):
        return []
    q, k, v = qkv
    candidates = []
    for degree in degrees(machines, q.shape[2]):
        shape = shape_of(q, k, v, degree, codec)
        work, among = blocks, machines[::degree]  # of the ranks that exchange keys
        if degree > 1:
            queries, keys = _landed(blocks.queries, degree), _landed(blocks.keys, degree)
            work = blocks._replace(queries=queries, keys=keys)
        token_bytes = degree * (2 * shape.token_bytes + shape.grad_bytes)
        swapped = _swapped(blocks, shape, degree)
        direct, relayed = across(work, among)
        hops = degree * crossing(ring(work), among, shape).total
        candidates.append(Way("gather", degree, False, token_bytes * direct, swapped))
        if relayed < direct:
            candidates.append(Way("gather", degree, True, token_bytes * relayed, swapped))
        candidates.append(Way("ring", degree, False, hops, swapped))
    return sorted(candidates, key=attrgetter("crossing"))


def _landed(shards: tuple[tuple, ...], degree: int) -> tuple[tuple, ...]:
    """Return the positions that each group of neighbours holds together."""
    return tuple(land(shards[at : at + degree])[0] for at in range(0, len(shards), degree))


def _swapped(blocks: Workload, shape: KVShape, degree: int) -> int:
    """Return the bytes that all ranks swap inside machines, forward and backward."""
    queries, keys = (sum(map(count, side)) for side in blocks[:2])
    return 2 * (degree - 1) * (queries * shape.query_bytes + keys * shape.token_bytes)


def degree_over_machines(
    options: Options,
    blocks: Workload,
    machines: Machines,
    qkv: tuple[Tensor, ...],
    codec: Codec | None = None,
) -> int:
    """Return how many neighbours swap heads: as the option says, or as few bytes cross then.

    >>> import torch
    >>> from ring_attention_pytorch.geometry.layouts import all_segments
    >>> from ring_attention_pytorch.geometry.tiles import Mask
    >>> four = all_segments("zigzag", 4, 4096)
    >>> work, q = Workload(four, four, Mask(causal=True)), torch.empty(1, 1024, 8, 64)
    >>> for heads in (8, 2, 1):
    ...     k = torch.empty(1, 1024, heads, 64)
    ...     print(degree_over_machines(Options(), work, (0, 0, 1, 1), (q, k, k)))
    2
    2
    1
    """
    if options.ulysses is not None:
        return options.ulysses
    if options.transport == "ring":
        return 1
    gathers = [way for way in ways(blocks, machines, qkv, codec) if way.transport == "gather"]
    if not gathers:
        return 1
    plain = next(way for way in gathers if way.degree == 1 and not way.relayed)
    best = [way for way in gathers if way.crossing == gathers[0].crossing]
    worth_it = []
    for way in best:
        if way.swapped <= _SLOWER * (plain.crossing - way.crossing):
            worth_it.append(way.degree)
    return max(worth_it, default=min(way.degree for way in best))


def transport_over_machines(blocks: Workload, machines: Machines, shape: KVShape) -> str | None:
    """Return "gather" if it sends fewer bytes from machine to machine than a ring; or None."""
    if not any(machines):
        return None
    tokens = min(across(blocks, machines))
    gathered = tokens * (2 * shape.token_bytes + shape.grad_bytes)
    return "gather" if gathered < crossing(ring(blocks), machines, shape).total else None


# --- the bytes that a plan sends ---


def plan_crossing(plan: Any) -> Crossing:
    """Return the bytes that leave each rank of a plan's ring for another machine."""
    machines, degree, shape = plan.ring.machines, plan.degree, plan.chosen.shape
    forward, backward = [0] * len(machines), [0] * len(machines)
    relayed = is_relayed(plan)
    for place in range(degree):
        among = crossing(plan.schedule, machines[place::degree], shape, relayed)
        forward[place::degree], backward[place::degree] = among
    if degree > 1:
        swapped = swap_crossing(plan.shards, machines, shape, degree)
        forward = list(map(add, forward, swapped.forward))
        backward = list(map(add, backward, swapped.backward))
    return Crossing(tuple(forward), tuple(backward))


def is_relayed(plan: Any) -> bool:
    """Return whether keys of a plan's calls go by way of relays."""
    return isinstance(plan.transport.fabric, Relays)


def of_machines(plan: Any, named: Callable[[float], str]) -> list[str]:
    """Describe which ranks share a machine, and the bytes between machines; nothing on one machine.

    `named` writes bytes.
    """
    machines = plan.ring.machines
    if not any(machines):
        return []
    names = []
    for machine in range(1 + max(machines)):
        names.append(f"{machine}: ranks {_ranks(members(machines, machine))}")
    sent, rank = plan_crossing(plan), plan.ring.rank
    lines = [
        f"machines: {'; '.join(names)}",
        f"between machines: this rank sends {named(sent.forward[rank])} forward and "
        f"{named(sent.backward[rank])} backward, all ranks together {named(sent.total)}",
    ]
    b, n, m, heads, grouped, d, d_v, dtype, *_ = plan.signature
    shapes = (b, n, heads, d), (b, m, grouped, d), (b, m, grouped, d_v)
    like = getattr(torch, dtype.removeprefix("torch."))
    qkv = tuple(torch.empty(shape, dtype=like, device="meta") for shape in shapes)
    taken = Way(plan.chosen.name, plan.degree, is_relayed(plan), 0)
    others = [
        f"{way} {named(way.crossing)}"
        for way in ways(plan.shards, machines, qkv, plan.codec)
        if str(way) != str(taken)
    ]
    return [*lines, f"by {taken}; others would send: {', '.join(others[:_SHOWN])}"]


def _ranks(ranks: tuple[int, ...]) -> str:
    """Name ranks shortly.

    >>> _ranks((2, 3, 4)), _ranks((0, 5))
    ('2 to 4', '0, 5')
    """
    if len(ranks) > 1 and ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]} to {ranks[-1]}"
    return ", ".join(map(str, ranks))
