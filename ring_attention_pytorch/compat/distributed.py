"""Functions of 0.5.20 that gather all ranks' tensors.

Ranks are the default group's at the time of a call, or this process alone. All ranks must make
the same calls, and check that their arguments agree before they send. As everywhere in this
library, backward differentiates the sum of all ranks' results, and each rank's tensors are
separate variables.
"""

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ring_attention_pytorch.arguments import checked, checks_of
from ring_attention_pytorch.comm.collectives import all_gather_along
from ring_attention_pytorch.ranks.agreement import Check, agree, error_of, report_to_group, typed
from ring_attention_pytorch.ranks.ring import Caller, Ring


@checked
def get_rank() -> int:
    """Return this process' rank in the default group; 0 without a group."""
    return Ring().rank


@checked
def get_world_size() -> int:
    """Return the number of ranks of the default group; 1 without a group."""
    return Ring().size


@checked
def is_distributed() -> bool:
    """Return True if there are other ranks."""
    return get_world_size() > 1


@checked
def pad_dim_to(t: Tensor, length: int, dim: int = 0) -> Tensor:
    """Pad t with zeros at its end along dim, up to a length.

    >>> pad_dim_to(torch.ones(1, 2), 3, dim=1)
    tensor([[1., 1., 0.]])
    """
    with checks_of("pad_dim_to"):
        _check_dim(t, dim)
        if length < t.shape[dim]:
            raise ValueError(f"length must be at least t's {t.shape[dim]}, got {length}")
    behind = t.ndim - 1 - dim % t.ndim
    return F.pad(t, (*(0, 0) * behind, 0, length - t.shape[dim]))


@checked
def has_only_one_value(t: Tensor) -> bool:
    """Return True if all elements of t are equal."""
    return bool((t == t.flatten()[:1]).all())


@typed(report_to_group("gather_sizes"))
def gather_sizes(t: Tensor, *, dim: int) -> Tensor:
    """Gather every rank's length of t along dim, int64 `[ranks]`; t itself is not sent."""
    error = error_of(partial(_check_dim, t, dim))
    own = {} if error else {"length": t.shape[dim]}
    notes = agree(Ring(), "gather_sizes", {}, own, check=error)
    return torch.tensor([note["length"] for note in notes], device=t.device)


@typed(report_to_group("all_gather"))
def all_gather_same_dim(t: Tensor) -> list[Tensor]:
    """Gather every rank's t, all of one shape, as a list by rank."""
    return list(all_gather(t.unsqueeze(0))[0])


@typed(report_to_group("all_gather"))
def all_gather_variable_dim(
    t: Tensor, dim: int = 0, sizes: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gather every rank's t, and concatenate them along dim in rank order.

    Args:
        t: any tensor, also bool; its length along dim can differ between ranks, and can be 0.
        sizes: these lengths, `[ranks]`, if they are known; they are checked.

    Returns:
        The whole tensor, the same on every rank, and the lengths, int64 `[ranks]`. Backward sums
        all ranks' gradients of a rank's t, on that rank (0.5 took the rank's own gradient alone).

    Raises:
        ValueError: t differs in more than this length, or sizes are wrong; on every rank.

    >>> whole, sizes = all_gather_variable_dim(torch.ones(3, 2))
    >>> whole.shape, sizes.tolist()
    (torch.Size([3, 2]), [3])
    """
    return gather_as("all_gather", t, dim, sizes)


all_gather = all_gather_variable_dim
AllGatherFunction = SimpleNamespace(apply=all_gather)


class AllGather(nn.Module):
    """A module for `all_gather_variable_dim` along dim: (x, sizes) -> (whole tensor, sizes)."""

    @checked
    def __init__(self, *, dim: int = 0):
        super().__init__()
        self.dim = dim

    @typed(report_to_group("all_gather"))
    def forward(self, x: Tensor, sizes: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return all_gather(x, self.dim, sizes)


@checked
def split_by_rank(x: Tensor | Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return this rank's part `x[rank]` of an x that all ranks have, and every part's length.

    Args:
        x: a tensor `[ranks, n, ...]`, or a tensor `[n, ...]` for each rank.

    Returns:
        This rank's part, and the n of each part, int64 `[ranks]`. Nothing is sent, and backward is
        the backward of indexing: here the gradient of other ranks' parts is 0. The owners have
        it, and the function that gathered x, or a sum over ranks as by DDP, adds it. Gathering it
        here as well would count it once per rank.

    Raises:
        ValueError: the number of parts is not the number of ranks.

    >>> split_by_rank(torch.ones(1, 3, 2))[1].tolist()
    [3]
    """
    ring = Ring()
    if x.ndim < 2 if isinstance(x, Tensor) else any(part.ndim < 1 for part in x):
        raise ValueError("split_by_rank: x must be [ranks, n, ...], or a tensor [n, ...] for each")
    if len(x) != ring.size:
        raise ValueError(f"split_by_rank needs a part for each of {ring.size} ranks, got {len(x)}")
    mine = x[ring.rank]
    return mine, torch.tensor([part.shape[0] for part in x], device=mine.device)


def gather_as(
    caller: str, t: Tensor, dim: int, sizes: Tensor | None = None, check: Check | None = None
) -> tuple[Tensor, Tensor]:
    """Gather like `all_gather_variable_dim`, but first run the caller's `check`."""
    ring, same, own = Ring(), same_of(t), {}
    lengths = None if sizes is None else sizes.flatten().tolist()
    error = error_of(check) or error_of(partial(_check_parts, t, dim, ring, lengths))
    if error is None:
        dim = dim % t.ndim
        before, after = list(t.shape[:dim]), list(t.shape[dim + 1 :])
        same |= {"the rest of the shape": before + after, "sizes": lengths}
        own["length"] = t.shape[dim]
    lengths = [note["length"] for note in agree(ring, caller, same, own, check=error)]
    whole = all_gather_along(dim, t, lengths, Caller(ring, caller, 0))
    return whole, torch.tensor(lengths, device=t.device)


def _check_parts(t: Tensor, dim: int, ring: Ring, sizes: list[int] | None) -> None:
    """Raise ValueError if t has no such dim, or the ranks' lengths along it are not `sizes`."""
    _check_dim(t, dim)
    if sizes is not None and (len(sizes) != ring.size or sizes[ring.rank] != t.shape[dim]):
        raise ValueError(f"sizes must be every rank's length along dim, got {sizes}")


def _check_dim(t: Tensor, dim: int) -> None:
    if not -t.ndim <= dim < t.ndim:
        raise ValueError(f"t {list(t.shape)} has no dimension {dim}")


def same_of(t: Tensor) -> dict[str, Any]:
    """Return properties of t that must be the same on all ranks to send and differentiate it."""
    grad = torch.is_grad_enabled() and t.requires_grad
    return {"dtype": t.dtype, "device": t.device.type, "requires_grad": grad}
