"""Handles: integers that stand for objects in a traced graph, which can't hold the objects.

A graph that is traced for one plan runs with others. It therefore takes the plan's handle, an int
that differs between plans, and the operator looks the plan up:

    plan.handle -> 7 << 32           its layer 3 -> (7 << 32) + 4

The table keeps the last 64 objects that graphs have used alive, because the caller may drop a plan
before backward runs.
"""

from collections import OrderedDict
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

_STRIDE = 1 << 32  # between the handles of objects; layers' handles lie in between
LAYERS = _STRIDE - 1  # the most that an object can have: with more, handles would collide
_MOST_KEPT = 64  # objects that are kept alive here

_counter = count(_STRIDE, _STRIDE)
_objects: WeakValueDictionary[int, Any] = WeakValueDictionary()
_kept_alive: OrderedDict[int, Any] = OrderedDict()


def check_layer(number: int) -> None:
    """Raise ValueError unless a layer of an object can have this number.

    >>> check_layer(LAYERS - 1)
    """
    if not 0 <= number < LAYERS:
        raise ValueError(
            f"a layer's number must be at least 0 and less than 2 ** 32 - 1, got {number}"
        )


def new_handle(thing: Any) -> int:
    """Return a new handle for an object; handles are never reused."""
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
    """Split a handle into the object's handle and the layer's number, None without a layer."""
    layer = handle % _STRIDE
    return handle - layer, layer - 1 if layer else None


def object_of(handle: int) -> tuple[Any, int | None]:
    """Return a handle's object and layer number; keep the object alive until 64 others were used.

    Raises:
        RuntimeError: the object was freed.
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
