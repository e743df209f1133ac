"""Chunks of runs, the unit of flash-linear-attention's kernels in each step of a delta rule."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

CHUNK = 64  # tokens


@dataclass(frozen=True, eq=False)
class How:
    """Where runs are, for fla's functions: borders of runs, chunks, and where runs' chunks begin.

    Attributes:
        cu_seqlens: int64 `[runs + 1]`.
        chunk_indices: int64 `[chunks, 2]`, each chunk's run, and its number in it.
        chunk_offsets: int64 `[runs + 1]`.
        spans: int64 `[runs, 2]`, the first token of each run and its end.
    """

    cu_seqlens: Tensor
    chunk_indices: Tensor
    chunk_offsets: Tensor
    spans: Tensor

    @classmethod
    def of(cls, spans: list[tuple[int, int]], device: torch.device) -> "How":
        """Make it for runs that follow one another.

        >>> how = How.of([(0, 2), (2, 70)], torch.device("cpu"))
        >>> how.cu_seqlens.tolist(), how.chunk_indices.tolist(), how.chunk_offsets.tolist()
        ([0, 2, 72], [[0, 0], [1, 0], [1, 1]], [0, 1, 3])
        """
        counts = [-(-length // CHUNK) for _, length in spans]
        chunks = [(run, each) for run, count in enumerate(counts) for each in range(count)]
        offsets = [sum(counts[:run]) for run in range(len(counts) + 1)]
        borders = [0, *(first + length for first, length in spans)]
        ends = [(first, first + length) for first, length in spans]
        return cls(*(torch.tensor(t, device=device) for t in (borders, chunks, offsets, ends)))

    @cached_property
    def given(self) -> dict[str, Any]:
        """The options of all of fla's functions."""
        return dict(cu_seqlens=self.cu_seqlens, chunk_indices=self.chunk_indices)

    @cached_property
    def sized(self) -> dict[str, Any]:
        """The options of functions that compute chunks."""
        return dict(self.given, chunk_size=CHUNK)

    @cached_property
    def stepped(self) -> dict[str, Any]:
        """The options of functions that follow states."""
        return dict(self.sized, chunk_offsets=self.chunk_offsets)


class Chunks(NamedTuple):
    """Inputs of the kernels of states, `[1, n, ...]`.

    Attributes:
        q, k: with as many heads as values for a rule of channels, whose gates they contain.
        g: the sums of gates from each chunk's start, base 2.
        kept: tensors that the rule needs for its outputs, and for backward.
    """

    q: Tensor
    k: Tensor
    w: Tensor
    u: Tensor
    g: Tensor
    kept: tuple[Tensor, ...]

    @property
    def gates(self) -> dict[str, Tensor]:
        """The gates as fla's functions that follow states name them."""
        return {"gk" if self.g.ndim == 4 else "g": self.g}


class Inputs(NamedTuple):
    """Results of a rule, `[1, n, ...]`; g are sums of gates from each chunk's start."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    scale: float


class Returned(NamedTuple):
    """States, values and their gradients, as backward has them before its last step."""

    h: Tensor
    v: Tensor  # after the delta rule
    dh: Tensor
    dv: Tensor
    do: Tensor
    local: Tensor | None  # gradients of scores within chunks, for a rule of channels
