"""What a plan prepares of a kernel, and for calls that are short."""

from types import SimpleNamespace

import pytest
import torch

from ring_attention_pytorch.kernels import choose
from ring_attention_pytorch.plan import plan_cache, prepare
from ring_attention_pytorch.plan.prepare import _with_calls_of
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime.interfaces import KernelRequest
from ring_attention_pytorch.runtime.replay import NEVER
from ring_attention_pytorch.schedule import policy
from ring_attention_pytorch.schedule.hardware import H200


@pytest.mark.parametrize(
    ("name", "merges", "keys_first"),
    [
        ("triton", True, True), ("eager", False, False),
        ("triton+eager", False, False), ("eager+triton", False, True),
    ],
)  # fmt: skip
def test_kernels_merge_if_both_ways_do_and_make_keys_first_if_backward_does(
    name, merges, keys_first, monkeypatch
):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    q = torch.randn(1, 6, 2, 8)
    kernel = choose(name, KernelRequest.of(q, q))
    assert (kernel.traits.fuses_merge, kernel.traits.keys_first) == (merges, keys_first)
    machine = _with_calls_of(kernel, H200)
    assert (machine.one_call, machine.keys_first) == (merges, keys_first)


def few_may_be_short(patch: pytest.MonkeyPatch) -> None:
    """By the transport of their graphs, if not by their own."""
    q = torch.randn(1, 8, 2, 4)
    patch.setattr(policy, "_SMALL", -1)
    for own_low_priority in (False, True):
        plan_cache.forget()
        fabric = SimpleNamespace(ring=Ring.alone(), replay=NEVER)
        few, made = (
            SimpleNamespace(schedule=SimpleNamespace(own_low_priority=on), fabric=fabric)
            for on in (False, own_low_priority)
        )
        patch.setattr(prepare, "make_transport", lambda *_, made=made: made)
        patch.setattr(prepare, "make_one_stream", lambda *_, few=few: few)
        assert RingPlan.make(q, q, q, causal=True).chosen.concurrent == own_low_priority


def test_few_may_be_short(monkeypatch):
    few_may_be_short(monkeypatch)
