"""Proposals of ranks: the slowest device counts, memory is left, few tokens have a kernel."""

from types import SimpleNamespace

import pytest
import torch

from ring_attention_pytorch.comm import transports
from ring_attention_pytorch.comm.fabric_kernels import OneStream
from ring_attention_pytorch.geometry.layouts import positions
from ring_attention_pytorch.kernels import choose
from ring_attention_pytorch.plan import plan_cache, prepare, proposal
from ring_attention_pytorch.plan.explain import explain_plan
from ring_attention_pytorch.plan.proposal import MOST_MEMORY, memory_left
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.runtime.interfaces import KernelRequest, SelectedKernel, Traits
from ring_attention_pytorch.schedule import hardware as speeds
from ring_attention_pytorch.schedule import policy
from ring_attention_pytorch.schedule.hardware import H200, hardware, number_of
from ring_attention_pytorch.schedule.pieces import KVShape
from tests.support import threads


def few_tokens_get_the_kernel_that_is_launched_least(patch: pytest.MonkeyPatch) -> None:
    """Unless one is named, or other masks take as few calls of any, or there is much to compute."""

    def main(ring: threads.ThreadRing) -> list[str]:
        q, one = torch.empty(2, 16, 2, 4), torch.empty(1, 16, 2, 4)
        plan_cache.forget()
        how = dict(layout="zigzag", group=ring, transport="gather")
        borders, each_sample_s = [0, 16, 64], torch.arange(2).mul(16).add(16)[:, None]
        numbers = (
            positions("zigzag", rank=ring.rank, ring_size=4, length=64) >= each_sample_s
        ).int()
        shown = (
            (q, dict()), (q, dict(kernel="sdpa")), (q, dict(causal=False)),
            (one, dict(cu_seqlens=borders)), (q, dict(documents=numbers)),
        )  # fmt: skip
        plans = [RingPlan.make(t, t, t, **dict(causal=True) | how | each) for t, each in shown]
        assert {type(plan.transport.fabric) for plan in plans} == {OneStream}
        return [plan.kernel.name for plan in plans]

    patch.setattr(transports, "shared_by", threads.shared_by)
    patch.setattr(proposal, "fewest_launches", lambda case: choose("eager", case))
    job = KVShape(2, 2, 2, 4, 4, itemsize=4)
    seconds = 16 * 32 * job.pair_flops * (1 / H200.forward + 2.5 / H200.backward)
    for launches, found in ((2.01, "eager"), (1.01, "eager"), (0.99, "sdpa")):
        patch.setattr(policy, "_CALLS", launches * seconds / H200.launch)
        assert threads.run(4, main)[0] == [[found] + 4 * ["sdpa"]] * 4


def test_few_tokens_get_the_kernel_that_is_launched_least(monkeypatch):
    few_tokens_get_the_kernel_that_is_launched_least(monkeypatch)


def short_documents_get_a_kernel_of_their_own(patch: pytest.MonkeyPatch) -> None:
    """Unless one is named, documents are long, or query heads share no keys; on one rank, too."""

    def short(case: KernelRequest) -> SelectedKernel:
        return choose("eager", case)._replace(name="short", traits=Traits(fuses_merge=True))

    def main(ring: threads.ThreadRing) -> list[tuple[str, bool]]:
        q, k = torch.empty(2, 1024, 4, 8), torch.empty(2, 1024, 2, 8)
        total, place = 1024 * ring.size, slice(1024 * ring.rank, 1024 * (ring.rank + 1))
        few, many = (dict(cu_seqlens=range(0, total + 1, n)) for n in (512, 1024))
        halves, thirds = (torch.arange(total) // n for n in (512, 400))
        differ = dict(documents=torch.stack((halves, thirds))[:, place])
        at = torch.arange(total)[place]
        steps = [dict(query_positions=at // n * n, key_positions=at, cross=True) for n in (32, 512)]
        shown = (
            (k, few), (k, differ), (k, few | dict(kernel="sdpa")),
            (k, few | dict(causal=False)), (k, many), (k, many | dict(window=10)), (q, few),
            (k, steps[0]), (k, steps[1]),
        )  # fmt: skip
        plans = [
            RingPlan.make(q, t, t, group=ring, **dict(causal=True) | options)
            for t, options in shown
        ]
        return [(plan.kernel.name, plan.chosen.machine.one_call) for plan in plans]

    patch.setattr(proposal, "for_short_documents", short)
    found = [("short", True)] * 2 + [("sdpa", False)] * 5
    found += [("short", True), ("sdpa", False)]  # and so do short steps of positions
    for size in (1, 2):
        assert threads.run(size, main)[0] == [found] * size


def test_short_documents_get_a_kernel_of_their_own(monkeypatch):
    short_documents_get_a_kernel_of_their_own(monkeypatch)


def long_documents_get_a_kernel_by_its_cost(patch: pytest.MonkeyPatch) -> None:
    """Unless one is named, samples differ, or calls take longer than the faster kernel saves."""

    def main(ring: threads.ThreadRing) -> list[tuple[str, list[str]]]:
        q, k = torch.empty(2, 4096, 32, 128), torch.empty(2, 4096, 8, 128)
        total, place = 4096 * ring.size, slice(4096 * ring.rank, 4096 * (ring.rank + 1))
        few, many = (dict(cu_seqlens=range(0, total + 1, n)) for n in (total // 2, 128))
        halves, thirds = (torch.arange(total) // n for n in (total // 2, total // 3))
        differ = dict(documents=torch.stack((halves, thirds))[:, place])
        shown = few, many, differ, few | dict(kernel="sdpa"), few | dict(transport="gather"), {}
        plans = [RingPlan.make(q, k, k, group=ring, causal=True, **each) for each in shown]
        return [(plan.kernel.name, [*plan.chosen.by_kernel]) for plan in plans]

    patch.setitem(speeds._KERNELS, "long", (1200e12, 1050e12))
    long = choose("eager", KernelRequest("cpu", torch.float32))._replace(name="long")
    patch.setattr(proposal, "for_long_documents", lambda case: long if case.packed else None)
    both = ["sdpa", "long"]
    wins, none = ("long", both), ("sdpa", [])
    for size in (1, 2):
        found = threads.run(size, main)[0]
        assert found == [[wins, none, none, none, wins, none]] * size


def test_long_documents_get_a_kernel_by_its_cost(monkeypatch):
    long_documents_get_a_kernel_by_its_cost(monkeypatch)


def test_what_calls_cost_decides_and_is_explained(monkeypatch):
    """Where calls pay by themselves, the tiles that ranks cut can still make them too many."""
    q, k = torch.empty(1, 8192, 32, 128), torch.empty(1, 8192, 8, 128)
    monkeypatch.setitem(speeds._KERNELS, "long", (1200e12, 1050e12))
    long = choose("eager", KernelRequest("cpu", torch.float32))._replace(name="long")
    monkeypatch.setattr(proposal, "for_long_documents", lambda case: long)
    for taken, name in ((1.0, "long"), (1e9, "sdpa")):
        seconds = {"sdpa": 2e-3, "long": 1e-3 * taken}
        by_speed = {600e12: seconds["sdpa"], 1200e12: seconds["long"]}
        monkeypatch.setattr(prepare, "seconds_by", lambda *given: by_speed[given[4].forward])  # noqa: B023
        plan_cache.forget()
        plan = RingPlan.make(q, k, k, causal=True, cu_seqlens=[0, 8192])
        assert plan.kernel.name == name
        said = f"predicted 2 ms by sdpa, in few calls; {1e3 * seconds['long']:.3g} ms by long"
        assert said in explain_plan(plan)


ON_GPU = SimpleNamespace(is_cuda=True, device=torch.device("cuda"), shape=(1, 4, 2, 8))


def plans_go_by_the_slowest_device_and_by_who_shares_a_host(monkeypatch: pytest.MonkeyPatch):
    """On a CPU by neither, and always by a ring, if no transport is named."""
    q = torch.empty(1, 4, 2, 8)
    plan = RingPlan.make(q, q, q)
    assert plan.chosen.machine is H200
    assert plan.chosen.name == "ring"
    traits = plan.kernel.traits._replace(fuses_merge=True)
    kernel = plan.kernel._replace(name="triton", traits=traits)
    names = iter(["NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA H200"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: next(names))
    ranks = []
    for _ in range(4):
        ranks.append(proposal._facts(ON_GPU))
    machine = prepare._machine_of(kernel, ranks, ON_GPU, (0, 0, 1, 1))
    assert machine == hardware("triton", number_of("H100"), 2)._replace(one_call=True)
    assert (machine.device, machine.domain, machine.memory) == ("H100", 2, 3.0e12)
    assert prepare._machine_of(kernel, ranks, q, (0, 0, 1, 1)) is H200
    assert number_of("NVIDIA L4") == number_of("NVIDIA A100-SXM4-80GB") == 0


def test_plans_go_by_the_slowest_device_and_by_who_shares_a_host(monkeypatch):
    plans_go_by_the_slowest_device_and_by_who_shares_a_host(monkeypatch)


def test_a_gpu_gives_at_most_half_of_what_is_left(monkeypatch):
    q, on_gpu = torch.empty(1, 4, 2, 8), ON_GPU
    assert RingPlan.make(q, q, q).chosen.memory == MOST_MEMORY == memory_left(q, 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 9000))
    sizes = {"reserved_bytes": 500, "allocated_bytes": 300}
    stats = {name: {"all": {"current": size}} for name, size in sizes.items()}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: stats)
    assert memory_left(on_gpu, 3) == 512  # a power of two up to (1000 + 500 - 300) / 2
    for size in (1, 2):  # there are no others, or one, whose keys come in any case
        assert memory_left(on_gpu, size) == MOST_MEMORY
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * MOST_MEMORY, 0))
    assert memory_left(on_gpu, 3) == MOST_MEMORY
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * MOST_MEMORY - 202, 0))
    assert memory_left(on_gpu, 3) == MOST_MEMORY // 2
    torch.use_deterministic_algorithms(True)
    try:
        assert memory_left(on_gpu, 3) == MOST_MEMORY
    finally:
        torch.use_deterministic_algorithms(False)
