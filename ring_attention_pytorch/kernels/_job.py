"""A launch of ours as tapes see it: one operation, one constant, and the tensors of a call."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_attention_pytorch.runtime.interfaces import KVBlock, Residuals, ScoreMods, Tiles
from ring_attention_pytorch.runtime.launches import KernelCall, PreparedLaunch
from ring_attention_pytorch.runtime.tape import opaque, prepared


def operation(call: Callable[..., KernelCall]) -> Callable[..., None]:
    """Decorate what makes a call of a job and of tensors, so that it is launched.

    For tapes that is one operation. They launch what is compiled without looking at arguments.
    """

    @opaque
    @wraps(call)
    def launched(job: "Job", *tensors: Tensor | Any) -> None:
        with _on(tensors[0]):
            call(job, *tensors).launch()

    @prepared(launched)
    def _(*given: Any) -> PreparedLaunch:
        return PreparedLaunch(call(*given), given)

    return launched


def _on(t: Tensor) -> AbstractContextManager[Any]:
    """Make the device of t current: Triton launches on that one, whatever device tensors are on."""
    return torch.cuda.device(t.device) if t.is_cuda else nullcontext()


class Rows(NamedTuple):
    """What a backward pass reads of queries; `Residuals` has their shapes."""

    q: Tensor
    dout: Tensor
    lse: Tensor
    delta: Tensor

    @classmethod
    def of(cls, saved: Residuals) -> "Rows":
        return cls(saved.q, saved.dout, saved.lse, saved.delta)


@dataclass(frozen=True, eq=False)
class Job:
    """Tiles and terms: constants of a plan, which are the same only if they are the same object."""

    tiles: Tiles
    terms: ScoreMods

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Job) and (self.tiles is other.tiles and self.terms is other.terms)

    def __hash__(self) -> int:
        return hash((id(self.tiles), id(self.terms)))


def opened(
    job: Job, tensors: Sequence[Tensor | Any]
) -> tuple[Tiles, ScoreMods, KVBlock, Sequence[Tensor | Any]]:
    """Take k, v and a mask off tensors that came one by one; return what a kernel is given."""
    k, v, key_mask, *rest = tensors
    return job.tiles, job.terms, KVBlock(k, v, key_mask, ()), rest
