"""Tensors whose memory does not hold their values, and kernels that look at nothing but memory."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._pytree import tree_map_only

from ring_attention_pytorch.kernels import KERNELS
from ring_attention_pytorch.runtime.interfaces import KVBlock, Residuals


def negative(t: Tensor) -> Tensor:
    """Values with PyTorch's negative bit, as `z.conj().imag` has: memory has the other sign."""
    return torch._neg_view(_copied(t).neg_())


class _Unwaited(AsyncCollectiveTensor):
    """A collective's result of which nothing has come before somebody waits."""

    __slots__ = ["values"]

    def trigger_wait(self) -> Tensor:
        self.elem.copy_(self.values)
        self.completed = True
        return self.elem

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_map_only(_Unwaited, cls.trigger_wait, (args, kwargs or {}))
        return func(*given[0], **given[1])


def unwaited(t: Tensor) -> Tensor:
    """Values that nobody has waited for: memory is NaN until then."""
    found: Any = _Unwaited(_copied(t).fill_(torch.nan))
    found.values = t.clone()
    return found


def _copied(t: Tensor) -> Tensor:
    """In memory of its own, laid out alike."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t)


LAZY: dict[str, Callable[[Tensor], Tensor]] = {"negative bit": negative, "not waited": unwaited}


def memory_of(t: Any) -> Any:
    """Return what is read of a tensor by its address; all else as it is."""
    if isinstance(t, AsyncCollectiveTensor):
        assert isinstance(t, _Unwaited), "nobody has waited"
        return t.elem.clone()
    return torch._neg_view(t) if isinstance(t, Tensor) and t.is_neg() else t


@contextmanager
def kernels_by_address() -> Iterator[None]:
    """PyTorch's kernels for CPUs are given what is in memory, as GPUs' kernels read it."""
    with ExitStack() as stack:
        for kernel in (KERNELS["eager"], KERNELS["sdpa"]):
            stack.enter_context(mock.patch.object(kernel, "forward", _forward(kernel.forward)))
            stack.enter_context(mock.patch.object(kernel, "backward", _backward(kernel.backward)))
        yield


def _forward(run: Callable[..., None]) -> Callable[..., None]:
    def forward(q: Tensor, keys: KVBlock, *rest: Any) -> None:
        run(memory_of(q), _read(keys), *rest)

    return forward


def _backward(run: Callable[..., None]) -> Callable[..., None]:
    def backward(saved: Residuals, keys: KVBlock, *rest: Any) -> None:
        given = (saved.q, saved.out, saved.lse, saved.dout, saved.dlse)
        run(Residuals(*map(memory_of, given)), _read(keys), *rest)

    return backward


def _read(keys: KVBlock) -> KVBlock:
    return keys._replace(k=memory_of(keys.k), v=memory_of(keys.v))
