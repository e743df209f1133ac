"""Pieces of tensors that all ranks exchange; their gradients take the way back.

Each function takes the `Caller` whose call it makes, and a backward makes that caller's.

Convention of gradients: backward differentiates the sum of every rank's result, where each rank's
tensors are separate variables.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ring_attention_pytorch.ranks.ring import Caller, Exchange, Messages, Ring
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype, wire_dtype
from ring_attention_pytorch.runtime.torch_func import Function
from ring_attention_pytorch.schedule.passing import (
    merged_pieces,
    merging_machines,
    passes,
    passes_spare,
    passing_machines,
)
from ring_attention_pytorch.schedule.relays import Machines, members

Shape = tuple[int, ...]


def all_to_all(pieces: list[Tensor], shapes: Sequence[Shape], caller: Caller) -> list[Tensor]:
    """Send piece i to rank i, and return the piece from each, of `shapes[i]`. Differentiable."""
    return pieces if caller.ring.size == 1 else list(_AllToAll.apply(caller, shapes, *pieces))


def exchange_rows(pieces: list[Tensor], lands: Sequence[Tensor], caller: Caller) -> list[Tensor]:
    """Send rows `pieces[i]` to rank i; return the rows from each, `len(lands[i])` of them."""
    width = pieces[0].shape[1:]
    return all_to_all(pieces, [(len(land), *width) for land in lands], caller)


def scatter_rows(
    pieces: list[Tensor], lands: Sequence[Tensor], onto: Tensor, caller: Caller
) -> Tensor:
    """Return `onto` `[rows, ...]` with the rows from rank i (`exchange_rows`) at `lands[i]`."""
    received = torch.cat(exchange_rows(pieces, lands, caller))
    return onto.index_copy(0, torch.cat(tuple(lands)), received.to(onto.dtype))


def fetch_rows(
    x: Tensor, sends: Sequence[Tensor], lands: Sequence[Tensor], rows: int, caller: Caller
) -> Tensor:
    """Return `[rows, ...]` of tokens that this rank needs, 0 where no rank has one.

    Args:
        x: `[b, n, ...]`, this rank's tokens.
        sends: for each rank, the tokens that it gets, in `[b * n]`.
        lands: for each rank, the rows where its tokens are stored.
        rows: how many this rank needs.
        caller: who fetches them.
    """
    room = x.new_zeros(rows, *x.shape[2:])
    x = x.flatten(0, 1)
    return scatter_rows([x[sent] for sent in sends], lands, room, caller)


def all_gather(x: Tensor, shapes: Sequence[Shape], caller: Caller) -> list[Tensor]:
    """Return every rank's x, in the order of ranks, of `shapes[i]`. Differentiable.

    Backward sums the ranks' gradients of a part on its owner.
    """
    return [x] if caller.ring.size == 1 else list(_AllGather.apply(caller, shapes, x))


def fill_in(rows: Tensor, counts: Sequence[int], caller: Caller) -> None:
    """Receive the other ranks' rows beside this rank's own; no gradient.

    Args:
        rows: `[sum of counts, ...]`, of all ranks in order.
        counts: the rows of each rank.
        caller: who makes the call.
    """
    if caller.ring.size > 1:
        _gather(rows.split(list(counts)), caller)


def summed_by_owners(rows: Tensor, counts: Sequence[int], caller: Caller) -> Tensor:
    """Return this rank's rows, summed over all ranks; arguments are as for `fill_in`."""
    return rows if caller.ring.size == 1 else _sum_on_owners(rows.split(list(counts)), caller)


def sum_over_ranks(x: Tensor, caller: Caller) -> Tensor:
    """Sum all ranks' x, of one shape, in one order, so that all get the same bits; no gradient."""
    if (ring := caller.ring).size == 1:
        return x
    wide = x.to(wire_dtype(x.dtype))
    machines = merging_machines(ring.machines, wide.nbytes)
    with caller.call():
        parts = gather_to_merge(wide, ring, machines, lambda near: sum_parts(near.unbind()))
    return sum_parts(parts.unbind()).to(x.dtype)


def all_gather_along(dim: int, x: Tensor, lengths: Iterable[int], caller: Caller) -> Tensor:
    """Return every rank's x, of `lengths[i]` along dim, joined there; else as `all_gather`."""
    dim = dim % x.ndim
    shapes = [(*x.shape[:dim], length, *x.shape[dim + 1 :]) for length in lengths]
    return torch.cat(all_gather(x, shapes, caller), dim)


def gather_to_merge(
    x: Tensor, ring: Ring, machines: Machines | None, merge: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return `[parts, *x.shape]` whose `merge` is that of all ranks' x, within a call; no gradient.

    A part is a rank's x, or with `machines` a machine's: its ranks merge theirs first, and each
    sends a piece of the result to the others. All ranks get the same parts.

    Args:
        x: of one shape on all ranks.
        ring: the ranks.
        machines: from `merging_machines`.
        merge: `[parts, *x.shape]` to `x.shape`.
    """
    if machines is None:
        return _stacked(x, ring, range(ring.size))
    merged = merge(_stacked(x, ring, members(machines, machines[ring.rank])))
    found = merged.new_empty((len({*machines}), *x.shape))
    found[machines[ring.rank]] = merged
    sizes, passing = merged_pieces(machines, x.numel(), found.itemsize)
    pieces: dict[int, Tensor] = {}
    for machine, part in enumerate(found.flatten(1)):
        ranks = members(machines, machine)
        pieces |= zip(ranks, part.split([sizes[rank] for rank in ranks]))
    start_gather([pieces[rank] for rank in range(ring.size)], ring, passing)()
    return found


class _AllToAll(Function):
    """(caller, shapes, pieces for every rank) -> pieces from every rank."""

    @staticmethod
    def forward(caller: Caller, shapes: list[Shape], *pieces: Tensor) -> tuple[Tensor, ...]:
        return tuple(_swap(shapes, pieces, caller))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        caller, ctx.there, *pieces = inputs
        ctx.caller, ctx.shapes = caller.back(), [tuple(piece.shape) for piece in pieces]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_AllToAll.apply(ctx.caller, ctx.shapes, *grads)

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, *along: Tensor) -> tuple[Tensor, ...]:
        return _AllToAll.apply(ctx.caller, ctx.there, *along)


class _AllGather(Function):
    """(caller, shapes, x) -> every rank's x, in the order of ranks."""

    @staticmethod
    def forward(caller: Caller, shapes: list[Shape], x: Tensor) -> tuple[Tensor, ...]:
        parts = _rooms(x.contiguous(), caller.ring, shapes)
        _gather(parts, caller)
        return tuple(parts)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        caller, ctx.shapes, _ = inputs
        ctx.caller = caller.back()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, _SumOnOwners.apply(ctx.caller, *grads)

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, along: Tensor) -> tuple[Tensor, ...]:
        return _AllGather.apply(ctx.caller, ctx.shapes, along)


class _SumOnOwners(Function):
    """(caller, pieces for every rank) -> the sum of all ranks' pieces for this one."""

    @staticmethod
    def forward(caller: Caller, *pieces: Tensor) -> Tensor:
        return _sum_on_owners(pieces, caller)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        caller, *pieces = inputs
        ctx.caller, ctx.shapes = caller.back(), [tuple(piece.shape) for piece in pieces]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_AllGather.apply(ctx.caller, ctx.shapes, grad)

    @staticmethod
    def jvp(ctx: Any, _: None, *along: Tensor) -> Tensor:
        return _SumOnOwners.apply(ctx.caller, *along)


def sum_parts(parts: Sequence[Tensor]) -> Tensor:
    """Sum in the accumulator's dtype, in the order of ranks, so that results repeat."""
    dtype = parts[0].dtype
    total = parts[0].to(accumulation_dtype(dtype), copy=True)
    for part in parts[1:]:
        total += part
    return total.to(dtype)


def _swap(shapes: Sequence[Shape], tensors: Sequence[Tensor], caller: Caller) -> list[Tensor]:
    """Send tensor i to rank i; return the received tensors, and a view of the own one."""
    ring = caller.ring
    received = _rooms(tensors[ring.rank], ring, shapes)
    sends, receives = [*enumerate(tensors)], [*enumerate(received)]
    del sends[ring.rank], receives[ring.rank]
    with caller.call():
        start_messages(ring, sends, receives).wait()
    return received


def _rooms(own: Tensor, ring: Ring, shapes: Sequence[Shape]) -> list[Tensor]:
    """Return memory for every rank's tensor, of this rank a view of `own`."""
    return [
        own.view_as(own) if rank == ring.rank else own.new_empty(shape)
        for rank, shape in enumerate(shapes)
    ]


def _gather(parts: Sequence[Tensor], caller: Caller) -> None:
    """Receive the other ranks' parts beside this rank's own."""
    ring = caller.ring
    machines = passing_machines(ring.machines, [part.nbytes for part in parts])
    with caller.call():
        start_gather(parts, ring, machines)()


def start_gather(parts: Sequence[Tensor], ring: Ring, machines: Machines) -> Callable[[], object]:
    """Send the own part to all ranks, within a call; return a function that receives the others.

    Args:
        parts: of all ranks, contiguous.
        ring: the ranks.
        machines: of the ranks; a part crosses to each once, and is passed on there.
    """
    way, own = passes(machines, ring.rank), parts[ring.rank]
    straight = [(rank, parts[rank]) for rank in way.straight]
    first = start_messages(ring, [(rank, own) for rank in way.to], straight)
    if not passes_spare(machines):
        return first.wait

    def wait() -> None:
        first.wait()
        sends = [(rank, parts[owner]) for rank, owner in way.passed]
        receives = [(rank, parts[owner]) for rank, owner in way.relayed]
        start_messages(ring, sends, receives).wait()

    return wait


def _sum_on_owners(pieces: Sequence[Tensor], caller: Caller) -> Tensor:
    """Return the sum of all ranks' pieces for this one: the way of `start_gather` back.

    A relay adds those of its machine, in the order of ranks, and one sum crosses.
    """
    ring = caller.ring
    machines = passing_machines(ring.machines, [piece.nbytes for piece in pieces])
    way, sums = passes(machines, ring.rank), list(pieces)
    with caller.call():
        if passes_spare(machines):
            sums = [piece.to(wire_dtype(piece.dtype)) for piece in pieces]
            _add_received(sums, ring, way.relayed, way.passed)
        home = [(rank, rank) for rank in way.straight]
        _add_received(sums, ring, home, [(rank, ring.rank) for rank in way.to])
    return sums[ring.rank].to(pieces[ring.rank].dtype)


def _add_received(
    sums: list[Tensor],
    ring: Ring,
    sends: Sequence[tuple[int, int]],
    comes: Sequence[tuple[int, int]],
) -> None:
    """Send sums of owners, and add those that come to own ones, in the order of ranks.

    `sends` has the receiver and the owner of each, `comes` the sender and the owner.
    """
    rooms = [(rank, sums[owner].new_empty(sums[owner].shape)) for rank, owner in comes]
    start_messages(ring, [(rank, sums[owner]) for rank, owner in sends], rooms).wait()
    parts: dict[int, dict[int, Tensor]] = {}  # by owner, and by rank
    for (_, owner), (rank, room) in zip(comes, rooms):
        parts.setdefault(owner, {ring.rank: sums[owner]})[rank] = room
    for owner, by_rank in parts.items():
        sums[owner] = sum_parts([by_rank[rank] for rank in sorted(by_rank)])


def _stacked(x: Tensor, ring: Ring, ranks: Sequence[int]) -> Tensor:
    """Return the x of all `ranks`, stacked; this rank is one of them, and each gets its x."""
    x, mine = x.contiguous(), ring.rank
    found = x.new_empty((len(ranks), *x.shape))
    transfer = ring.exchange(
        [(rank, x) for rank in ranks if rank != mine],
        [(rank, room) for rank, room in zip(ranks, found.unbind()) if rank != mine],
    )
    found[ranks.index(mine)] = x
    transfer.wait()
    return found


def start_messages(ring: Ring, sends: Messages, receives: Messages) -> Exchange:
    """Send tensors to ranks and receive others, but for empty ones: both ranks know which are."""
    return ring.exchange(
        [(rank, t.contiguous()) for rank, t in sends if t.numel()],
        [(rank, t) for rank, t in receives if t.numel()],
    )
