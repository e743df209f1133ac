"""Functions of 0.5.20 that pass tensors around a ring.

Ranks are the default group's at the time of a call, or this process alone. All ranks must make
the same calls, and check that their arguments agree before they send. As everywhere in this
library, backward differentiates the sum of all ranks' results, and each rank's tensors are
separate variables.
"""

from collections import namedtuple
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from ring_attention_pytorch.arguments import check_least, checked, checks_of
from ring_attention_pytorch.comm.collectives import all_to_all
from ring_attention_pytorch.distributed import (
    get_rank,
    get_world_size,
    is_distributed,
    same_of,
)
from ring_attention_pytorch.ranks.agreement import (
    agree,
    error_of,
    raise_together,
    report_to_group,
    typed,
)
from ring_attention_pytorch.ranks.ring import Caller, Ring

__all__ = [
    "RingInfo",
    "all_ring_pass",
    "circular_index_left",
    "circular_index_right",
    "circular_rank_left",
    "circular_rank_right",
    "get_rank",
    "get_world_size",
    "is_distributed",
    "null_ring_pass",
    "one_ring_pass",
    "ring_pass",
    "send_and_receive_",
]

Some = tuple[Tensor | None, ...]
RingInfo = namedtuple("RingInfo", ["ring_rank", "iter_info"])


@checked
def circular_index_right(pos: int, ring_size: int, num: int = 1) -> int:
    """Return the place `num` to the right of `pos` in a ring."""
    if ring_size < 1:
        raise ValueError(f"ring_size must be at least 1, got {ring_size}")
    return (pos + num) % ring_size


@checked
def circular_index_left(pos: int, ring_size: int, num: int = 1) -> int:
    """Return the place `num` to the left of `pos` in a ring."""
    return circular_index_right(pos, ring_size, -num)


@checked
def circular_rank_right(rank: int | None = None, ring_size: int | None = None, num: int = 1) -> int:
    """Return the rank `num` to the right of `rank`, or of this one, in its ring of ranks.

    A ring has `ring_size` consecutive ranks; None is all.

    >>> circular_rank_right(7, ring_size=4), circular_rank_left(4, ring_size=4)
    (4, 7)
    """
    rank = get_rank() if rank is None else rank
    size = get_world_size() if ring_size is None else ring_size
    place = circular_index_right(rank, size, num)
    return rank - rank % size + place


@checked
def circular_rank_left(rank: int | None = None, ring_size: int | None = None, num: int = 1) -> int:
    """Return the rank `num` to the left of `rank`, or of this one, in its ring of ranks."""
    return circular_rank_right(rank, ring_size, -num)


@typed(report_to_group("send_and_receive_"))
def send_and_receive_(
    x: Tensor, receive_buffer: Tensor, send_to_rank: int, receive_from_rank: int
) -> None:
    """Send x to a rank, and receive another rank's x in the buffer. Not differentiable.

    Raises:
        ValueError: shapes or dtypes differ, or sends and receives don't match; on every rank.
        RingError: the exchange has failed.
    """
    ring, caller = Ring(), "send_and_receive_"
    same = {"shape": list(x.shape), "dtype": x.dtype}
    own = {"to": send_to_rank, "from": receive_from_rank}
    notes = agree(ring, caller, same, own, check=partial(_check_buffer, x, receive_buffer))
    sends = {(rank, note["to"]) for rank, note in enumerate(notes)}
    receives = {(note["from"], rank) for rank, note in enumerate(notes)}
    if sends != receives:
        by_rank = [tuple(note.values()) for note in notes]
        error = ValueError(f"who is sent to must receive; (to, from) of ranks are {by_rank}")
        raise_together(ring, caller, check=error)
    received = _passed(x.detach(), send_to_rank, receive_from_rank, Caller(ring, caller, 0))
    receive_buffer.detach().copy_(received)


@typed(report_to_group("ring_pass"))
def ring_pass(
    num_ring_passes: int,
    x: Tensor,
    receive_buffer: Tensor | None = None,
    ring_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Send x `num_ring_passes` ranks to the right; receive from the rank as far to the left.

    Args:
        num_ring_passes: distance, in one exchange (0.5 always took 1); to the left if negative.
        x: a tensor of the same shape and dtype on all ranks.
        receive_buffer: where to receive, contiguous; None is new memory.
        ring_size: number of consecutive ranks that make one ring; None is all.

    Returns:
        The received tensor, and x. Backward sends gradients of the received tensor to its owner,
        so either all ranks must use it in backward, or none.

    Raises:
        ValueError: an argument is invalid, or differs between ranks; on every rank.
        RingError: the exchange has failed.

    >>> ring_pass(1, torch.ones(2))
    (tensor([1., 1.]), tensor([1., 1.]))
    """
    ring, x = Ring(None, ring_size), x.contiguous()
    same = {"shape": list(x.shape), "num_ring_passes": num_ring_passes, **same_of(x)}
    agree(ring, "ring_pass", same, check=partial(_check_buffer, x, receive_buffer))
    buffer = torch.empty_like(x) if receive_buffer is None else receive_buffer
    to, source = ((ring.rank + by) % ring.size for by in (num_ring_passes, -num_ring_passes))
    return buffer.copy_(_passed(x, to, source, Caller(ring, "ring_pass", 0))), x


one_ring_pass = partial(ring_pass, 1)


@checked
def null_ring_pass(
    *tensors: Tensor | None,
    max_iters: int | None = None,
    receive_buffers: Some | None = None,
    ring_size: int | None = None,
) -> Iterator[tuple[RingInfo, tuple[Some, Some]]]:
    """Yield the own tensors once, like `all_ring_pass` over a ring of this process alone."""
    with checks_of("null_ring_pass"):
        _check_passes(tensors, max_iters, receive_buffers, ring_size)
    return iter([(RingInfo(0, (True, True)), (tensors, _for_each(receive_buffers, tensors)))])


@typed(report_to_group("ring_pass"))
def all_ring_pass(
    *tensors: Tensor | None,
    max_iters: int | None = None,
    receive_buffers: Some | None = None,
    ring_size: int | None = None,
) -> Iterator[tuple[RingInfo, tuple[Some, Some]]]:
    """Yield the own tensors, then each other rank's, going around the ring to the left.

    Args:
        tensors: tensors of the same shape and dtype on all ranks, or None on all of them.
        max_iters: yield at most this many ranks' tensors, own ones included; None is all.
        receive_buffers: where the first pass receives, one for each tensor. Later passes use new
            memory, and the caller's tensors are never written (0.5 wrote them).
        ring_size: number of consecutive ranks that make one ring; None is all.

    Yields:
        `(ring_rank, (is_first, is_last)), (tensors, receive_buffers)`: the owner of the tensors, as
        a place in the ring, and the buffers of the next pass. Gradients are as for `ring_pass`.

    Raises:
        ValueError, RingError: as for `ring_pass`.

    >>> [(info, mine) for info, ((mine,), _) in all_ring_pass(torch.ones(1))]
    [(RingInfo(ring_rank=0, iter_info=(True, True)), tensor([1.]))]
    """
    if error := error_of(partial(_check_passes, tensors, max_iters, receive_buffers, ring_size)):
        agree(Ring(), "ring_pass", {}, check=error)
    return _passes(tensors, max_iters, receive_buffers, ring_size)


def _passes(
    tensors: Some, max_iters: int | None, receive_buffers: Some | None, ring_size: int | None
) -> Iterator[tuple[RingInfo, tuple[Some, Some]]]:
    ring, buffers = Ring(None, ring_size), _for_each(receive_buffers, tensors)
    total = min(ring.size, ring.size if max_iters is None else max_iters)
    for hop in range(total):
        place = circular_index_left(ring.rank, ring.size, hop)
        yield RingInfo(place, (hop == 0, hop == total - 1)), (tensors, buffers)
        if hop < total - 1:
            received = []
            for t, buffer in zip(tensors, buffers, strict=True):
                received.append(None if t is None else one_ring_pass(t, buffer, ring_size)[0])
            tensors = tuple(received)
            buffers = _for_each(None, tensors)


def _passed(x: Tensor, to: int, source: int, caller: Caller) -> Tensor:
    """Send x to one rank, and return that of another: an all-to-all of which one piece is real."""
    size = caller.ring.size
    pieces, shapes = [x.new_empty(0)] * size, [torch.Size([0])] * size
    pieces[to], shapes[source] = x, x.shape
    return all_to_all(pieces, shapes, caller)[source]


def _check_buffer(x: Tensor, buffer: Tensor | None) -> None:
    if buffer is None:
        return
    alike = (buffer.shape, buffer.dtype, buffer.device) == (x.shape, x.dtype, x.device)
    if not alike or not buffer.is_contiguous() or buffer.data_ptr() == x.data_ptr():
        raise ValueError(
            f"receive_buffer must be other memory, contiguous, of x's {list(x.shape)} {x.dtype} on "
            f"{x.device}, got {list(buffer.shape)} {buffer.dtype} on {buffer.device}"
        )


def _check_passes(
    tensors: Some, max_iters: int | None, buffers: Some | None, ring_size: int | None
) -> None:
    check_least(1, max_iters=max_iters, ring_size=ring_size)
    if (got := len(_for_each(buffers, tensors))) != len(tensors):
        raise ValueError(f"receive_buffers must be one for each of {len(tensors)}, got {got}")


def _for_each(buffers: Tensor | Some | None, tensors: Some) -> Some:
    return tuple(buffers) if isinstance(buffers, (tuple, list)) else (buffers,) * len(tensors)
