"""Pieces of tensors that ranks exchange, each with each; gradients go back the way the pieces came.

Convention of gradients: backward differentiates the sum of every rank's result, where each rank's
tensors are separate variables.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ring_attention_pytorch.ranks.ring import Ring, Transfer
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype

Shape = tuple[int, ...]
_CALL = "sharding"  # what errors call it


def all_to_all(pieces: list[Tensor], shapes: Sequence[Shape], ring: Ring) -> list[Tensor]:
    """Send piece i to rank i, and return what came from each, of `shapes[i]`. Differentiable."""
    mine = pieces.pop(ring.rank)
    if ring.size == 1:
        return [mine]
    others = [*shapes[: ring.rank], *shapes[ring.rank + 1 :]]
    received = list(_AllToAll.apply(ring, others, *pieces))
    received.insert(ring.rank, mine)
    return received


def exchange_rows(pieces: list[Tensor], lands: Sequence[Tensor], ring: Ring) -> list[Tensor]:
    """Send rows `pieces[i]` to rank i; return those from each, as many as `lands[i]`."""
    width = pieces[0].shape[1:]
    return all_to_all(pieces, [(len(land), *width) for land in lands], ring)


def scatter_rows(pieces: list[Tensor], lands: Sequence[Tensor], onto: Tensor, ring: Ring) -> Tensor:
    """Return `onto` `[rows, ...]`, with what `exchange_rows` brings from rank i at `lands[i]`."""
    received = torch.cat(exchange_rows(pieces, lands, ring))
    return onto.index_copy(0, torch.cat(tuple(lands)), received.to(onto.dtype))


def all_gather(x: Tensor, shapes: Sequence[Shape], ring: Ring, call: str = _CALL) -> list[Tensor]:
    """Return every rank's x, in the order of ranks, of `shapes[i]`. Differentiable.

    Backward sums the ranks' gradients of a part on its owner. Errors name the `call`.
    """
    return [x] if ring.size == 1 else list(_AllGather.apply(x, ring, shapes, call))


def sum_over_ranks(x: Tensor, ring: Ring, call: str = _CALL) -> Tensor:
    """Sum all ranks' x, of one shape, in the order of ranks, so that all get the same bits."""
    return _sum(all_gather(x, [tuple(x.shape)] * ring.size, ring, call))


def all_gather_stacked(x: Tensor, ring: Ring) -> Tensor:
    """Return every rank's x, of one shape, `[ranks, *x.shape]`, within a call; no gradient."""
    if ring.size == 1:
        return x.unsqueeze(0)
    found = x.new_empty((ring.size, *x.shape))
    parts = [*found.unbind()]
    parts.pop(ring.rank)
    transfer = _start(ring, [x] * len(parts), parts)
    found[ring.rank] = x
    transfer.wait()
    return found


class _AllToAll(Function):
    """(ring, shapes, pieces for every other rank) -> pieces from every other rank."""

    @staticmethod
    def forward(ctx: Any, ring: Ring, shapes: list[Shape], *pieces: Tensor) -> tuple[Tensor, ...]:
        ctx.ring = ring
        ctx.shapes = [tuple(piece.shape) for piece in pieces]
        return tuple(_swap(ring, shapes, pieces, _CALL))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_AllToAll.apply(ctx.ring, ctx.shapes, *grads)


class _AllGather(Function):
    """(x, ring, shapes, call) -> every rank's x, in the order of ranks."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, ring: Ring, shapes: list[Shape], call: str
    ) -> tuple[Tensor, ...]:
        ctx.ring = ring
        ctx.shape = tuple(x.shape)
        others = [*shapes[: ring.rank], *shapes[ring.rank + 1 :]]
        parts = _swap(ring, others, [x.contiguous()] * len(others), call)
        parts.insert(ring.rank, x.view_as(x))
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rank = ctx.ring.rank
        others = grads[:rank] + grads[rank + 1 :]
        mine = list(_AllToAll.apply(ctx.ring, [ctx.shape] * len(others), *others))
        mine.insert(rank, grads[rank])
        return _sum(mine), None, None, None


def _sum(parts: Sequence[Tensor]) -> Tensor:
    """Sum in wide numbers, always in the order of ranks, so that results repeat."""
    dtype = parts[0].dtype
    total = parts[0].to(accumulation_dtype(dtype), copy=True)
    for part in parts[1:]:
        total += part
    return total.to(dtype)


def _swap(
    ring: Ring, shapes: Iterable[Shape], tensors: Sequence[Tensor], call: str
) -> list[Tensor]:
    """Send tensor i to the i-th other rank; return those that came, in the order of ranks."""
    sends = [t.contiguous() for t in tensors]
    with ring.call(call):
        return _start(ring, sends, [tensors[0].new_empty(shape) for shape in shapes]).wait()


def _start(ring: Ring, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> Transfer:
    """Send tensor i to the i-th other rank, and let tensor i be received from it."""
    others = [rank for rank in range(ring.size) if rank != ring.rank]
    return ring.exchange([*zip(others, sends)], [*zip(others, receives)])
