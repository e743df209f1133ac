"""Helpers for torch.func and torch.compile: code that runs outside of a trace or transform, and
autograd Functions that support them; and tensors whose memory holds their values."""

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import unwrap_if_dead
from torch.autograd import forward_ad

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Some = TypeVar("_Some", Tensor, Tensor | None)


def refuse_export() -> None:
    """Raise NotImplementedError if code is traced by torch.export."""
    if torch.compiler._is_exporting_flag:  # is_exporting() is always true where 2.11 compiles
        raise NotImplementedError(
            "ring attention can't be exported: its plan is of these processes and their groups; "
            "use torch.compile"
        )


def run_apart(function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """Run a function untraced, with a graph break: it exchanges notes, or reads values."""
    refuse_export()
    return _as_it_is(function, *args, **kwargs)


def _as_it_is(function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    import torch._dynamo  # takes a second

    apart: Any = torch._dynamo.disable(function)
    return apart(*args, **kwargs)


_as_it_is._torchdynamo_disable = True  # type: ignore[attr-defined]


class Function(torch.autograd.Function):
    """A Function with `setup_context`, whose `apply` takes all arguments by position.

    Outside of transforms PyTorch's own `apply` computes the signature of forward in each call, only
    to fill in defaults, which takes the host 10 us.
    """

    _apply_as_it_is: Callable[..., Any]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        beyond: Any = super(torch.autograd.Function, cls)  # untyped in PyTorch
        cls._apply_as_it_is = beyond.apply

    @classmethod
    def apply(cls, *args: Any) -> Any:
        if torch._C._are_functorch_transforms_active():
            return super().apply(*args)
        alive = [unwrap_if_dead(t) if isinstance(t, Tensor) else t for t in args]
        return cls._apply_as_it_is(*alive)


def forward_mode() -> bool:
    """True if there can be tangents: in forward-mode AD, or within a torch.func transform."""
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def needs_derivatives(given: Iterable[Tensor | None]) -> bool:
    """True if results of these tensors can be differentiated, in reverse or forward mode."""
    if forward_mode():
        return True
    if torch.is_grad_enabled():
        for t in given:
            if t is not None and t.requires_grad:
                return True
    return False


def is_first_order() -> bool:
    """True if this backward is not itself differentiated."""
    return not (torch.is_grad_enabled() or forward_mode())


def differentiable_grads(
    outputs: Any, inputs: Sequence[Any], needed: Sequence[bool], cotangents: Any
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the inputs that are `needed`, which can be differentiated again.

    The others get None.
    """
    wanted = [t for t, is_needed in zip(inputs, needed) if is_needed]
    grads = iter(
        torch.autograd.grad(
            outputs, wanted, cotangents, create_graph=True, materialize_grads=True
        )
    )  # fmt: skip
    return tuple([next(grads) if is_needed else None for is_needed in needed])


def refuse_second_order(what: str) -> None:
    """Raise NotImplementedError if a backward without a derivative of its own is differentiated.

    PyTorch's once_differentiable silently drops the second order if the cotangent needs no
    gradient.
    """
    if torch.is_grad_enabled():
        raise NotImplementedError(f"{what} can't be differentiated twice (create_graph)")


def tangents_note(*tensors: Tensor | None) -> dict[str, bool]:
    """Return a note for ranks to compare: all must have tangents, or none."""
    if forward_ad._current_level < 0:
        return {"tangents": False}
    given = (t for t in tensors if t is not None)
    return {"tangents": any(forward_ad.unpack_dual(t).tangent is not None for t in given)}


def resolved(t: _Some) -> _Some:
    """Return a tensor whose memory holds the values of t, usually t itself; None for None.

    Kernels and shared memory read nothing else, while PyTorch's operations see more: a tensor with
    the negative bit is copied, and an `AsyncCollectiveTensor`, which functional collectives and
    `DTensor.to_local()` return, is waited for. Differentiable.

    >>> import torch
    >>> imag = torch.tensor([1 + 2j]).conj().imag
    >>> imag.is_neg(), resolved(imag).is_neg(), resolved(imag)
    (True, False, tensor([-2.]))
    """
    if t is None or (type(t) is Tensor and not t.is_neg()):
        return t
    module = sys.modules.get("torch.distributed._functional_collectives")
    kind = getattr(module, "AsyncCollectiveTensor", None)
    found: Any = t
    if kind is not None and isinstance(t, kind):
        if needs_derivatives((t,)):
            return found.clone()
        found = found.trigger_wait()
    return found.resolve_neg()
