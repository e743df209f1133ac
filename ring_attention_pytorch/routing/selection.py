"""Choice of routed tokens: the k best of a sequence or of each window, or a causal choice.

Every rank has all ranks' scores, by position, and computes the same choice on any ring; ties go to
the earlier token.
"""

import math
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from ring_attention_pytorch.ranks.agreement import report_to_group, typed
from ring_attention_pytorch.ranks.ring import Group
from ring_attention_pytorch.routing.plan import RoutingPlan
from ring_attention_pytorch.routing.soft_topk import Count, check_count, counts


class Selection(NamedTuple):
    """The chosen tokens, ascending within their window; -1 for slots that stay empty.

    All are int64 `[..., W * K]`: positions in the whole sequence, the ranks that own them, and
    the places among the owners' tokens.
    """

    positions: Tensor
    ranks: Tensor
    places: Tensor


def windows(x: Tensor, size: int, fill: float | bool) -> Tensor:
    """Cut x `[..., N]` into windows `[..., W, size]`; pad the last one with `fill`."""
    missing = -x.shape[-1] % size
    if missing:
        padding = x.new_full((*x.shape[:-1], missing), fill)
        x = torch.cat((x, padding), -1)
    return rearrange(x, "... (w size) -> ... w size", size=size)


def slots(k: float | Any, size: int) -> int:
    """Return the most tokens that are chosen from a window of `size` tokens."""
    return min(k, size) if isinstance(k, int) else math.ceil(k * size - 1e-9)


def best(scores: Tensor, count: Tensor, most: int) -> Tensor:
    """Choose the `count` `[..., W]` best scores `[..., W, size]`; positions `[..., W * most]`."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    rank = torch.arange(most, device=scores.device)
    chosen = rank < count.unsqueeze(-1)
    return _ascending(order[..., :most], chosen, scores.shape[-1])


def causal_choice(scores: Tensor, real: Tensor, count: Tensor, most: int) -> Tensor:
    """Choose tokens by their own score and earlier ones; return positions `[..., W * most]`.

    A token is chosen if its score would be among the `count` best of the window before its own,
    until its own window has `most`. None is chosen in the first window: there is none before it.
    """
    size = scores.shape[-1]
    ordered = scores.sort(-1, descending=True).values
    last = count.long() - 1
    last = last.clamp(min=0).unsqueeze(-1)
    least = ordered.gather(-1, last).squeeze(-1)  # [..., W]
    known = real.sum(-1)
    least = least.masked_fill(count >= known, -torch.inf)
    least = least.masked_fill(known == 0, torch.inf)
    never = torch.full_like(least[..., :1], torch.inf)
    least = torch.cat((never, least[..., :-1]), -1).unsqueeze(-1)
    chosen = real & (scores >= least) & (least < torch.inf)
    places = torch.arange(size, device=scores.device).expand(chosen.shape)
    # chosen places first, in order; places beyond `most` are dropped
    places = places.masked_fill(~chosen, size).sort(-1).values
    places = places[..., :most]
    return _ascending(places, places < size, size)


def _ascending(places: Tensor, chosen: Tensor, size: int) -> Tensor:
    """Turn places in windows into ascending positions, -1 where not chosen."""
    places = places.masked_fill(~chosen, size).sort(-1).values
    starts = torch.arange(places.shape[-2], device=places.device) * size
    positions = places + starts.unsqueeze(-1)
    return positions.masked_fill(places == size, -1).flatten(-2)


@typed(report_to_group("select_topk"))
def select_topk(
    scores: Tensor,
    k: Count,
    *,
    mask: Tensor | None = None,
    layout: str = "contiguous",
    group: Group = None,
) -> Selection:
    """Choose the k largest scores of a sequence over a ring; ties go to the earlier token.

    Args:
        scores: `[b, n]`, the scores of this rank's tokens.
        k: int, a number; float in (0, 1], a share of each sample's real tokens, rounded up.
        mask: bool `[b, n]`, True where a token is real; others are never chosen.
        layout: which tokens a rank holds.
        group: the ring; None is the default group.

    Returns:
        The choice, the same on every rank and for every ring size and layout. It has min(k, N)
        slots, or the share k of N. A sample with fewer real tokens has -1 in its last slots.

    Raises:
        ValueError: an argument is invalid, or differs between ranks; on every rank.

    >>> select_topk(torch.tensor([[1.0, 3.0, 2.0, 3.0]]), 2).positions.tolist()
    [[1, 3]]
    """

    def check() -> None:
        if scores.ndim != 2:
            raise ValueError(f"scores must be [batch, tokens], got {list(scores.shape)}")
        if isinstance(k, Tensor):
            raise ValueError("k must be an int or a float here")
        check_count("k", k)

    plan = RoutingPlan.make(
        scores.unsqueeze(-1), mask, layout=layout, group=group, caller="select_topk",
        also={"k": k}, check=check,
    )  # fmt: skip
    with torch.no_grad():
        whole = plan.whole(scores)
        whole = whole.masked_fill(~plan.real, -torch.inf)
        size = max(plan.length, 1)
        real = windows(plan.real, size, False).sum(-1)
        whole = windows(whole, size, -torch.inf)
        positions = best(whole, counts(k, real), slots(k, plan.length))
        return Selection(positions, *plan.homes(positions))
