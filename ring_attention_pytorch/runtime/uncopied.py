"""Plans that nobody copies as dataclasses, so that FSDP and DDP leave them as they are.

In mixed precision these go through a module's arguments, copy each dataclass and cast the tensors
in it. A copy of a plan is another plan, and its tensors have the dtypes that they need.
"""

from dataclasses import Field
from typing import Any, NoReturn, TypeVar

_NAMES = ("__dataclass_fields__", "__dataclass_params__")  # by which dataclasses are known

_Plan = TypeVar("_Plan")


class _OfClass:
    """An attribute that a class has, and its objects have not."""

    def __init__(self, value: Any) -> None:
        self.value: Any = value

    def __get__(self, plan: object, kind: type) -> Any:
        return self.value if plan is None else _refuse(kind)


def _refuse(kind: type) -> NoReturn:
    raise AttributeError(f"a {kind.__name__} can't be copied as a dataclass: make another one")


def uncopied(cls: type[_Plan]) -> type[_Plan]:
    """Decorate a dataclass, so that nobody who copies dataclasses copies its objects.

    >>> from dataclasses import dataclass
    >>> @uncopied
    ... @dataclass
    ... class Point:
    ...     x: int
    >>> hasattr(Point(1), "__dataclass_fields__"), replaced(Point(1), x=2)
    (False, Point(x=2))
    """
    for name in _NAMES:
        setattr(cls, name, _OfClass(vars(cls)[name]))
    return cls


def arguments_of(plan: Any) -> dict[str, Any]:
    """Return a plan's fields by name, without those that it sets itself."""
    fields: dict[str, Field[Any]] = type(plan).__dataclass_fields__
    return {name: getattr(plan, name) for name, each in fields.items() if each.init}


def replaced(plan: _Plan, **changes: Any) -> _Plan:
    """Return a copy with other values of some fields, as `dataclasses.replace` does."""
    return type(plan)(**{**arguments_of(plan), **changes})
