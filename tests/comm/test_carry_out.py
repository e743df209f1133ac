"""Transports send what their schedule says, when it says."""

from itertools import chain
from typing import Any

import pytest
import torch

from ring_attention_pytorch import RingPlan
from ring_attention_pytorch.comm.messages import Form
from ring_attention_pytorch.runtime.accumulate import GradAccumulator
from ring_attention_pytorch.schedule.steps import Transfer
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
    """Of each exchange, the peers and bytes that the schedule says: sent, and received."""
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
        assert came == [*plan.schedule.positions(back, plan.place)]

    threads.run(4, main)
