"""What a plan prepares for calls that are short."""

from types import SimpleNamespace

import pytest
import torch

from ring_attention_pytorch.plan import plan_cache, prepare
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime.replay import NEVER
from ring_attention_pytorch.schedule import policy


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
