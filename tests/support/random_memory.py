"""Layouts in memory for the same values: strides that tensors may have."""

from collections.abc import Callable

import torch
from torch import Tensor


def laid(values: Tensor, kind: str) -> Tensor:
    """The values, as a tensor with such strides. What lies between them is NaN."""
    return KINDS[kind](values).detach()


def uniform(values: Tensor, kind: str) -> Tensor:
    """Values that can be laid so: those of an expanded tensor repeat."""
    dim = EXPANDED.get(kind)
    if dim is None or values.shape[dim] == 0:
        return values
    return values.narrow(dim, 0, 1).expand_as(values).contiguous()


def kinds(ndim: int) -> list[str]:
    """List the layouts that tensors of so many dimensions may have."""
    few = {"heads first": 3, "last two turned": 2, "one sample": 2}
    return [kind for kind in KINDS if ndim >= few.get(kind, 1)]


def _room(values: Tensor, *shape: int) -> Tensor:
    """Memory full of what must not be read."""
    fill = torch.nan if values.is_floating_point() else values.dtype == torch.bool or 77
    return torch.full(shape, fill, dtype=values.dtype, device=values.device)


def _placed(room: Tensor, values: Tensor) -> Tensor:
    return room.copy_(values)


def _every_other(values: Tensor) -> Tensor:
    *shape, last = values.shape
    return _placed(_room(values, *shape, 2 * last)[..., ::2], values)


def _one_of_three(values: Tensor) -> Tensor:
    """As q of `rearrange(qkv, "b n (h d three) -> three b n h d")`."""
    return _placed(_room(values, *values.shape, 3)[..., 1], values)


def _turned(values: Tensor) -> Tensor:
    """As `rearrange(x, "b n (d h) -> b n h d")`."""
    return values.mT.contiguous().mT


def _heads_first(values: Tensor) -> Tensor:
    return values.transpose(1, 2).contiguous().transpose(1, 2)


def _last_first(values: Tensor) -> Tensor:
    order = tuple(reversed(range(values.ndim)))
    return values.permute(order).contiguous().permute(order)


def _part_of_more(values: Tensor) -> Tensor:
    room = _room(values, *(size + 3 for size in values.shape))
    return _placed(room[tuple(slice(2, 2 + size) for size in values.shape)], values)


def _expanded(dim: int) -> Callable[[Tensor], Tensor]:
    def expand(values: Tensor) -> Tensor:
        if values.shape[dim] == 0:
            return values.contiguous()
        return values.narrow(dim, 0, 1).clone().expand_as(values)

    return expand


EXPANDED = {"one number": -1, "one sample": 0}
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": Tensor.contiguous,
    "every other": _every_other,
    "one of three": _one_of_three,
    "last two turned": _turned,
    "heads first": _heads_first,
    "last first": _last_first,
    "part of more": _part_of_more,
    **{kind: _expanded(dim) for kind, dim in EXPANDED.items()},
}
