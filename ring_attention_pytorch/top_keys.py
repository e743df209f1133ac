"""`top_keys`: the keys with the best scores of all ranks' keys, exactly, whatever the ring is.

    each rank    its own keys' k best            [..., k]
    all ranks    the k best of P * k candidates  [..., k], the same on every rank

A key among the k best of all is among the k best of its rank. Ties go to the earlier position, so
neither the number of ranks nor the layout changes the choice.
"""

import os
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ring_attention_pytorch.comm.collectives import all_gather_along
from ring_attention_pytorch.ranks.agreement import agree, raise_together, report_to_group, typed
from ring_attention_pytorch.ranks.ring import Caller, Group, as_ring

_CALLER = "top_keys"
_FEW = 32  # of so many, a pass for each takes less time than sorting


@typed(report_to_group(_CALLER), apart=True)
def top_keys(
    scores: Tensor, positions: Tensor, k: int, *, group: Group = None
) -> tuple[Tensor, Tensor]:
    """Choose the k best of all ranks' keys, for queries that all ranks have.

    For attention that scores cheaply and attends to few: the queries' scores of this rank's keys
    are local, and only k candidates of each rank are exchanged.

    Args:
        scores: `[..., m]`, scores of this rank's m keys, for the same queries on all ranks. -inf
            hides a key.
        positions: int64 `[m]`, the keys' positions in the whole sequence, each on one rank.
        k: how many are chosen, at least 1.
        group: the ring; None is the default group, or this process alone.

    Returns:
        The best scores `[..., k]`, descending, and their positions, int64 `[..., k]`: the same on
        all ranks. Where fewer keys are visible the rest is -inf, at position -1. Of equal scores
        the earlier position is first; NaN comes before all numbers. Scores are differentiable:
        backward sums all ranks' gradients of a score on its owner. Positions have no gradient.

    Raises:
        ValueError: shapes don't fit one another, or differ between ranks, or a candidate's position
            is negative or another's, too; on all ranks. On GPUs, where the host would wait,
            positions are compared only with RING_ATTENTION_CHECK=always.

    Source: DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, section 2.1

    >>> top_keys(torch.tensor([[1.0, 3.0, 3.0]]), torch.tensor([4, 9, 7]), 2)
    (tensor([[3., 3.]]), tensor([[7, 9]]))
    """
    ring = as_ring(group)
    compares = not scores.is_cuda or os.environ.get("RING_ATTENTION_CHECK") == "always"
    same: dict[str, Any] = {
        "queries of scores": [*scores.shape[:-1]],
        "dtype": scores.dtype,
        "device": scores.device.type,
        "k": k,
        "whether positions are compared": compares,
        "requires_grad of scores": scores.requires_grad and torch.is_grad_enabled(),
    }
    held = {"m": scores.shape[-1] if scores.ndim else 0}
    ranks = agree(ring, _CALLER, same, held, lambda: _check(scores, positions, k))
    order = positions.argsort(stable=True)
    found, at = _best(scores[..., order], positions[order].expand(scores.shape), k)
    counts = [min(k, rank["m"]) for rank in ranks]
    caller = Caller(ring, _CALLER, 0)
    candidates = all_gather_along(-1, found, counts, caller)
    places = all_gather_along(-1, at.contiguous(), counts, caller)
    if compares:
        raise_together(ring, _CALLER, partial(_check_places, candidates.detach(), places))
    order = places.argsort(dim=-1, stable=True)
    found, at = _best(candidates.gather(-1, order), places.gather(-1, order), k)
    missing = k - found.shape[-1]
    found = torch.nn.functional.pad(found, (0, missing), value=-torch.inf)
    at = torch.nn.functional.pad(at, (0, missing), value=-1)
    return found, at.masked_fill(found.detach() == -torch.inf, -1)


def _best(scores: Tensor, positions: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k best and their positions; of equal ones the first."""
    values, order = best_of(scores.detach(), k)
    found = scores.gather(-1, order).masked_fill(values == -torch.inf, -torch.inf)
    return found, positions.gather(-1, order)


def best_of(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k best of a row, at most all, in descending order, and their indices.

    Of equal scores the first comes first, which `torch.topk` leaves open. NaN is the best, as in
    `torch.sort`. Rows of fewer than k scores above -inf end with -inf, and any index.

    >>> best_of(torch.tensor([1.0, 3.0, 2.0, 3.0]), 3)
    (tensor([3., 3., 2.]), tensor([1, 3, 2]))
    """
    k = min(k, scores.shape[-1])
    if k > _FEW:
        return _by_threshold(scores, k)
    left = scores.clone()
    values = scores.new_empty(*scores.shape[:-1], k)
    order = torch.empty(values.shape, dtype=torch.int64, device=scores.device)
    for i in range(k):
        found, at = left.max(-1)  # of equal ones the first
        values[..., i], order[..., i] = found, at
        left.scatter_(-1, at[..., None], -torch.inf)
    return values, order


def among_best(scores: Tensor, k: int) -> Tensor:
    """Return whether each score of a row is among its k best; of equal ones the first.

    NaN is the best.

    >>> among_best(torch.tensor([1.0, 3.0, 2.0, 2.0]), 2).tolist()
    [False, True, True, False]
    """
    least = scores.topk(k, dim=-1).values[..., -1:]
    nan = least.isnan()
    above = ~((scores <= least) | nan)
    equal = (scores == least) | (scores.isnan() & nan)
    return above | (equal & (equal.cumsum(-1) <= k - above.sum(-1, keepdim=True)))


def _by_threshold(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Do the same for many: all above the k-th, and the first that equal it."""
    taken = among_best(scores, k)
    place = torch.where(taken, taken.cumsum(-1) - 1, k)  # the others land behind
    at = torch.arange(scores.shape[-1], device=scores.device).expand(place.shape)
    chosen = at.new_zeros(*place.shape[:-1], k + 1).scatter_(-1, place, at)[..., :k]
    values, inner = scores.gather(-1, chosen).sort(dim=-1, descending=True, stable=True)
    return values, chosen.gather(-1, inner)


def _check_places(scores: Tensor, places: Tensor) -> None:
    """Raise ValueError unless a query's visible candidates have different positions, from 0."""
    visible = scores != -torch.inf
    ordered = places.masked_fill(~visible, -1).sort(dim=-1).values
    later = ordered[..., 1:]
    twice = later[(later == ordered[..., :-1]) & (later >= 0)]
    if len(wrong := torch.cat((places[visible & (places < 0)], twice))):
        at = int(wrong[0])
        raise ValueError(
            f"positions must be from 0, each of one key on one rank, got {at}"
            f"{' twice' if at >= 0 else ''}; pass those in the whole sequence"
        )


def _check(scores: Tensor, positions: Tensor, k: int) -> None:
    for name, t in (("scores", scores), ("positions", positions)):
        if t.layout != torch.strided or t.is_meta or hasattr(t, "to_local"):
            raise ValueError(
                f"{name} must be dense and have values, no DTensor, got {type(t).__name__}, "
                f"{t.layout} on {t.device}; pass this rank's part"
            )
    if scores.ndim < 1 or not scores.is_floating_point() or scores.itemsize < 2:
        raise ValueError(
            "scores must be floating [..., m] of 16, 32 or 64 bits, "
            f"got {scores.dtype} {list(scores.shape)}"
        )
    if positions.dtype != torch.int64 or list(positions.shape) != [scores.shape[-1]]:
        raise ValueError(
            f"positions must be int64 [{scores.shape[-1]}], one for each key, "
            f"got {positions.dtype} {list(positions.shape)}"
        )
    if positions.device != scores.device:
        raise ValueError(f"positions must be on {scores.device}, got {positions.device}")
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
