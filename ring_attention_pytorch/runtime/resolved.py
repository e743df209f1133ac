"""Tensors whose memory holds their values: kernels and shared memory read nothing else.

PyTorch's operations see more: the negative bit of `z.conj().imag`, or a collective whose result has
not been waited for.
"""

import sys
from typing import Any, TypeVar

from torch import Tensor

from ring_attention_pytorch.runtime.torch_func import needs_derivatives

_Some = TypeVar("_Some", Tensor, Tensor | None)


def resolved(t: _Some) -> _Some:
    """Return a tensor whose memory holds the values of t, usually t itself; None for None.

    A tensor with PyTorch's negative bit is copied. An `AsyncCollectiveTensor`, which functional
    collectives and `DTensor.to_local()` return, is waited for. Differentiable.

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
