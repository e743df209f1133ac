"""Results of a plan's first calls that later ones reuse; plans share some of them."""

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

from ring_attention_pytorch.geometry.segments import Segments
from ring_attention_pytorch.plan.placement import Placement
from ring_attention_pytorch.plan.plan_cache import PlanCache
from ring_attention_pytorch.runtime.observe import Record


@dataclass(eq=False)
class Worked:
    """Results of first calls, shared by plans that differ only in dropout."""

    tiles: dict[Segments, list[Any]] = field(default_factory=dict)
    calls: dict[bool, int] = field(default_factory=dict)  # of the kernel, by direction
    placements: WeakSet[Placement] = field(default_factory=WeakSet)  # where it may be used
    passed: set[tuple[Any, ...]] = field(default_factory=set)  # signatures that are checked


@dataclass(eq=False)
class Own:
    """Results of first calls, and plans of layers, that no other plan shares."""

    tiles: dict[Segments, list[Any]] = field(default_factory=dict)  # under this plan's mask
    layers: "PlanCache[Any]" = field(default_factory=PlanCache)
    records: dict[str, Record] = field(default_factory=dict)  # of observed calls, by direction
    made: dict[str, Any] = field(default_factory=dict)  # for layers of other kinds, by kind
