"""Tests of runtime/uncopied.py."""

from dataclasses import dataclass, is_dataclass, replace

import pytest
import torch
from torch.distributed.utils import _apply_to_tensors

from ring_attention_pytorch import RingPlan, RoutingPlan, RunPlan, SummaryPlan
from ring_attention_pytorch.runtime.uncopied import arguments_of, replaced, uncopied

Q = torch.randn(1, 12, 2, 8)
PLANS = {
    "ring": lambda: RingPlan.make(Q, Q, Q, alibi_slopes=torch.tensor([0.5, 0.1])),
    "summaries": lambda: SummaryPlan.make(Q, Q, Q, window=2, stride=2),
    "runs": lambda: RunPlan.make(Q),
    "routing": lambda: RoutingPlan.make(Q[:, :, 0]),
}


@pytest.mark.parametrize("kind", PLANS)
def test_mixed_precision_leaves_a_plan_as_it_is(kind: str) -> None:
    """FSDP and DDP in mixed precision apply such a function to a module's arguments."""
    plan = PLANS[kind]()
    given = {"plan": plan, "plans": (plan, plan)}
    found = _apply_to_tensors(torch.Tensor.bfloat16, given)
    assert found["plan"] is plan
    assert found["plans"] == (plan, plan)
    assert not is_dataclass(plan)


def test_a_copy_has_the_other_fields() -> None:
    plan = PLANS["ring"]()
    copy = replaced(plan, key_mask=torch.ones(1, 12).bool())
    assert type(copy) is RingPlan
    assert copy.transport is plan.transport
    assert plan.key_mask is None
    assert copy.handle != plan.handle
    assert "handle" not in arguments_of(plan)


def test_fields_are_those_of_the_dataclass() -> None:
    @uncopied
    @dataclass(frozen=True)
    class Point:
        x: int
        y: int

    point = Point(1, 2)
    assert point == Point(x=1, y=2) != Point(1, 3)
    assert arguments_of(point) == {"x": 1, "y": 2}
    assert replaced(point, x=3) == Point(3, 2)
    assert not is_dataclass(Point)
    with pytest.raises(TypeError, match="dataclass instances"):
        replace(point, x=3)
