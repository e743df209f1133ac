"""Speeds of a machine for the cost model: measured once, the same on all ranks."""

from itertools import pairwise
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from ring_attention_pytorch import RingPlan
from ring_attention_pytorch.geometry.layouts import all_segments
from ring_attention_pytorch.geometry.tiles import Mask
from ring_attention_pytorch.kernels import choose
from ring_attention_pytorch.plan import calibrate
from ring_attention_pytorch.plan.calibrate import calibrated, with_measured
from ring_attention_pytorch.plan.options import Call, Options
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime.interfaces import KernelRequest
from ring_attention_pytorch.schedule.cost import choose_transport
from ring_attention_pytorch.schedule.hardware import H200
from ring_attention_pytorch.schedule.pieces import KVShape, Workload
from tests.support import threads

JOB = KVShape(1, 2, 1, 16, 16, 4)
NEAR = {f"near {n}": 1e-4 + n / 100e9 for n in calibrate._BYTES}
FAR = {f"far {n}": 1e-3 + n / 1e9 for n in calibrate._BYTES}


def measured(without: int = -1, forgets: int = -1) -> tuple[dict, bool, list[int]]:
    """For a pool: what this rank makes of the machine, by little, and how often it measured.

    One rank may have no memory to measure with, or have forgotten all by the second time.
    """
    ring, like, asked = Ring(), torch.empty(0), KernelRequest("cpu", torch.float32, d=16, d_v=16)
    kernel, times = choose("sdpa", asked), []
    counted, seconds, buffers = mock.Mock(wraps=calibrate._seconds), [], calibrate._two_buffers

    def no_room(*given: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory left")

    calibrate._known.pop(ring.group, None)
    small = dict(_BYTES=(1 << 10, 1 << 12, 1 << 16), _FLOPS=1 << 22, _seconds=counted)
    small |= dict(_two_buffers=no_room if ring.rank == without else buffers)
    with mock.patch.multiple(calibrate, **small):
        for _ in range(2):
            seconds.append(calibrated(H200, ring, 1, kernel, JOB, like))
            times.append(counted.call_count)
            if ring.rank == forgets:
                calibrate._known.pop(ring.group)
        seconds.append(calibrated(H200, ring, 1, kernel, JOB, like))
        times.append(counted.call_count)
    calibrate._known.pop(ring.group)
    return seconds[-1]._asdict(), seconds[0] == seconds[1], times


@pytest.mark.parametrize("size", [2, 4])
def test_all_ranks_see_the_same_machine_and_measure_it_once(pools, size):
    found = pools(size).run(measured)
    machine, repeats, times = found[0]
    assert all(each == found[0] for each in found)
    assert repeats
    assert times == [3 + 1 + 2] * 3  # messages of three lengths, copies, forward and backward
    assert machine["pull"] == H200.pull  # there is no shared memory to pull from
    for speed in ("forward", "backward"):
        assert 0 < machine[speed] < 1e13
    assert all(a < b and s > 0 for (a, s), (b, _) in pairwise(machine["hops"]))


def test_what_one_rank_could_not_measure_nobody_knows(pools):
    found = pools(4).run(measured, 2)
    assert all(each == found[0] for each in found)
    assert found[0][0]["hops"] == H200.hops
    assert found[0][2] == [2] * 3  # the kernel alone


def test_what_one_rank_has_forgotten_all_measure_again(pools):
    found = pools(4).run(measured, -1, 1)
    assert all(each[0] == found[0][0] for each in found)
    assert [each[2] for each in found] == [[6, 12, 18]] * 4


def test_slow_links_change_the_choice():
    everyone = all_segments("zigzag", 4, 4 * 8192)
    blocks, job = Workload(everyone, everyone, Mask(causal=True)), KVShape(1, 32, 8, 128, 128, 2)
    fast = with_measured(H200, NEAR | {"pull": calibrate._PULLED / 400e9}, job)
    assert fast.pull == pytest.approx(400e9)
    assert choose_transport(blocks, job, 3, fast) == "gather"
    slow = with_measured(H200, NEAR | {"pull": calibrate._PULLED / 1e9}, job)
    assert choose_transport(blocks, job, 3, slow) == "ring"


def test_far_ranks_are_reached_over_the_network():
    machine = with_measured(H200, FAR, JOB)
    assert machine.network == pytest.approx(1e9, rel=0.01)
    assert machine.network_hop == pytest.approx(1e-3, rel=0.1)
    assert machine.hops == H200.hops


ON_GPU = SimpleNamespace(is_cuda=True, device=torch.device("cuda"))


def test_measuring_that_can_t_be_or_decides_nothing_is_refused():
    q = torch.empty(1, 4, 2, 8)
    with pytest.raises(ValueError, match="got 1 rank on cpu; leave it out"):
        RingPlan.make(q, q, q, calibrate=True)
    texts = []

    def main(ring: threads.ThreadRing) -> str:
        with pytest.raises(ValueError, match="choice on several GPUs, got 2 ranks on cpu") as told:
            RingPlan.make(q, q, q, calibrate=ring.rank == 1, group=ring)
        return str(told.value)

    texts, _ = threads.run(2, main)
    assert texts[0] == texts[1]
    assert texts[0].endswith("(on rank 1)")
    on_gpus = Call(ON_GPU, ON_GPU, ON_GPU, 2)
    Options(calibrate=True).check_for(on_gpus)
    with pytest.raises(ValueError, match="transport='ring' leaves none"):
        Options(calibrate=True, transport="ring").check_for(on_gpus)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(ValueError, match="deterministic_algorithms is on"):
            Options(calibrate=True).check_for(on_gpus)
    finally:
        torch.use_deterministic_algorithms(False)
