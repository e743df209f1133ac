"""Module paths of 1.0 that have moved: they import, with a warning that names the new path.

Those of 0.5.20 are files beside this one, and import without a warning.
"""

import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGE = "ring_attention_pytorch"
MOVED = {
    "agreement": "ranks.agreement",
    "balance": "geometry.balance",
    "checks": "plan.checks",
    "contract": "runtime.interfaces",
    "cost": "schedule.cost",
    "derivatives": "second_order",
    "documents": "geometry.documents plan.packing",
    "dropout": "runtime.dropout",
    "explain": "plan.explain",
    "failures": "ranks.failures",
    "graphs": "runtime.graphs",
    "lanes": "runtime.streams",
    "layouts": "geometry.layouts geometry.tiles",
    "loss": "nn.loss",
    "masks": "plan.masks",
    "measure": "plan.calibrate",
    "norm": "nn.norm",
    "notes": "ranks.notes",
    "proposal": "plan.proposal",
    "regular_attention": "nn.reference",
    "ring_transformer": "nn.transformer",
    "rotary": "nn.rotary",
    "rows": "runtime.rowwise",
    "scores": "runtime.scores",
    "segments": "geometry.segments",
    "sharding": "nn.sharding",
    "steps": "ranks.steps",
    "transforms": "runtime.torch_func",
    "ulysses": "comm.ulysses",
}


class MovedFinder(MetaPathFinder, Loader):
    """A finder of the modules in `MOVED`, which gives them the names of the new ones."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package, _, old = name.partition(".")
        return ModuleSpec(name, self) if package == PACKAGE and old in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        paths = [f"{PACKAGE}.{new}" for new in MOVED[module.__name__.partition(".")[2]].split()]
        _warn(f"{module.__name__} has moved to {' and '.join(paths)}")
        for path in paths:
            for name, value in vars(import_module(path)).items():
                if not name.startswith("__"):
                    setattr(module, name, value)


def moved_names(old: str, new: str) -> Callable[[str], Any]:
    """Make the `__getattr__` of a module that had other names in 1.0, which are in `new` now."""

    def get(name: str) -> Any:
        value = getattr(import_module(f"{PACKAGE}.{new}"), name, None)
        if name.startswith("_") or value is None:
            raise AttributeError(f"module {old!r} has no attribute {name!r}", name=name)
        _warn(f"{old}.{name} has moved to {PACKAGE}.{new}")
        return value

    return get


def _warn(text: str) -> None:
    warnings.warn(text, DeprecationWarning, stacklevel=3)
