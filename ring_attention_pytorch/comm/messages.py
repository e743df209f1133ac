"""Several tensors in one message: their bytes one after another, each start aligned."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

_ALIGNED = 16  # bytes: what tensor memory accelerators and vector loads need of an address


class Part(NamedTuple):
    """The shape and dtype of one tensor of a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        size = self.dtype.itemsize
        for length in self.shape:
            size *= length
        return size


Form = tuple[Part, ...]


def form_of(tensors: Sequence[Tensor | None], length: int) -> Form:
    """Return the form of tensors like these `[b, n, ...]` with `length` tokens; None takes no room.

    >>> form_of([torch.empty(1, 2, 3), None], length=5)
    (Part(shape=(1, 5, 3), dtype=torch.float32),)
    """
    given = (t for t in tensors if t is not None)
    return tuple(Part((t.shape[0], length, *t.shape[2:]), t.dtype) for t in given)


@lru_cache(maxsize=1024)
def _starts(form: Form) -> list[int]:
    """List where each part starts, and where the message ends, which is not padded."""
    padded = (-(-part.nbytes // _ALIGNED) * _ALIGNED for part in form[:-1])
    starts = list(accumulate(padded, initial=0)) if form else []
    return [*starts, starts[-1] + form[-1].nbytes if form else 0]


def message_bytes(form: Form) -> int:
    """Return the bytes of a message of this form."""
    return _starts(form)[-1]


def room(like: Tensor, length: int) -> Tensor:
    """Return empty memory for a message of `length` bytes, on the device of `like`."""
    return torch.empty(length, dtype=torch.uint8, device=like.device)


def opened(message: Tensor, form: Form) -> list[Tensor]:
    """Return the tensors of a message, as views into it."""
    return [
        message[start : start + part.nbytes].view(part.dtype).view(part.shape)
        for start, part in zip(_starts(form), form)
    ]


def packed(tensors: Sequence[Tensor], form: Form, into: Tensor | None = None) -> Tensor:
    """Pack tensors into one message of this form, rounded to its dtypes; `into` it, if given."""
    message = room(tensors[0], message_bytes(form)) if into is None else into
    for place, t in zip(opened(message, form), tensors):
        place.copy_(t)
    return message
