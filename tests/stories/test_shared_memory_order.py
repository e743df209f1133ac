"""Calls back to back in memory that ranks share, walked on ints: none writes what another reads.

What is recorded of a real run is each rank's writes, reads and barriers, in its own order. All
ranks come to the same barriers. So of two ranks' doings one is surely before the other only if a
meeting lies between. Whatever has none between may happen in any order, and in the walk it does.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain, pairwise, product
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from ring_attention_pytorch.comm import fabric_copies, transports
from ring_attention_pytorch.comm.messages import Form
from ring_attention_pytorch.functional import ring_attn
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime.accumulate import GradAccumulator
from ring_attention_pytorch.schedule.relays import members
from tests.support import threads
from tests.support.cases import Attention, over_shared_memory
from tests.support.sampling import grid


@grid(
    "at_once, ulysses, how",
    [
        (1, 1, {}), (3, 1, {}), (3, 1, dict(late=True, own_low_priority=True)), (1, 2, {}),
        (3, 1, dict(together=True)), (3, 2, dict(together=True)),
        (3, 1, dict(own_apart=True)), (3, 2, dict(own_apart=True)),
    ],
    always=4, drawn=2,
)  # fmt: skip
def test_shared_memory_is_written_anew_when_all_have_read_it(at_once, ulysses, how):
    """Calls follow one another in any order, and one rank reads late."""
    size, case = 4, Attention(32, "zigzag", causal=True)
    read, join = threads.ThreadBuffer.peer_view, threads.ThreadBuffer.join

    def late(buffer: threads.ThreadBuffer, rank: int, *what: object) -> list[Tensor]:
        if buffer.rank == 2 and rank != 2:
            time.sleep(0.03)
        return read(buffer, rank, *what)

    def join_late(buffer: threads.ThreadBuffer, end: int) -> None:
        if buffer.rank == 2:
            time.sleep(0.03)
        join(buffer, end)

    def main(ring: Ring) -> bool:
        (q, k, v), _, dout, _ = case.data()
        at, _ = case.places(ring.rank, size)
        layers = [[(t[:, at] * i).requires_grad_() for t in (q, k, v)] for i in (1, 2, 3)]
        sent = RingPlan.make(*layers[0], causal=True, layout="zigzag", group=ring, ulysses=ulysses)
        shared = over_shared_memory(sent, layers[0], ring, at_once, **how)

        def step(plan: RingPlan) -> list[Tensor]:
            outs = [ring_attn(*mine, plan=plan) for mine in layers]
            grads = [torch.autograd.grad(out, mine, dout[:, at]) for out, mine in zip(outs, layers)]
            return [*outs, *chain(*grads), ring_attn(*layers[1], plan=plan)]

        return all(map(torch.allclose, step(sent), step(shared)))

    with (
        mock.patch.object(threads.ThreadBuffer, "peer_view", late),
        mock.patch.object(threads.ThreadBuffer, "join", join_late),
        threads.late(),
    ):
        assert all(threads.run(size, main)[0])


RANKS, TOKENS = 3, 4
WAYS = {
    "one round": dict(at_once=9),
    "two rounds": dict(at_once=1),
    "two stages": dict(at_once=9, late=True, own_low_priority=True),
    "one stream, all keys": dict(at_once=9, together=True),
    "one stream, own keys apart": dict(at_once=9, own_apart=True),
}
Where = tuple[str, int, int]  # buffer, the rank whose it is, half


class Access(NamedTuple):
    """A write, or a read; from after so many barriers to before the next of so many."""

    where: Where
    first: int
    last: int


class Log:
    """One rank's actions, in order."""

    def __init__(self) -> None:
        self.barriers = 0
        self.writes: list[Access] = []
        self.reads: list[Access] = []
        self.under_way: list[tuple[Where, int]] = []  # begun beside, and not waited for

    def write(self, where: Where) -> None:
        self.writes.append(Access(where, self.barriers, self.barriers))

    def begin_read(self, where: Where) -> None:
        self.under_way.append((where, self.barriers))

    def end_reads(self, buffer: str) -> None:
        for where, first in [each for each in self.under_way if each[0][0] == buffer]:
            self.reads.append(Access(where, first, self.barriers))
            self.under_way.remove((where, first))


class LoggedBuffer(threads.ThreadBuffer):
    """A buffer whose uses are logged."""

    log: Log

    def write_view(self, form: Form) -> list[Tensor]:
        views = super().write_view(form)
        self.log.write((self.name, self.rank, self.slot))
        return views

    def publish(self) -> None:
        self.log.barriers += 1
        super().publish()

    def wait_for_readers(self) -> None:
        self.log.barriers += 1
        super().wait_for_readers()

    def join(self, end: int) -> None:
        super().join(end)
        self.log.end_reads(self.name)


def whose(hub: threads.Hub, t: Tensor) -> Where | None:
    """Where a tensor lies in shared memory, of all or of a machine; None if it is elsewhere."""
    hubs = hub, *hub.parts.values()
    for (name, rank), memory in chain.from_iterable(each.buffers.items() for each in hubs):
        at = t.data_ptr() - memory.data_ptr()
        if 0 <= at < memory.nbytes and t.numel():
            return name, rank, at // memory[0].nbytes
    return None


@contextmanager
def noted(hub: threads.Hub, log: dict[int, Log]) -> Iterator[None]:
    """Note what is read of others: beside, from when it is launched; else where it is."""

    def note(tensors: tuple[Any, ...], beside: bool) -> None:
        mine = log[threading.get_ident()]
        for t in tensors:
            where = whose(hub, t)
            if where is not None:
                mine.begin_read(where)
                if not beside:
                    mine.end_reads(where[0])

    def beside(do: Callable[..., object]) -> Callable[..., object]:
        def run(place: Tensor, *given: Any, **how: Any) -> object:
            parts = given[0] if given and isinstance(given[0], list) else given
            note(tuple(t for t in parts if isinstance(t, Tensor)), beside=True)
            return do(place, *given, **how)

        return run

    def copied(do: Callable[..., object]) -> Callable[..., object]:
        def run(places: list[Tensor], parts: list[Tensor]) -> object:
            note(tuple(parts), beside=False)
            return do(places, parts)

        return run

    settle, borrowed = GradAccumulator.flush, GradAccumulator.add_borrowed
    read: dict[int, list[Tensor]] = defaultdict(list)

    def add_borrowed(total: GradAccumulator, at: slice, part: Tensor) -> None:
        read[id(total)].append(part)
        borrowed(total, at, part)

    def settled(total: GradAccumulator) -> Tensor:
        note(tuple(read.pop(id(total), ())), beside=False)
        return settle(total)

    with (
        mock.patch.object(fabric_copies, "_copy", beside(fabric_copies._copy)),
        mock.patch.object(fabric_copies, "_sum", beside(fabric_copies._sum)),
        mock.patch.object(torch, "_foreach_copy_", copied(torch._foreach_copy_)),
        mock.patch.object(GradAccumulator, "add_borrowed", add_borrowed),
        mock.patch.object(GradAccumulator, "flush", settled),
    ):
        yield


def call(plan: RingPlan, back: bool) -> None:
    """One call without a kernel."""
    k = torch.zeros(1, TOKENS, 1, 2)
    own = plan.keys(k, k)
    if not back:
        for _ in plan.transport.stream(own):
            pass
        return
    totals = GradAccumulator(k), GradAccumulator(k)
    for block, grads in plan.transport.stream_back(own, totals):
        for total, t in zip(grads, block[:2]):
            total.add(slice(0, t.shape[1]), torch.zeros_like(t))
    for total in totals:
        total.finalize()


def logged(
    ring: threads.ThreadRing, space: threads.ThreadSpace, calls: list[tuple[RingPlan, bool]],
    logs: dict[int, Log],
) -> Log:  # fmt: skip
    """Make these calls, of a plan and a direction each, and return this rank's log of `space`."""
    mine = logs[threading.get_ident()] = Log()
    space.reserve(None, keys=1 << 12, grads=1 << 12)
    for name in ("keys", "grads"):
        buffer = getattr(space, name)
        buffer.__class__, buffer.log = LoggedBuffer, mine
    ring.hub.barrier.wait()
    with noted(ring.hub, logs) if ring.rank == 0 else nullcontext():
        ring.hub.barrier.wait()
        for plan, back in calls:
            call(plan, back)
        ring.hub.barrier.wait()
    return mine


def recorded(calls: list[tuple[str, bool]]) -> list[Log]:
    """The logs of all ranks that make these calls, each by a way and a direction."""
    logs: dict[int, Log] = {}

    def main(ring: threads.ThreadRing) -> Log:
        q = torch.zeros(1, TOKENS, 1, 2)
        made = RingPlan.make(q, q, q, causal=True, layout="zigzag", group=ring)
        plans, space = {}, None
        for way, how in WAYS.items():
            plans[way] = over_shared_memory(made, [q] * 3, ring, **how)
            fabric = plans[way].transport.fabric
            space = space or fabric.space  # the largest that any needs is made for all
            object.__setattr__(fabric, "space", space)
        return logged(ring, space, [(plans[way], back) for way, back in calls], logs)

    found, _ = threads.run(RANKS, main)
    return found


MACHINES = (0, 1, 0, 1, 1)
OVER_MACHINES = {
    "all owners": {}, "an owner at a time": dict(memory=0), "window": dict(window=3),
    "no mask": dict(causal=False),
}  # fmt: skip


def recorded_over_machines(calls: list[tuple[str, bool]]) -> list[list[Log]]:
    """The logs of the ranks of each machine, whose relays pass keys on in its memory."""
    logs: dict[int, Log] = {}

    def main(ring: threads.ThreadRing) -> Log:
        q = torch.zeros(1, TOKENS, 1, 2)
        how = dict(causal=True, layout="zigzag", group=ring, transport="gather")
        plans = {way: RingPlan.make(q, q, q, **how | more) for way, more in OVER_MACHINES.items()}
        return logged(ring, ring.near, [(plans[way], back) for way, back in calls], logs)

    with mock.patch.object(transports, "near_by", threads.near_by):
        found, _ = threads.run(len(MACHINES), main, MACHINES)
    return [[found[rank] for rank in members(MACHINES, machine)] for machine in (0, 1)]


def check(logs: list[Log]) -> None:
    """Every read is of the newest writing that is surely over, and none may come meanwhile."""
    writes: dict[Where, list[int]] = defaultdict(list)
    for log in logs:
        assert not log.under_way, "a read that nobody waits for"
        for where, at, _ in log.writes:
            writes[where].append(at)
    assert len({log.barriers for log in logs}) == 1, "not the same barriers on all ranks"
    reads = 0
    for rank, log in enumerate(logs):
        for where, first, last in log.reads:
            if where[1] == rank:
                continue
            reads += 1
            assert any(at < first for at in writes[where]), (where, "is read before it is written")
            among = [at for at in writes[where] if first <= at <= last]
            assert not among, (where, "may be written while rank", rank, "reads it")
    assert reads, "nothing was read of others"


def every_two(ways: Iterable[str] = WAYS) -> list[tuple[str, bool]]:
    """Calls among which each pair of kinds stands once, one behind the other."""
    kinds = [*product(ways, (False, True))]
    left = {a: [b for b in kinds] for a in kinds}
    path, trail = [kinds[0]], []
    while path:  # Hierholzer's walk over all pairs
        if left[path[-1]]:
            path.append(left[path[-1]].pop())
        else:
            trail.append(path.pop())
    return trail[::-1]


def no_call_writes_what_another_reads() -> None:
    check(recorded(every_two()))


def test_no_call_writes_what_another_reads() -> None:
    calls = every_two()
    kinds = 2 * len(WAYS)
    assert len({*pairwise(calls)}) == kinds**2
    no_call_writes_what_another_reads()


def no_call_of_a_machine_writes_what_another_reads() -> None:
    for logs in recorded_over_machines(every_two(OVER_MACHINES)):
        check(logs)


def test_no_call_of_a_machine_writes_what_another_reads() -> None:
    no_call_of_a_machine_writes_what_another_reads()


@pytest.mark.parametrize(
    ("writes", "reads", "said"),
    [
        ([0, 2], [(1, 1)], None),
        ([0, 1], [(1, 1)], "may be written"),
        ([0, 2], [(1, 2)], "may be written"),
        ([1], [(1, 1)], "before it is written"),
    ],
)
def test_what_the_walk_finds(writes: list[int], reads: list[tuple[int, int]], said: str) -> None:
    logs = [Log(), Log()]
    where = "keys", 0, 1
    logs[0].writes = [Access(where, at, at) for at in writes]
    logs[1].reads = [Access(where, *span) for span in reads]
    if said is None:
        check(logs)
        return
    with pytest.raises(AssertionError, match=said):
        check(logs)
