"""Everyone's tensors, gathered, as 0.5.20 had them.

Ranks are those of the default group, or this process alone, asked for anew in each call. All
ranks call the same, and compare notes before they send. Backward differentiates the sum of every
rank's result, each rank's tensors being separate variables, as everywhere in this library.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ring_attention_pytorch.comm.agreement import agree, told_by_group, typed
from ring_attention_pytorch.comm.ring import Ring
from ring_attention_pytorch.nn.sharding import _Gather


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
    ring, same, own = Ring(), same_of(t), {}
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


def same_of(t: Tensor) -> dict[str, Any]:
    """What ranks must have alike, beside shapes, of what they exchange and differentiate."""
    grad = torch.is_grad_enabled() and t.requires_grad
    return {"dtype": t.dtype, "device": t.device.type, "requires_grad": grad}
