"""Tests of runtime/uncopied.py."""

from dataclasses import dataclass, field, is_dataclass, replace

import pytest
import torch
from torch.distributed.utils import _apply_to_tensors

from ring_attention_pytorch import RingPlan, RoutingPlan, RunPlan, SummaryPlan
from ring_attention_pytorch.runtime.uncopied import (
    arguments_of,
    of_uncopied,
    replaced,
    uncopied,
)

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
    plan = PLANS["summaries"]()
    copy = replaced(plan, key_mask=torch.ones(1, 12).bool())
    assert type(copy) is SummaryPlan
    assert copy.far is plan.far
    assert plan.key_mask is None
    assert copy.handle != plan.handle
    assert {"ring", "far"} <= {*arguments_of(plan)}
    assert "handle" not in arguments_of(plan)


def test_subclasses_have_all_fields() -> None:
    @uncopied
    @dataclass(frozen=True)
    class Line:
        x: int

    @uncopied
    @dataclass(frozen=True)
    @of_uncopied
    class Plane(Line):
        y: int
        area: int = field(init=False, default=0)

    plane = Plane(1, 2)
    assert plane == Plane(x=1, y=2) != Plane(1, 3)
    assert arguments_of(plane) == {"x": 1, "y": 2}
    assert replaced(plane, x=3) == Plane(3, 2)
    assert replaced(Line(1), x=4) == Line(4)
    assert not is_dataclass(Line)
    with pytest.raises(TypeError, match="dataclass instances"):
        replace(plane, x=3)
