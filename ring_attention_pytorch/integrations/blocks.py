"""In which block of `ring_forward` this is: what models call knows no more than that."""

from typing import Any
from weakref import WeakKeyDictionary

from ring_attention_pytorch.plan.placement import Placement, current

_blocks: "WeakKeyDictionary[Placement, Any]" = WeakKeyDictionary()


def begun(block: Any) -> Placement:
    """Note that the block of the current placement is this one; return the placement."""
    placement = current()
    assert placement is not None  # this thread has just opened it
    _blocks[placement] = block
    return placement


def opened() -> Any:
    """Return the block of `ring_forward` in which this is; None if it is in none."""
    placement = current()
    return None if placement is None else _blocks.get(placement)


def needed() -> Any:
    """Return the block in which this is.

    Raises:
        ValueError: it is in none.
    """
    if (block := opened()) is None:
        raise ValueError(
            "this model has ring attention, which needs its batch: call it in the block "
            "`with ring_forward(batch) as inputs:`, or with past_key_values=RingHFCache(...)"
        )
    return block
