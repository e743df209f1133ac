"""Handles: numbers that stand for objects in a traced graph, which can hold no others.

A graph that is traced for one plan runs with others. So it takes the plan's number, which differs
between plans, and what runs looks the plan up:

    plan.handle -> 7 << 32           its layer 3 -> (7 << 32) + 4

A handle that a graph has used keeps its object for a while, since backward comes after the caller
may have let go of it.
"""

from collections import OrderedDict
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

_STRIDE = 1 << 32  # between objects; in between are the numbers of their layers
LAYERS = _STRIDE - 1  # that an object may have, or two of them would meet
_MOST_KEPT = 64  # objects that are kept though nobody else may hold them

_counter = count(_STRIDE, _STRIDE)
_objects: WeakValueDictionary[int, Any] = WeakValueDictionary()
_kept_alive: OrderedDict[int, Any] = OrderedDict()


def check_layer(number: int) -> None:
    """Raise ValueError if no layer of an object can have this number.

    >>> check_layer(LAYERS - 1)
    """
    if not 0 <= number < LAYERS:
        raise ValueError(
            f"a layer's number must be at least 0 and less than 2 ** 32 - 1, got {number}"
        )


def new_handle(thing: Any) -> int:
    """Return a number for an object, which is never another's."""
    handle = next(_counter)
    _objects[handle] = thing
    return handle


def handle_of_layer(handle: int, layer: int) -> int:
    """Return the handle of a layer of an object.

    >>> parted(handle_of_layer(3 << 32, layer=5)) == (3 << 32, 5)
    True
    """
    return handle + 1 + layer


def parted(handle: int) -> tuple[int, int | None]:
    """Split a handle into that of an object and the number of a layer, None if it is of none."""
    layer = handle % _STRIDE
    return handle - layer, layer - 1 if layer else None


def object_of(handle: int) -> tuple[Any, int | None]:
    """Return the object of a handle and the number of its layer, and keep the object for a while.

    Raises:
        RuntimeError: nobody holds the object any more.
    """
    handle, layer = parted(handle)
    thing = _objects.get(handle)
    if thing is None:
        raise RuntimeError(
            "ring attention: a compiled call's plan is gone; keep plans until backward has run"
        )
    _kept_alive[handle] = thing
    _kept_alive.move_to_end(handle)
    if len(_kept_alive) > _MOST_KEPT:
        _kept_alive.popitem(last=False)
    return thing, layer
