"""What ranks propose of their devices: the slowest counts, and memory is left."""

from types import SimpleNamespace

import pytest
import torch

from ring_attention_pytorch import RingPlan
from ring_attention_pytorch.plan import prepare, proposal
from ring_attention_pytorch.plan.proposal import MOST_MEMORY, memory_left
from ring_attention_pytorch.schedule.hardware import H200, hardware, number_of

ON_GPU = SimpleNamespace(is_cuda=True, device=torch.device("cuda"))


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
    for host in "aabb":
        monkeypatch.setattr(proposal.socket, "gethostname", lambda host=host: host)
        ranks.append(proposal._facts(ON_GPU))
    machine = prepare._machine_of(kernel, ranks, ON_GPU)
    assert machine == hardware("triton", number_of("H100"), 2)._replace(one_call=True)
    assert (machine.device, machine.domain, machine.memory) == ("H100", 2, 3.0e12)
    assert prepare._machine_of(kernel, ranks, q) is H200
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
