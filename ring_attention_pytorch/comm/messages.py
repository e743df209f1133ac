"""Several tensors in one message: their bytes are consecutive, each start aligned."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ring_attention_pytorch.runtime.interfaces import KVBlock
from ring_attention_pytorch.runtime.rowwise import wire_dtype

_ALIGNED = 16  # bytes: required of addresses by tensor memory accelerators and vector loads


class Part(NamedTuple):
    """The shape and dtype of one tensor of a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Form:
    """The parts of a message, and the place of their bytes. Cached for equal parts.

    >>> form = Form.of([torch.empty(1, 2, 3), None], length=5)
    >>> form.parts
    (Part(shape=(1, 5, 3), dtype=torch.float32),)
    >>> form.nbytes
    60
    """

    parts: tuple[Part, ...]
    spans: tuple[slice, ...] = field(compare=False)  # of each part, in bytes
    nbytes: int = field(compare=False)  # without padding at the end

    @classmethod
    def of(
        cls, tensors: Sequence[Tensor | None], length: int, dtype: torch.dtype | None = None
    ) -> "Form":
        """Return the form of tensors like these `[b, n, ...]`, but of `length` tokens.

        None has no part. `dtype` is theirs by default.
        """
        parts = []
        for t in tensors:
            if t is not None:
                parts.append(Part((t.shape[0], length, *t.shape[2:]), dtype or t.dtype))
        return cls.of_parts(tuple(parts))

    @classmethod
    def of_keys(cls, keys: KVBlock, length: int) -> "Form":
        """Return the form of keys like these, with their mask, but of `length` tokens."""
        return Form.of(keys[:3], length)

    @classmethod
    def of_grads(cls, keys: KVBlock, length: int) -> "Form":
        """Return the form of the gradients of `length` keys like these, as owners receive them."""
        return Form.of(keys[:2], length, wire_dtype(keys.k.dtype))

    @classmethod
    @lru_cache(maxsize=1024)
    def of_parts(cls, parts: tuple[Part, ...]) -> "Form":
        spans, end = [], 0
        for shape, dtype in parts:
            start = -(-end // _ALIGNED) * _ALIGNED
            end = start + prod(shape) * dtype.itemsize
            spans.append(slice(start, end))
        return cls(parts, tuple(spans), end)

    def empty(self, device: torch.device) -> Tensor:
        """Allocate memory for a message, uint8 `[nbytes]`."""
        return torch.empty(self.nbytes, dtype=torch.uint8, device=device)

    def open(self, message: Tensor) -> list[Tensor]:
        """Return the tensors of a message, as views into it."""
        return [
            message[span].view(dtype).view(shape)
            for span, (shape, dtype) in zip(self.spans, self.parts)
        ]

    def pack(self, tensors: Sequence[Tensor], message: Tensor) -> Tensor:
        """Write tensors into a message, rounded to its dtypes; return it."""
        for place, t in zip(self.open(message), tensors):
            place.copy_(t)
        return message
