"""Collectives of a ring, differentiable any number of times, in reverse and in forward mode.

                         rank 0      rank 1      rank 2         gradients come back by
    all_to_all           a0 a1 a2    b0 b1 b2    c0 c1 c2
                      -> a0 b0 c0    a1 b1 c1    a2 b2 c2       all_to_all
    all_gather           a           b           c
                      -> a  b  c     a  b  c     a  b  c        sum_on_owners
    sum_on_owners        a0 a1 a2    b0 b1 b2    c0 c1 c2
                      -> a0+b0+c0    a1+b1+c1    a2+b2+c2       all_gather
    sum_over_ranks,      a           b           c
    all_reduce        -> a+b+c       a+b+c       a+b+c          the same sum
    replicated           a           a           a
                      -> a           a           a              sum_over_ranks

All are linear, so one autograd Function serves them: tangents go there, gradients go back. Each
function takes the `Caller` whose call it makes, and a backward makes that caller's.

Convention of gradients: backward differentiates the sum of every rank's result, where each rank's
tensors are separate variables.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
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
Way = Callable[[Sequence[Tensor], Caller], Sequence[Tensor]]


class _Linear(Function):
    """(there, back, caller, tensors) -> results of `there`; see `linear`."""

    @staticmethod
    def forward(there: Way, back: Way, caller: Caller, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(there(tensors, caller))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.there, ctx.back, caller, *_ = inputs
        ctx.caller = caller.back()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *ctx.back(grads, ctx.caller)

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, ___: None, *along: Tensor) -> tuple[Tensor, ...]:
        return _Linear.apply(ctx.there, ctx.back, ctx.caller, *along)


def linear(there: Way, back: Way, tensors: Sequence[Tensor], caller: Caller) -> tuple[Tensor, ...]:
    """Send tensors `there`, a linear map of all ranks' tensors; gradients go `back`.

    Args:
        there: sends tensors within a call of the caller that it gets; not differentiable.
        back: the transpose of `there`, differentiable.
        tensors: of this rank.
        caller: who sends them.
    """
    return _Linear.apply(there, back, caller, *tensors)


def all_to_all(
    pieces: Sequence[Tensor], shapes: Sequence[Shape], caller: Caller
) -> tuple[Tensor, ...]:
    """Send piece i to rank i, and return the piece from each, of `shapes[i]`."""
    if caller.ring.size == 1:
        return tuple(pieces)
    given = [piece.shape for piece in pieces]

    def back(grads: Sequence[Tensor], caller: Caller) -> Sequence[Tensor]:
        return all_to_all(grads, given, caller)

    return linear(partial(_swap, shapes), back, pieces, caller)


def all_gather(x: Tensor, shapes: Sequence[Shape], caller: Caller) -> tuple[Tensor, ...]:
    """Return every rank's x, in the order of ranks, of `shapes[i]`."""
    if caller.ring.size == 1:
        return (x,)
    return linear(partial(_gather, shapes), sum_on_owners, [x], caller)


def sum_on_owners(pieces: Sequence[Tensor], caller: Caller) -> tuple[Tensor, ...]:
    """Send piece i to rank i, and return the sum of those for this rank, as a sequence of one."""
    if caller.ring.size == 1:
        return tuple(pieces)
    shapes = [piece.shape for piece in pieces]

    def back(grads: Sequence[Tensor], caller: Caller) -> Sequence[Tensor]:
        return all_gather(grads[0], shapes, caller)

    return linear(_sum_on_owners, back, pieces, caller)


def sum_over_ranks(tensors: Sequence[Tensor], caller: Caller) -> tuple[Tensor, ...]:
    """Sum all ranks' tensors, each of one shape, in one message, so that all get the same bits."""
    if caller.ring.size == 1:
        return tuple(tensors)
    return linear(_sum, sum_over_ranks, tensors, caller)


def replicated(tensors: Sequence[Tensor], caller: Caller) -> tuple[Tensor, ...]:
    """Return tensors that all ranks hold alike, whose gradients are sums over ranks.

    Forward sends nothing, but its call has a number, which the backward's says.
    """
    if caller.ring.size == 1:
        return tuple(tensors)
    return linear(_same, sum_over_ranks, tensors, caller)


def all_reduce(tensors: Sequence[Tensor], caller: Caller) -> tuple[Tensor, ...]:
    """Sum tensors, floating, over the ring's whole group, each by an all-reduce."""
    return linear(_total, all_reduce, tensors, caller.of_group)


def all_gather_along(dim: int, x: Tensor, lengths: Iterable[int], caller: Caller) -> Tensor:
    """Return every rank's x, of `lengths[i]` along dim, joined there; else as `all_gather`."""
    dim = dim % x.ndim
    shapes = [(*x.shape[:dim], length, *x.shape[dim + 1 :]) for length in lengths]
    return torch.cat(all_gather(x, shapes, caller), dim)


def exchange_rows(
    pieces: Sequence[Tensor], lands: Sequence[Tensor], caller: Caller
) -> tuple[Tensor, ...]:
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


def fill_in(rows: Tensor, counts: Sequence[int], caller: Caller) -> None:
    """Receive the other ranks' rows beside this rank's own; no gradient.

    Args:
        rows: `[sum of counts, ...]`, of all ranks in order.
        counts: the rows of each rank.
        caller: who makes the call.
    """
    if caller.ring.size > 1:
        _fill(rows.split(list(counts)), caller)


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


def _gather(shapes: Sequence[Shape], own: Sequence[Tensor], caller: Caller) -> list[Tensor]:
    """Return every rank's own tensor, of this rank a view."""
    parts = _rooms(own[0].contiguous(), caller.ring, shapes)
    _fill(parts, caller)
    return parts


def _sum(tensors: Sequence[Tensor], caller: Caller) -> list[Tensor]:
    """Return the sums over ranks of each tensor, by one message."""
    ring, flat = caller.ring, torch.cat([t.flatten() for t in tensors])
    wide = flat.to(wire_dtype(flat.dtype))
    machines = merging_machines(ring.machines, wide.nbytes)
    with caller.call():
        parts = gather_to_merge(wide, ring, machines, lambda near: sum_parts(near.unbind()))
    sums = sum_parts(parts.unbind()).to(flat.dtype).split([t.numel() for t in tensors])
    return [total.view(t.shape) for total, t in zip(sums, tensors)]


def _same(tensors: Sequence[Tensor], caller: Caller) -> list[Tensor]:
    with caller.call():
        return [t.view_as(t) for t in tensors]


def _total(tensors: Sequence[Tensor], caller: Caller) -> list[Tensor]:
    return [caller.total(t) for t in tensors]


def _rooms(own: Tensor, ring: Ring, shapes: Sequence[Shape]) -> list[Tensor]:
    """Return memory for every rank's tensor, of this rank a view of `own`."""
    return [
        own.view_as(own) if rank == ring.rank else own.new_empty(shape)
        for rank, shape in enumerate(shapes)
    ]


def _fill(parts: Sequence[Tensor], caller: Caller) -> None:
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


def _sum_on_owners(pieces: Sequence[Tensor], caller: Caller) -> list[Tensor]:
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
    return [sums[ring.rank].to(pieces[ring.rank].dtype)]


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
