"""Pieces of tensors that all ranks exchange; their gradients take the way back.

Convention of gradients: backward differentiates the sum of every rank's result, where each rank's
tensors are separate variables.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ring_attention_pytorch.ranks.ring import Exchange, Ring
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype
from ring_attention_pytorch.schedule.relays import MergeRoute

Shape = tuple[int, ...]
_CALL = "sharding"  # the call's name in errors


def all_to_all(pieces: list[Tensor], shapes: Sequence[Shape], ring: Ring) -> list[Tensor]:
    """Send piece i to rank i, and return the piece from each, of `shapes[i]`. Differentiable."""
    return pieces if ring.size == 1 else list(_AllToAll.apply(ring, shapes, *pieces))


def exchange_rows(pieces: list[Tensor], lands: Sequence[Tensor], ring: Ring) -> list[Tensor]:
    """Send rows `pieces[i]` to rank i; return the rows from each, `len(lands[i])` of them."""
    width = pieces[0].shape[1:]
    return all_to_all(pieces, [(len(land), *width) for land in lands], ring)


def scatter_rows(pieces: list[Tensor], lands: Sequence[Tensor], onto: Tensor, ring: Ring) -> Tensor:
    """Return `onto` `[rows, ...]` with the rows from rank i (`exchange_rows`) at `lands[i]`."""
    received = torch.cat(exchange_rows(pieces, lands, ring))
    return onto.index_copy(0, torch.cat(tuple(lands)), received.to(onto.dtype))


def fetch_rows(
    x: Tensor, sends: Sequence[Tensor], lands: Sequence[Tensor], rows: int, ring: Ring
) -> Tensor:
    """Return `[rows, ...]` of tokens that this rank needs, 0 where no rank has one.

    Args:
        x: `[b, n, ...]`, this rank's tokens.
        sends: for each rank, the tokens that it gets, in `[b * n]`.
        lands: for each rank, the rows where its tokens are stored.
    """
    room = x.new_zeros(rows, *x.shape[2:])
    x = x.flatten(0, 1)
    return scatter_rows([x[sent] for sent in sends], lands, room, ring)


def all_gather(x: Tensor, shapes: Sequence[Shape], ring: Ring, call: str = _CALL) -> list[Tensor]:
    """Return every rank's x, in the order of ranks, of `shapes[i]`. Differentiable.

    Backward sums the ranks' gradients of a part on its owner. Errors name the `call`.
    """
    return [x] if ring.size == 1 else list(_AllGather.apply(x, ring, shapes, call))


def fill_in(rows: Tensor, counts: Sequence[int], ring: Ring, call: str) -> None:
    """Receive the other ranks' rows beside this rank's own; no gradient.

    Args:
        rows: `[sum of counts, ...]`, of all ranks in order.
        counts: the rows of each rank.
        ring: the ranks.
        call: the call's name in errors.
    """
    if ring.size > 1:
        parts = rows.split(list(counts))
        with ring.call(call):
            _start(ring, [parts[ring.rank]] * ring.size, parts).wait()


def summed_by_owners(rows: Tensor, counts: Sequence[int], ring: Ring, call: str) -> Tensor:
    """Return this rank's rows, summed over all ranks; arguments are as for `fill_in`."""
    if ring.size == 1:
        return rows
    pieces = rows.split(list(counts))
    shapes = [tuple(pieces[ring.rank].shape)] * ring.size
    return sum_parts(_swap(ring, shapes, pieces, call))


def sum_over_ranks(x: Tensor, ring: Ring, call: str = _CALL) -> Tensor:
    """Sum all ranks' x, of one shape, in the order of ranks, so that all get the same bits."""
    return sum_parts(all_gather(x, [tuple(x.shape)] * ring.size, ring, call))


def all_gather_along(
    dim: int, x: Tensor, lengths: Iterable[int], ring: Ring, call: str = _CALL
) -> Tensor:
    """Return every rank's x, of `lengths[i]` along dim, joined there; else as `all_gather`."""
    dim = dim % x.ndim
    shapes = [(*x.shape[:dim], length, *x.shape[dim + 1 :]) for length in lengths]
    return torch.cat(all_gather(x, shapes, ring, call), dim)


def all_gather_stacked(x: Tensor, ring: Ring) -> Tensor:
    """Return every rank's x, of one shape, `[ranks, *x.shape]`, within a call; no gradient."""
    ranks = range(ring.size)
    return x.unsqueeze(0) if ring.size == 1 else _stacked(x, ring, ranks, ranks)


def gather_to_merge(
    x: Tensor, ring: Ring, route: MergeRoute | None, merge: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return `[parts, *x.shape]` whose `merge` is that of all ranks' x, within a call; no gradient.

    On one machine a part is a rank's x. On several it is a machine's, if x is large: its ranks
    merge theirs first, so that a rank gets one message from each other machine. All ranks get the
    same parts.

    Args:
        x: of one shape on all ranks.
        route: from `merge_route`.
        merge: `[parts, *x.shape]` to `x.shape`.
    """
    if route is None:
        return all_gather_stacked(x, ring)
    merged = merge(_stacked(x, ring, route.near, route.near))
    return _stacked(merged, ring, route.senders, route.receivers)


class _AllToAll(Function):
    """(ring, shapes, pieces for every rank) -> pieces from every rank."""

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
        return tuple(_swap(ring, shapes, [x.contiguous()] * ring.size, call))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        mine = _AllToAll.apply(ctx.ring, [ctx.shape] * len(grads), *grads)
        return sum_parts(mine), None, None, None


def sum_parts(parts: Sequence[Tensor]) -> Tensor:
    """Sum in the accumulator's dtype, in the order of ranks, so that results repeat."""
    dtype = parts[0].dtype
    total = parts[0].to(accumulation_dtype(dtype), copy=True)
    for part in parts[1:]:
        total += part
    return total.to(dtype)


def _swap(
    ring: Ring, shapes: Sequence[Shape], tensors: Sequence[Tensor], call: str
) -> list[Tensor]:
    """Send tensor i to rank i; return the received tensors, and a view of the own one."""
    own = tensors[ring.rank]
    received = [
        own.view_as(own) if rank == ring.rank else own.new_empty(shape)
        for rank, shape in enumerate(shapes)
    ]
    with ring.call(call):
        _start(ring, tensors, received).wait()
    return received


def _stacked(x: Tensor, ring: Ring, senders: Sequence[int], receivers: Sequence[int]) -> Tensor:
    """Send x to `receivers`, and return the x of `senders`, stacked; this rank is one of these."""
    x, mine = x.contiguous(), ring.rank
    found = x.new_empty((len(senders), *x.shape))
    rooms = zip(senders, found.unbind())
    transfer = ring.exchange(
        [(rank, x) for rank in receivers if rank != mine],
        [(rank, room) for rank, room in rooms if rank != mine],
    )
    found[senders.index(mine)] = x
    transfer.wait()
    return found


def _start(ring: Ring, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> Exchange:
    """Send `sends[i]` to rank i and receive `receives[i]` from it, except for this rank.

    Empty tensors don't travel: both ranks know that they are.
    """
    others = [rank for rank in range(ring.size) if rank != ring.rank]
    return ring.exchange(
        [(rank, sends[rank].contiguous()) for rank in others if sends[rank].numel()],
        [(rank, receives[rank]) for rank in others if receives[rank].numel()],
    )
