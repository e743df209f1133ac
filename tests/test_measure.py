"""What the cost model is told of a machine: measured once, the same on all ranks."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from ring_attention_pytorch import RingPlan, explain_plan, measure
from ring_attention_pytorch.contract import Case
from ring_attention_pytorch.cost import H200, choose_transport
from ring_attention_pytorch.kernels import choose
from ring_attention_pytorch.layouts import Visible, all_segments
from ring_attention_pytorch.measure import machine_from, machine_of, room_left, settle
from ring_attention_pytorch.ring import Ring
from ring_attention_pytorch.transports.pieces import Blocks, Job

JOB = Job(1, 2, 1, 16, 16, 4)
NEAR = {f"near {n}": 1e-4 + n / 100e9 for n in measure._BYTES}
FAR = {f"far {n}": 1e-3 + n / 1e9 for n in measure._BYTES}


def measured() -> tuple[dict, bool, int]:
    """For a pool: what this rank makes of the machine, by little; again nothing is measured."""
    measure._BYTES, measure._FLOPS = (1 << 10, 1 << 12, 1 << 16), 1 << 22
    like = torch.empty(0)
    kernel, ring = choose("sdpa", Case("cpu", torch.float32, d=16, d_v=16)), Ring()
    machine = machine_of(ring, kernel, JOB, like)
    before, measure._seconds = measure._seconds, None
    again = machine_of(ring, kernel, JOB, like)
    measure._seconds = before
    return machine._asdict(), again == machine, len(measure._known[ring.group])


@pytest.mark.parametrize("size", [2, 4])
def test_all_ranks_see_the_same_machine_and_measure_it_once(pools, size):
    found = pools(size).run(measured)
    assert all(each == found[0] for each in found)
    machine, repeats, known = found[0]
    assert repeats
    assert known == 2  # links and kernel
    assert machine["domain"] == size
    assert machine["pull"] == H200.pull  # there is no shared memory to pull from
    for speed in ("forward", "backward"):
        assert 0 < machine[speed] < 1e13
    assert all(a < b and s > 0 for (a, s), (b, _) in pairwise(machine["hops"]))


def failing(rank: int) -> dict:
    """For a pool: one rank has no memory left to measure with."""
    ring = Ring()
    measure._known.pop(ring.group, None)

    def once() -> dict[str, float]:
        if ring.rank == rank:
            raise torch.OutOfMemoryError("no memory left")
        return {"near 1": 1.0}

    found = measure._once(ring, "this", once)
    measure._known.pop(ring.group)
    return found


def test_what_one_rank_could_not_measure_nobody_knows(pools):
    assert pools(4).run(failing, 2) == [{}] * 4
    assert pools(4).run(failing, -1) == [{"near 1": 1.0}] * 4


def test_slow_links_change_the_choice():
    everyone = all_segments("zigzag", 4, 4 * 8192)
    blocks, job = Blocks(everyone, everyone, Visible(causal=True)), Job(1, 32, 8, 128, 128, 2)
    fast = machine_from(NEAR | {"pull": (64 << 20) / 400e9}, 4, job)
    assert fast.pull == pytest.approx(400e9)
    assert choose_transport(blocks, job, 3, fast) == "gather"
    slow = machine_from(NEAR | {"pull": (64 << 20) / 1e9}, 4, job)
    assert choose_transport(blocks, job, 3, slow) == "ring"


def test_far_ranks_are_reached_over_the_network():
    machine = machine_from(FAR, 1, JOB)
    assert machine.network == pytest.approx(1e9, rel=0.01)
    assert machine.network_hop == pytest.approx(1e-3, rel=0.1)
    assert machine.hops == H200.hops


def test_a_cpu_measures_nothing_and_a_gpu_gives_at_most_half_of_what_is_left(monkeypatch):
    q = torch.empty(1, 4, 2, 8)
    plan = RingPlan.make(q, q, q)
    assert plan.memory == measure.ROOM == room_left(q)
    assert plan.machine is H200
    asked = plan.ring, plan.kernel, plan.blocks, plan.job, 1, q
    assert settle(None, *asked) == ("ring", H200)
    assert settle("gather", *asked) == ("gather", H200)
    on_gpu = SimpleNamespace(is_cuda=True, device="cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 9000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 500)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 300)
    assert room_left(on_gpu) == (1000 + 500 - 300) // 2


def test_explaining_says_whose_speeds_they_are():
    ring = Ring.alone()
    ring.size = 2
    q = torch.empty(1, 4, 2, 8)
    plan = RingPlan.make(q, q, q, causal=True, transport="gather")
    two = all_segments("contiguous", 2, 8)
    plan = replace(plan, ring=ring, query_segments=two, blocks=Blocks(two, two, plan.visible))
    assert "on H200s" in explain_plan(plan)
    assert "measured here" in explain_plan(replace(plan, machine=machine_from(NEAR, 2, JOB)))
