"""Plans that nobody takes for dataclasses, so that FSDP and DDP leave them as they are.

These go through a module's arguments: in mixed precision they copy each dataclass and cast the
tensors in it. A copy of a plan is another plan, and its tensors have the dtypes that they need.
"""

from dataclasses import Field
from typing import Any, TypeVar

_NAMES = ("__dataclass_fields__", "__dataclass_params__")  # by which dataclasses are known
_hidden: dict[type, dict[str, Any]] = {}

_Plan = TypeVar("_Plan")


def uncopied(cls: type[_Plan]) -> type[_Plan]:
    """Decorate a dataclass, so that nobody who copies dataclasses copies its objects.

    >>> from dataclasses import dataclass, is_dataclass
    >>> @uncopied
    ... @dataclass
    ... class Point:
    ...     x: int
    >>> is_dataclass(Point), replaced(Point(1), x=2)
    (False, Point(x=2))
    """
    _hidden[cls] = {name: vars(cls)[name] for name in _NAMES}
    for name in _NAMES:
        delattr(cls, name)
    return cls


def arguments_of(plan: Any) -> dict[str, Any]:
    """Return a plan's fields by name, without those that it sets itself."""
    made: dict[str, Field[Any]] = _hidden[type(plan)][_NAMES[0]]
    return {name: getattr(plan, name) for name, each in made.items() if each.init}


def replaced(plan: _Plan, **changes: Any) -> _Plan:
    """Return a copy with other values of some fields, as `dataclasses.replace` does."""
    return type(plan)(**{**arguments_of(plan), **changes})
