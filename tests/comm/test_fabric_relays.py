"""A gather over several machines: exact, with only the bytes that must cross, and repeatable."""

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ring_attention_pytorch.comm.fabric_relays import Relays
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime.accumulate import GradAccumulator
from ring_attention_pytorch.schedule.relays import crossing
from tests.support import threads
from tests.support.cases import Attention, check, check_in_threads, errors, oracle, shard
from tests.support.features import together
from tests.support.over_machines import CASES, CAUSAL, SHUFFLED, TWO, UNEVEN, planned
from tests.support.random_cases import problem
from tests.support.random_draw import draw
from tests.support.second_order import Second


@pytest.mark.parametrize("name", CASES)
def test_attention_over_several_machines_is_dense_attention(name):
    options, machines = CASES[name]
    check_in_threads(Attention(**CAUSAL | options), len(machines), machines)


@pytest.mark.parametrize(
    ("how", "machines"),
    [
        (dict(layout="zigzag"), TWO),
        (dict(causal=False), SHUFFLED),
        (dict(window=30, layout="zigzag"), UNEVEN),
    ],
)
def test_bytes_that_cross_are_those_of_the_schedule(how, machines):
    """Up to the padding between k and v. The schedule's are the union that is needed."""
    case = Attention(**CAUSAL | dict(length=48, batch=1, key_heads=1) | how)
    plan = planned(case, machines)
    assert type(plan.transport.fabric) is Relays
    assert plan.transport.fabric.sends_messages
    assert not plan.transport.fabric.taped
    hub = check_in_threads(case, len(machines), machines)
    crossed = sum(n for (a, b), n in hub.ways.items() if machines[a] != machines[b])
    assert crossed == crossing(plan.schedule, machines, plan.chosen.shape, relayed=True).total


def test_a_relay_rounds_the_sum_of_its_machine_once():
    """Two addends that bfloat16 loses one by one beside 1 are not lost together."""
    small = 0.75 * 2**-8

    def main(ring: threads.ThreadRing) -> float:
        q = torch.zeros(1, 2, 1, 8, dtype=torch.bfloat16)
        plan = RingPlan.make(q, q, q, group=ring, transport="gather")
        own = GradAccumulator(q), GradAccumulator(q)
        for keys, sums in plan.transport.stream_back(plan.keys(q, q), own):
            part = torch.full_like(keys.k, 0.0 if keys.own else (0.0, 1.0, small, small)[ring.rank])
            for total in sums:
                total.add(slice(0, keys.k.shape[1]), part.clone())
        return own[0].finalize().float().max().item()

    assert threads.run(4, main, (0, 1, 1, 1))[0][0] == 1 + 2**-7


@pytest.mark.parametrize("machines", [(0,) * 4, (0, 1, 2, 3)])
def test_where_relays_spare_nothing_there_are_none(machines):
    case = Attention(**CAUSAL, layout="zigzag", length=32)
    assert type(planned(case, machines).transport.fabric) is not Relays


@pytest.mark.parametrize("seed", [4, 9, 23, 42])
def test_random_cases_are_right_over_several_machines(seed):
    assert not problem(draw(seed), machines=True), draw(seed)


def test_second_derivatives_and_tangents_cross_too():
    found = Second(together(("causal", "softclamp", "key mask"))).errors(
        3, "zigzag", (0, 1, 0), transport="gather"
    )
    assert all(error < 1e-12 for error in found.values()), found


def over_processes(case: Attention) -> tuple[dict[str, float], str]:
    """For a pool: ranks 0 and 2 are on one machine, 1 and 3 on another."""
    with mock.patch.dict(os.environ, RING_ATTENTION_MACHINE=f"m{dist.get_rank() % 2}"):
        ring = Ring(dist.new_group())
        fabric = RingPlan.make(*case.data()[0], causal=True, group=ring, transport="gather")
        mine = shard(case, ring)
    return errors(case, ring.rank, ring.size, mine, oracle(case)), type(
        fabric.transport.fabric
    ).__name__


@pytest.mark.thorough
def test_processes_gather_by_relays(pools):
    case = Attention(**CAUSAL, layout="zigzag", length=45)
    found, fabrics = zip(*pools(4).run(over_processes, case))
    check(case, 4, found)
    assert {*fabrics} == {"Relays"}
