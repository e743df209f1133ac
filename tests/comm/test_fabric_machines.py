"""A gather over machines that share memory inside: exact, in few messages, and repeatable."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from ring_attention_pytorch.comm import transports
from ring_attention_pytorch.comm.fabric_machines import MachineMemory, _fill
from ring_attention_pytorch.comm.fabric_messages import Messages
from ring_attention_pytorch.functional import ring_attn
from ring_attention_pytorch.plan.explain import explain_plan
from ring_attention_pytorch.plan.over_machines import is_relayed
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.schedule.relays import crossing
from tests.support import threads
from tests.support.cases import Attention, check_in_threads
from tests.support.diary import Diaries
from tests.support.over_machines import CASES, CAUSAL, SHUFFLED, TWO, UNEVEN, planned
from tests.support.random_cases import problem
from tests.support.random_draw import draw


@contextmanager
def sharing() -> Iterator[None]:
    """Ranks of a machine share memory; copies come as late as they may."""
    with mock.patch.object(transports, "near_by", threads.near_by), threads.late():
        yield


@pytest.mark.parametrize("name", CASES)
def test_attention_over_machines_that_share_memory_is_dense_attention(name):
    options, machines = CASES[name]
    with sharing():
        check_in_threads(Attention(**CAUSAL | options), len(machines), machines)


@pytest.mark.parametrize(
    ("how", "machines"),
    [
        (dict(layout="zigzag"), TWO),
        (dict(causal=False, memory=0), SHUFFLED),
        (dict(layout="zigzag"), UNEVEN),
    ],
)
def test_messages_are_those_that_cross(how, machines):
    """Inside a machine there are none; across, they are the union that is needed."""
    case = Attention(**CAUSAL | dict(length=48, batch=1, key_heads=1) | how)
    with sharing():
        plan = planned(case, machines)
        hub = check_in_threads(case, len(machines), machines)
    assert type(plan.transport.fabric) is MachineMemory
    assert plan.tapes is None
    assert not plan.capturable
    assert is_relayed(plan)
    assert "the memory of each machine" in explain_plan(plan)
    assert all(machines[a] != machines[b] for a, b in hub.ways), "a message inside a machine"
    crossed = sum(hub.ways.values())
    assert crossed == crossing(plan.schedule, machines, plan.chosen.shape, relayed=True).total


def test_neighbours_of_one_machine_swap_heads_in_its_memory():
    """Around a gather that has nothing to relay: of each subring there is one rank a machine."""
    case = Attention(**CAUSAL, layout="zigzag", ulysses=2, length=44)
    with sharing():
        plan = planned_with_heads(case)
        hub = check_in_threads(case, 4, TWO)
    assert type(plan.transport.fabric) is Messages
    assert plan.ulysses.by.name == "shared memory"
    assert {TWO[a] != TWO[b] for a, b in hub.ways} == {True}


def planned_with_heads(case: Attention) -> RingPlan:
    q, k, v = case.data()[0]

    def main(ring: threads.ThreadRing) -> RingPlan:
        at, _ = case.places(ring.rank, ring.size)
        mine = (t[:, at] for t in (q, k, v))
        return RingPlan.make(
            *mine, causal=True, layout="zigzag", group=ring, ulysses=2, transport="gather"
        )

    return threads.run(4, main, TWO)[0][0]


def test_neighbours_of_two_machines_share_nothing():
    with sharing():
        check_in_threads(
            Attention(**CAUSAL, layout="zigzag", ulysses=2, length=44), 4, (0, 1, 1, 0)
        )


def test_calls_follow_one_another_and_repeat_to_the_bit():
    """Calls of two plans alternate in any order, while one rank reads late."""
    case = Attention(**CAUSAL, layout="zigzag", length=40)
    (q, k, v), _, dout, _ = case.data()

    def main(ring: threads.ThreadRing) -> bool:
        at, _ = case.places(ring.rank, ring.size)
        mine = [t[:, at].clone().requires_grad_() for t in (q, k, v)]
        how = dict(causal=True, layout="zigzag", group=ring, transport="gather")
        plans = [RingPlan.make(*mine, **how, memory=memory) for memory in (None, 0)]

        def step(plan: RingPlan) -> list[torch.Tensor]:
            out = ring_attn(*mine, plan=plan)
            return [out, *torch.autograd.grad(out, mine, dout[:, at])]

        first = [step(plan) for plan in plans]
        outs = [ring_attn(*mine, plan=plan) for plan in plans for _ in range(2)]
        again = [torch.autograd.grad(out, mine, dout[:, at]) for out in outs[::-1]]
        wanted = [first[1], first[1], first[0], first[0]]
        return all(
            torch.equal(a, b) for want, got in zip(wanted, again) for a, b in zip(want[1:], got)
        )

    with sharing():
        assert all(threads.run(5, main, (0, 1, 0, 1, 1))[0])


def test_a_message_has_each_key_once_wherever_sums_begin():
    """Sums of a slot's tokens may reach over two messages, or over a part of one."""
    slot, sums = torch.arange(12.0)[None, :, None, None], []
    for here in (slice(0, 2), slice(2, 7), slice(7, 12)):
        sums.append((here, [slot[:, here], -slot[:, here]]))
    for at in (slice(0, 5), slice(5, 6), slice(6, 12)):
        rooms = [torch.full((1, at.stop - at.start, 1, 1), torch.nan) for _ in range(2)]
        _fill(rooms, at, sums)
        assert torch.equal(rooms[0], slot[:, at])
        assert torch.equal(rooms[1], -slot[:, at])


@pytest.mark.parametrize("seed", [4, 9, 23, 42, 77])
def test_random_cases_are_right_over_machines_that_share_memory(seed):
    with sharing():
        assert not problem(draw(seed), machines=True), draw(seed)


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_wait_for_one_another_in_one_order(name):
    """A rank that needs nothing does, too; and on every machine, however many ranks it has."""
    options, machines = CASES[name]
    case, diaries = Attention(**CAUSAL | options), Diaries(len(machines))

    def main(ring: threads.ThreadRing) -> None:
        diaries.of(ring)
        case.shard(ring)

    with mock.patch.object(transports, "near_by", threads.near_by), diaries.kept():
        threads.run(len(machines), main, machines)
    first, *others = diaries.lines
    assert len(first) > 10
    assert all(other == first for other in others)


VARIED = [dict(causal=True), dict(causal=True, memory=0), dict(causal=True, window=4), dict()]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("machines", [TWO, UNEVEN, SHUFFLED, (0, 1, 1, 0)])
def test_no_slot_is_written_while_another_rank_reads_it(machines, seed):
    """In calls of one, two and more rounds, forward and backward in any order."""
    diaries, layout = Diaries(len(machines)), ("zigzag", "contiguous")[seed % 2]
    case = Attention(length=6 * len(machines), layout=layout)
    tensors, _, dout, _ = case.data()

    def main(ring: threads.ThreadRing) -> None:
        diaries.of(ring)
        at, _ = case.places(ring.rank, ring.size)
        mine = [t[:, at].clone().requires_grad_() for t in tensors]
        how = dict(layout=layout, group=ring, transport="gather", ulysses=1)
        plans = [RingPlan.make(*mine, **how, **more) for more in VARIED]
        turn, outs = random.Random(seed), []
        for _ in range(24):
            if outs and turn.random() < 0.5:
                torch.autograd.grad(outs.pop(turn.randrange(len(outs))), mine, dout[:, at])
            else:
                outs.append(ring_attn(*mine, plan=turn.choice(plans)))

    with mock.patch.object(transports, "near_by", threads.near_by), diaries.kept():
        threads.run(len(machines), main, machines)
    assert {use.writes for use in diaries.uses} == {False, True}
    assert not diaries.clashes()
