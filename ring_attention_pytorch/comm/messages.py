"""Several tensors in one message: their bytes are consecutive, each start aligned.

Keys can be sent in 8 bits (`Rounded`), if their values are such that this loses nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ring_attention_pytorch.runtime.interfaces import KVBlock
from ring_attention_pytorch.runtime.rowwise import wire_dtype
from ring_attention_pytorch.runtime.scaled import SCALED, exponents, restored, scales_of, stored

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
        form = Form.of(keys[:3], length)
        return Rounded.of_parts(form.parts) if keys.in_8_bits else form

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


@dataclass(frozen=True)
class Rounded(Form):
    """The form of a message whose keys and values are in 8 bits: `parts` are their forms outside.

    They must be such as `scaled.rounded` makes, and are the same after `open`.

    >>> from ring_attention_pytorch.runtime.scaled import rounded
    >>> keys = rounded(torch.tensor([[0.30, -1.75, 0.02]]))
    >>> form = Rounded.of_parts((Part((1, 3), torch.float32),))
    >>> form.nbytes, form.open(form.pack([keys], form.empty(keys.device)))
    (17, [tensor([[ 0.3125, -1.7500,  0.0195]])])
    """

    within: Form = field(kw_only=True)  # of rows and exponents

    @classmethod
    @lru_cache(maxsize=1024)
    def of_parts(cls, parts: tuple[Part, ...]) -> "Rounded":
        inside = []
        for shape, dtype in parts:
            if dtype.is_floating_point:
                inside.append(Part(shape, SCALED[0]))
                inside.append(Part((*shape[:-1], 1), torch.int8))
            else:  # a mask
                inside.append(Part(shape, dtype))
        within = Form.of_parts(tuple(inside))
        return cls(parts, within.spans, within.nbytes, within=within)

    def open(self, message: Tensor) -> list[Tensor]:
        """Return the tensors of a message, in memory of their own."""
        inside, found = iter(self.within.open(message)), []
        for _, dtype in self.parts:
            rows = next(inside)
            if dtype.is_floating_point:
                rows = restored(rows, scales_of(next(inside))).to(dtype)
            found.append(rows)
        return found

    def pack(self, tensors: Sequence[Tensor], message: Tensor) -> Tensor:
        inside = []
        for t in tensors:
            if t.is_floating_point():
                rows, scales = stored(t, SCALED[0])
                inside += [rows, exponents(scales)]
            else:
                inside.append(t)
        self.within.pack(inside, message)
        return message
