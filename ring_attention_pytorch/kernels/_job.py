"""Arguments of our kernels: a constant for tapes (`Job`), and the tensors of a call."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from ring_attention_pytorch.runtime.interfaces import KVBlock, Residuals, ScoreMods, Tiles


class Rows(NamedTuple):
    """The tensors of queries that a backward pass reads; `Residuals` has their shapes."""

    q: Tensor
    dout: Tensor
    lse: Tensor
    delta: Tensor

    @classmethod
    def of(cls, saved: Residuals) -> "Rows":
        return cls(saved.q, saved.dout, saved.lse, saved.delta)


@dataclass(frozen=True, eq=False)
class Job:
    """Tiles and terms, constants of a plan; equal only if both are the same objects."""

    tiles: Tiles
    terms: ScoreMods

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Job):
            return False
        return self.tiles is other.tiles and self.terms is other.terms

    def __hash__(self) -> int:
        return hash((id(self.tiles), id(self.terms)))


def opened(
    job: Job, tensors: Sequence[Tensor | Any]
) -> tuple[Tiles, ScoreMods, KVBlock, Sequence[Tensor | Any]]:
    """Return (tiles, terms, keys, other tensors) from a job and tensors (k, v, key mask, ...)."""
    k, v, key_mask, *rest = tensors
    return job.tiles, job.terms, KVBlock(k, v, key_mask, ()), rest
