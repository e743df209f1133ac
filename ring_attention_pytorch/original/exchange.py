"""Of `distributed` and `ring`: everyone's tensors, and those of a neighbour.

Ranks are those of the default group, or this process alone, asked for anew in each call. All
ranks call the same, and compare notes before they send. Backward differentiates the sum of every
rank's result, each rank's tensors being separate variables, as everywhere in this library.
"""

from collections import namedtuple
from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from ring_attention_pytorch.agreement import agree, raise_together, told_by_group, typed
from ring_attention_pytorch.ring import Ring
from ring_attention_pytorch.sharding import _Gather

Some = tuple[Tensor | None, ...]
RingInfo = namedtuple("RingInfo", ["ring_rank", "iter_info"])


def get_rank() -> int:
    """This process' rank in the default group; 0 without one."""
    return Ring().rank


def get_world_size() -> int:
    """How many ranks the default group has; 1 without one."""
    return Ring().size


def is_distributed() -> bool:
    """Whether there are other ranks."""
    return get_world_size() > 1


def has_only_one_value(t: Tensor) -> bool:
    """Whether all elements are equal."""
    return bool((t == t.flatten()[:1]).all())


@typed(told_by_group("gather_sizes"))
def gather_sizes(t: Tensor, *, dim: int) -> Tensor:
    """Every rank's length along dim, int64 `[ranks]`; t itself is not sent."""
    problem = _dim_problem(t, dim)
    own = {} if problem else {"length": t.shape[dim]}
    found = agree(Ring(), "gather_sizes", {}, own, problem)
    return torch.tensor([each["length"] for each in found], device=t.device)


def all_gather_same_dim(t: Tensor) -> list[Tensor]:
    """Every rank's t, in the order of ranks, all of one shape; otherwise as `all_gather`."""
    return list(all_gather(t.unsqueeze(0))[0])


@typed(told_by_group("all_gather_variable_dim"))
def all_gather_variable_dim(
    t: Tensor, dim: int = 0, sizes: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Every rank's t along dim, one after another in the order of ranks.

    Args:
        t: any tensor, bool too; ranks may differ in its length along dim, which may be 0.
        sizes: these lengths, `[ranks]`, where they are known: they are compared.

    Returns:
        The whole, the same on every rank, and the lengths, int64 `[ranks]`. Its backward brings
        every rank's gradient of my t to me and sums them (0.5 took a rank's own alone).

    Raises:
        ValueError: t differs otherwise, or sizes are wrong; on all ranks alike.

    >>> whole, sizes = all_gather_variable_dim(torch.ones(3, 2))
    >>> whole.shape, sizes.tolist()
    (torch.Size([3, 2]), [3])
    """
    return gather_as("all_gather", t, dim, sizes)


all_gather = all_gather_variable_dim
AllGatherFunction = SimpleNamespace(apply=all_gather)


class AllGather(nn.Module):
    """`all_gather` along dim, as a module: of x and sizes to the whole and sizes."""

    def __init__(self, *, dim: int = 0):
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor, sizes: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return all_gather(x, self.dim, sizes)


def split_by_rank(x: Tensor | Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """This rank's own of what all ranks have alike: `x[rank]`, and every rank's length.

    Args:
        x: a tensor `[ranks, n, ...]`, or a tensor `[n, ...]` for each rank.

    Returns:
        This rank's, and the n of each, int64 `[ranks]`. Nothing is sent, and backward is that of
        indexing: the gradient of others' parts is 0 here. They have it, and what gathered x, or
        a sum over ranks as by DDP, adds it. (To gather it here, too, would count it once a rank.)

    Raises:
        ValueError: x is not of as many parts as ranks.

    >>> split_by_rank(torch.ones(1, 3, 2))[1].tolist()
    [3]
    """
    ring = Ring()
    if len(x) != ring.size:
        raise ValueError(f"split_by_rank needs a part for each of {ring.size} ranks, got {len(x)}")
    mine = x[ring.rank]
    return mine, torch.tensor([part.shape[0] for part in x], device=mine.device)


def gather_as(
    caller: str, t: Tensor, dim: int, sizes: Tensor | None = None, problem: str | None = None
) -> tuple[Tensor, Tensor]:
    """`all_gather` for others, who say what they found wrong by themselves."""
    ring, same, own = Ring(), _note(t), {}
    problem = problem or _dim_problem(t, dim)
    if problem is None:
        dim = dim % t.ndim
        same["the rest of the shape"] = [*t.shape[:dim], *t.shape[dim + 1 :]]
        own["length"] = t.shape[dim]
    if problem is None and sizes is not None:
        same["sizes"] = told = sizes.tolist()
        if len(told) != ring.size or told[ring.rank] != t.shape[dim]:
            problem = f"sizes must be every rank's length along dim, got {told}"
    found = [each["length"] for each in agree(ring, caller, same, own, problem)]
    whole = [t]
    if ring.size > 1:
        shapes = [(*t.shape[:dim], n, *t.shape[dim + 1 :]) for n in found]
        whole = _Gather.apply(t, ring, shapes)
    return torch.cat(whole, dim), torch.tensor(found, device=t.device)


def _dim_problem(t: Tensor, dim: int) -> str | None:
    return None if -t.ndim <= dim < t.ndim else f"t {list(t.shape)} has no dimension {dim}"


def _note(t: Tensor) -> dict[str, Any]:
    """What ranks must have alike, beside shapes, of what they exchange and differentiate."""
    grad = torch.is_grad_enabled() and t.requires_grad
    return {"dtype": t.dtype, "device": t.device.type, "requires_grad": grad}


def circular_index_right(pos: int, ring_size: int, num: int = 1) -> int:
    """The place so many to the right."""
    if ring_size < 1:
        raise ValueError(f"ring_size must be at least 1, got {ring_size}")
    return (pos + num) % ring_size


def circular_index_left(pos: int, ring_size: int, num: int = 1) -> int:
    """The place so many to the left."""
    return circular_index_right(pos, ring_size, -num)


def circular_rank_right(rank: int | None = None, ring_size: int | None = None, num: int = 1) -> int:
    """The rank so many to the right of one, or of this, in its ring of consecutive ranks.

    >>> circular_rank_right(7, ring_size=4), circular_rank_left(4, ring_size=4)
    (4, 7)
    """
    rank = get_rank() if rank is None else rank
    size = get_world_size() if ring_size is None else ring_size
    place = circular_index_right(rank, size, num)
    return rank - rank % size + place


def circular_rank_left(rank: int | None = None, ring_size: int | None = None, num: int = 1) -> int:
    """The rank so many to the left."""
    return circular_rank_right(rank, ring_size, -num)


@typed(told_by_group("send_and_receive_"))
def send_and_receive_(
    x: Tensor, receive_buffer: Tensor, send_to_rank: int, receive_from_rank: int
) -> None:
    """Send x to a rank, and receive another rank's into the buffer. Not differentiable.

    Raises:
        ValueError: shapes or dtypes differ, or a rank expects what none sends; on all ranks alike.
        RingError: the exchange has failed.
    """
    ring, caller = Ring(), "send_and_receive_"
    same, problem = {"shape": list(x.shape), "dtype": x.dtype}, _buffer_problem(x, receive_buffer)
    own = {"to": send_to_rank, "from": receive_from_rank}
    told = [tuple(each.values()) for each in agree(ring, caller, same, own, problem)]
    if sorted((at, to) for at, (to, _) in enumerate(told)) != sorted(
        (source, at) for at, (_, source) in enumerate(told)
    ):
        raise_together(ring, caller, f"who is sent to must receive; (to, from) of ranks are {told}")
    _exchange(ring, caller, x.detach(), receive_buffer, send_to_rank, receive_from_rank)


@typed(told_by_group("ring_pass"))
def ring_pass(
    num_ring_passes: int,
    x: Tensor,
    receive_buffer: Tensor | None = None,
    ring_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Pass x so many ranks to the right, at once, and get that of the rank so far to the left.

    Args:
        num_ring_passes: how many (0.5 always went one); to the left where negative.
        x: of one shape and dtype on all ranks.
        receive_buffer: where to receive, contiguous; None is new memory.
        ring_size: consecutive ranks that make one ring; None is all.

    Returns:
        What came, and x. Gradients of what came go back the way it came, so backward all ranks
        must have used it, or none.

    Raises:
        ValueError: what can't be, or differs between ranks, on all ranks alike.
        RingError: the exchange has failed.

    >>> ring_pass(1, torch.ones(2))
    (tensor([1., 1.]), tensor([1., 1.]))
    """
    ring, x = Ring(None, ring_size), x.contiguous()
    same = {"shape": list(x.shape), "num_ring_passes": num_ring_passes, **_note(x)}
    problem = None if receive_buffer is None else _buffer_problem(x, receive_buffer)
    agree(ring, "ring_pass", same, problem=problem)
    return _Pass.apply(x, receive_buffer, ring, num_ring_passes), x


one_ring_pass = partial(ring_pass, 1)


def null_ring_pass(
    *tensors: Tensor | None,
    max_iters: int | None = None,
    receive_buffers: Some | None = None,
    ring_size: int | None = None,
) -> Iterator[tuple[RingInfo, tuple[Some, Some]]]:
    """`all_ring_pass` of a ring that is this process alone: its own tensors, once."""
    yield RingInfo(0, (True, True)), (tensors, _for_each(receive_buffers, tensors))


def all_ring_pass(
    *tensors: Tensor | None,
    max_iters: int | None = None,
    receive_buffers: Some | None = None,
    ring_size: int | None = None,
) -> Iterator[tuple[RingInfo, tuple[Some, Some]]]:
    """Own tensors, then those of the rank to the left, of the next, and so on round the ring.

    Args:
        tensors: of one shape and dtype on all ranks, or None on all of them.
        max_iters: so many ranks' tensors at most, own ones included; None is the whole ring.
        receive_buffers: where to receive first, one for each tensor. Later passes have new memory,
            and the caller's tensors are never written (as they were by 0.5).
        ring_size: consecutive ranks that make one ring; None is all.

    Yields:
        `(ring_rank, (is_first, is_last)), (tensors, receive_buffers)`: whose they are, as a place
        in the ring, and buffers for the next pass. Gradients are as `ring_pass` says.

    Raises:
        ValueError, RingError: as `ring_pass`.

    >>> [(info, mine) for info, ((mine,), _) in all_ring_pass(torch.ones(1))]
    [(RingInfo(ring_rank=0, iter_info=(True, True)), tensor([1.]))]
    """
    ring, buffers = Ring(None, ring_size), _for_each(receive_buffers, tensors)
    total = max(1, min(ring.size, ring.size if max_iters is None else max_iters))
    for hop in range(total):
        place = circular_index_left(ring.rank, ring.size, hop)
        yield RingInfo(place, (hop == 0, hop == total - 1)), (tensors, buffers)
        if hop < total - 1:
            tensors = tuple(
                None if t is None else one_ring_pass(t, buffer, ring_size)[0]
                for t, buffer in zip(tensors, buffers, strict=True)
            )
            buffers = _for_each(None, tensors)


class _Pass(Function):
    """(x, buffer, ring, by) -> x of the rank so many to the left."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, buffer: Tensor | None, ring: Ring, by: int) -> Tensor:
        ctx.ring, ctx.by = ring, by
        if buffer is None:
            buffer = torch.empty_like(x)
        else:
            ctx.mark_dirty(buffer)
        to, source = ((ring.rank + way) % ring.size for way in (by, -by))
        _exchange(ring, "ring_pass", x, buffer, to, source)
        return buffer

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Pass.apply(grad.contiguous(), None, ctx.ring, -ctx.by), None, None, None


def _exchange(ring: Ring, call: str, x: Tensor, buffer: Tensor, to: int, source: int) -> None:
    if to == ring.rank:
        buffer.copy_(x)
        return
    with ring.call(call):
        ring.exchange([(to, x.contiguous())], [(source, buffer)]).wait()


def _buffer_problem(x: Tensor, buffer: Tensor) -> str | None:
    alike = (buffer.shape, buffer.dtype, buffer.device) == (x.shape, x.dtype, x.device)
    if alike and buffer.is_contiguous() and buffer.data_ptr() != x.data_ptr():
        return None
    return (
        f"receive_buffer must be other memory, contiguous, of x's {list(x.shape)} {x.dtype} on "
        f"{x.device}, got {list(buffer.shape)} {buffer.dtype} on {buffer.device}"
    )


def _for_each(buffers: Tensor | Some | None, tensors: Some) -> Some:
    return tuple(buffers) if isinstance(buffers, (tuple, list)) else (buffers,) * len(tensors)
