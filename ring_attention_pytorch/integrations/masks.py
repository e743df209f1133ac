"""Read the visible tokens from a mask function of Hugging Face's transformers.

Masks are composed of functions: `and_masks(sliding_window_overlay(8), causal_mask_function)`. A
spread sequence has no matrix to evaluate them on, so each part is recognised by its code. An
unknown part is an error, not a guess.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import masking_utils as hf


class Visible(NamedTuple):
    """The tokens that one sees: none later if `causal`, at most `window` away; None is no bound."""

    causal: bool
    window: int | None

    def __and__(self, other: "Visible") -> "Visible":
        windows = [each.window for each in (self, other) if each.window is not None]
        return Visible(self.causal or other.causal, min(windows, default=None))


_ALL = Visible(False, None)


class NoTensor(ValueError, AttributeError):
    """A mask that is no tensor was used as one. As an AttributeError it makes `hasattr` False."""


class RingMask:
    """The mask passed to attention: its block, and the visible tokens or the error to raise."""

    def __init__(self, forward: Any, visible: Visible | None, error: ValueError | None):
        self.forward: Any = forward
        self.visible: Visible = visible or _ALL
        self.error: ValueError | None = error

    def __getattr__(self, name: str) -> Any:
        raise _looked_into(name)

    def _look(self, *_: Any) -> Any:
        raise _looked_into("as a tensor")

    __add__: Any
    __radd__: Any
    __sub__: Any
    __rsub__: Any
    __mul__: Any
    __rmul__: Any
    __invert__: Any
    __getitem__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __invert__ = _look

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any, **__: Any) -> Any:
        raise _looked_into(getattr(function, "__name__", "as a tensor"))


def _looked_into(name: str) -> NoTensor:
    return NoTensor(
        f"ring_forward: the model looks into its mask ({name}), and computes attention or a mask "
        "by itself; there is no whole mask anywhere, so it can't be spread"
    )


def visible_by(mask_function: Callable[..., Any]) -> Visible:
    """Return the tokens that are visible by a mask function of transformers.

    Documents that transformers found in position ids are ignored: the batch has them.

    Raises:
        ValueError: ring attention does not support the mask.

    >>> visible_by(hf.sliding_window_causal_mask_function(8))
    Visible(causal=True, window=7)
    """
    found = _read(mask_function)
    if found.window is not None and not found.causal and _is_one_sided(mask_function):
        raise ValueError("the mask has a window of tokens before, and is not causal")
    return found


def _read(function: Callable[..., Any]) -> Visible:
    if function is hf.causal_mask_function:
        return Visible(True, None)
    if function is hf.bidirectional_mask_function:
        return _ALL
    kind = _KINDS.get(getattr(function, "__code__", None))
    if kind is None:
        name = getattr(function, "__qualname__", repr(function)).replace(".<locals>", "")
        raise ValueError(
            f"the model has a mask that ring attention does not know, by {name}; known are causal, "
            "bidirectional and sliding windows, and documents and padding of the batch"
        )
    return kind(_values(function))


def _both(values: dict[str, Any]) -> Visible:
    found = _ALL
    for part in values["mask_functions"]:
        found = found & _read(part)
    return found


def _values(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the variables that a function closes over: their values by name."""
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells)}


def _is_one_sided(function: Callable[..., Any]) -> bool:
    """Return whether a part of the mask function has a window of earlier tokens only."""
    if function.__code__ is _BEFORE:
        return True
    values = _values(function)
    parts = [*values.get("mask_functions", ()), values.get("mask_function")]
    return any(_is_one_sided(part) for part in parts if part is not None)


_ANY = torch.empty(0)  # a placeholder: only the code of functions made with it is used
_BEFORE = hf.sliding_window_overlay(1).__code__
_KINDS: dict[Any, Callable[[dict[str, Any]], Visible]] = {
    hf.and_masks().__code__: _both,
    # transformers' window includes the token itself, ours does not
    _BEFORE: lambda values: Visible(False, values["sliding_window"] - 1),
    hf.sliding_window_bidirectional_overlay(1).__code__: lambda values: Visible(
        False, values["sliding_window"]
    ),
    hf.packed_sequence_mask_function(_ANY).__code__: lambda _: _ALL,
}
if hasattr(hf, "remap_positions_for_packed_sequence"):  # since 5.18 or later
    _remapped = hf.remap_positions_for_packed_sequence(hf.causal_mask_function, _ANY)
    _KINDS[_remapped.__code__] = lambda values: _read(values["mask_function"])
