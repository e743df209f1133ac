"""Helpers for torch.func: code that is no part of a transform, and Functions that can be in one."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

_P, _R = ParamSpec("_P"), TypeVar("_R")


def outside_transforms(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wrap a function so that its new tensors are plain, whatever transform it is called in.

    Within a transform PyTorch wraps them, and a wrapped one has no memory to send over the host.
    """

    @wraps(function)
    def outside(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with torch._C._DisableFuncTorch():
            return function(*args, **kwargs)

    return outside


def signature_once(forward: Callable[_P, _R]) -> Callable[_P, _R]:
    """Store the signature of a Function's forward, beside setup_context, and return the forward.

    PyTorch asks for the signature in each call, and working it out would take longer than the call.
    """
    forward.__signature__ = inspect.signature(forward)
    return forward


def refuse_second_order(what: str) -> None:
    """Raise NotImplementedError if a backward without a derivative of its own is differentiated.

    PyTorch's once_differentiable would drop the second order without a word where the cotangent
    needs no gradient.
    """
    if torch.is_grad_enabled():
        raise NotImplementedError(f"{what} can't be differentiated twice (create_graph)")


def tangents_note(*tensors: Tensor | None) -> dict[str, bool]:
    """Return a note to compare: a rank that sends tangents must not find the others without."""
    given = (t for t in tensors if t is not None)
    return {"tangents": any(forward_ad.unpack_dual(t).tangent is not None for t in given)}
