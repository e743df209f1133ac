"""Transports send what their schedule says, when it says, and do in time what was left."""

from dataclasses import dataclass, field
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ring_attention_pytorch import RingPlan
from ring_attention_pytorch.comm.messages import Form
from ring_attention_pytorch.comm.scheduled_transport import ScheduledTransport
from ring_attention_pytorch.geometry.layouts import all_segments
from ring_attention_pytorch.geometry.segments import Segment
from ring_attention_pytorch.geometry.tiles import Mask
from ring_attention_pytorch.runtime.accumulate import Deferred, GradAccumulator
from ring_attention_pytorch.runtime.interfaces import KVBlock
from ring_attention_pytorch.schedule.pieces import Workload
from ring_attention_pytorch.schedule.pieces import rounds_of as rounds_of
from ring_attention_pytorch.schedule.steps import (
    GRADS,
    Block,
    Part,
    Program,
    Schedule,
    Transfer,
    gather,
    ring,
)
from tests.support import threads


class Recorded(threads.ThreadRing):
    """A ring that remembers its exchanges: peers and bytes, sent and received."""

    def exchange(self, sends: Any, receives: Any) -> threads.ThreadTransfer:
        mine = [[(peer, t.nbytes) for peer, t in messages] for messages in (sends, receives)]
        self.exchanges.append(mine)
        return super().exchange(sends, receives)


def done(ring: Recorded, how: dict[str, Any], back: bool) -> tuple[RingPlan, list, list]:
    """A plan; the exchanges of a call without a kernel; and the keys that it would compute on."""
    k = torch.zeros(1, 5, 2, 4)
    plan = RingPlan.make(k, k, k, causal=True, group=ring, **how)
    ring.exchanges, came = [], []
    own = plan.keys(k, k)
    if not back:
        came = [block.segments for block in plan.transport.stream(own)]
    else:
        totals = GradAccumulator(k), GradAccumulator(k)
        for block, grads in plan.transport.stream_back(own, totals):
            for total, t in zip(grads, block[:2]):
                total.add(slice(0, t.shape[1]), torch.zeros_like(t))
            came.append(block.segments)
    return plan, ring.exchanges, came


def told(plan: RingPlan, back: bool) -> list[list[list[tuple[int, int]]]]:
    """List the peers and bytes of each exchange by the schedule: sent, and received."""
    program = plan.schedule[1 + back]
    ranks, rank = range(plan.ring.size), plan.ring.rank
    like = torch.zeros(1, 5, 2, 4)

    def nbytes(of: Transfer, peer: int, user: int) -> int:
        copies = program.copies(of, user)
        return Form.of([like, like], sum(c.length for c in copies if c.peer == peer)).nbytes

    found = []
    for number in chain.from_iterable(step.start for step in program.steps):
        transfer = program.transfers[number]
        sends = [(rank + d) % len(ranks) for d in transfer.distances]
        comes = [(rank - d) % len(ranks) for d in transfer.distances]
        found.append([
            [(user, nbytes(transfer, rank, user)) for user in sends],
            [(peer, nbytes(transfer, peer, rank)) for peer in comes],
        ])  # fmt: skip
    return found


@pytest.mark.parametrize("how", [dict(transport="ring"), dict(transport="gather"),
                                 dict(transport="gather", memory=0)], ids=str)  # fmt: skip
@pytest.mark.parametrize("back", [False, True])
def test_transports_send_what_the_schedule_says_when_it_says(how, back):
    def main(ring: threads.ThreadRing) -> None:
        plan, exchanges, came = done(Recorded(ring.hub, ring.rank), how, back)
        assert exchanges == told(plan, back)
        program = plan.schedule.backward if back else plan.schedule.forward
        held = zip(program.parts, plan.schedule.positions(back, plan.place))
        assert came == [keys for part, keys in held if keys or program.blocks[part.block].whole]

    threads.run(4, main)


@dataclass
class _Told:
    """A call that keeps a diary."""

    program: Any
    diary: list[str] = field(default_factory=list)

    def start(self, number: int) -> None:
        if self.program.transfers[number].kind == GRADS:
            self.diary.append("gradients start")

    def wait(self, number: int) -> None:
        self.diary.append("wait")

    def keys(self, part: Part) -> Any:
        return KVBlock(*[torch.empty(0)] * 2, None, (Segment(0, 1, 1),))

    def grads(self, part: Part, keys: KVBlock) -> tuple[()]:
        return ()

    def computed(self, part: Part) -> None:
        self.diary.append("dk, dv")


class _Telling(ScheduledTransport):
    @staticmethod
    def call_type(carrier: Any, program: Program, own: Any, totals: Any) -> Any:
        carrier.known.append(_Told(program))
        return carrier.known[-1]

    known: Any = ()


def diary(schedule: Schedule) -> list[str]:
    """List a rank's actions in backward, in order."""
    carrier, later = _Telling(schedule, None), Deferred()
    object.__setattr__(carrier, "known", [])
    for _ in carrier.stream_back(None, (), later):
        later.append(lambda: carrier.known[0].diary.append("dq"))
    later.do()
    return carrier.known[0].diary


def what_is_left_is_done_in_time() -> None:
    """When gradients have started, and before anything is waited for."""
    three = all_segments("zigzag", 3, 24)
    work = Workload(three, three, Mask(causal=True))
    one_round = gather(work, [Block.of(each) for each in rounds_of(work, 2)])
    assert diary(one_round) == [
        "dk, dv", "dq", "wait", "dk, dv", "gradients start", "dq", "wait",
    ]  # fmt: skip
    assert diary(ring(work)) == [
        "dk, dv", "dq", "wait", "dk, dv", "gradients start", "dq", "wait", "dk, dv", "dq", "wait",
        "gradients start", "wait",
    ]  # fmt: skip
    deferred, some = Deferred(), slice(1, 2)
    assert (
        GradAccumulator(torch.zeros(2, 3, 1), deferred=deferred).samples(some).deferred is deferred
    )


def no_two_parts_leave_something_for_the_same_queries() -> None:
    """Also where nothing is waited for between them."""
    later = Deferred()
    program: Any = SimpleNamespace(steps=[((), (), "one part"), ((), (), "another")])
    carrier = _Telling(SimpleNamespace(backward=program), None)
    object.__setattr__(carrier, "known", [])
    for keys, _ in carrier.stream_back(None, (), later):
        assert not later, keys
        later.append(lambda: None)


def test_no_two_parts_leave_something_for_the_same_queries():
    no_two_parts_leave_something_for_the_same_queries()


def test_what_is_left_is_done_in_time():
    what_is_left_is_done_in_time()
