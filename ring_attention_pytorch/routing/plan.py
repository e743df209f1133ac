"""A plan that all routed layers of a batch share: each token's owner, and the mask."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ring_attention_pytorch.arguments import checked, checks_of, known_device
from ring_attention_pytorch.comm.collectives import all_gather_along
from ring_attention_pytorch.geometry.layouts import (
    Segments,
    all_segments,
    check_layout,
    count,
    segment_positions,
)
from ring_attention_pytorch.nn.sharding import ShardConfig, check_mask
from ring_attention_pytorch.plan.checks import DTYPES, check_shards
from ring_attention_pytorch.plan.placement import current
from ring_attention_pytorch.plan.plan_cache import PlanCache
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.ranks.agreement import (
    agree,
    error_of,
    raise_together,
    report_to_group,
    typed,
)
from ring_attention_pytorch.ranks.ring import Caller, Group, Ring, as_ring
from ring_attention_pytorch.runtime.uncopied import uncopied


@uncopied
@dataclass(frozen=True, eq=False)
class RoutingPlan:
    """A plan of a batch's sequence over a ring, agreed by all ranks; it serves all routed layers.

    Every rank knows the whole mask and the owner of every token, so all ranks choose the same
    tokens and know their owners. Attention plans are made once, on all ranks together, and cached
    here.

    Layers that get a plan check nothing between ranks: their arguments must be equal on all ranks.
    """

    ring: Ring
    layout: str
    segments: tuple[Segments, ...]
    mask: Tensor | None  # bool [b, n], of this rank's tokens
    real: Tensor  # bool [b, N], of all tokens by position
    order: Tensor  # int64 [N]: for each position, the token's place in the order of ranks
    number: int  # that all ranks have for it
    attention: PlanCache[RingPlan] = field(default_factory=PlanCache)

    @classmethod
    @typed(report_to_group("RoutingPlan"))
    def make(
        cls,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        layout: str = "contiguous",
        group: Group = None,
        caller: str = "RoutingPlan",
        also: Mapping[str, Any] | None = None,
        check: Callable[[], object] | None = None,
    ) -> "RoutingPlan":
        """Make the plan for this rank's tokens x `[b, n, dim]`; all ranks of the ring call this.

        Args:
            mask: bool `[b, n]`, True where a token is real.
            layout: which tokens a rank holds.
            group: the ring; None is the default group.
            caller: the caller's name, for error messages.
            also: further values, by name, that must be the same on all ranks.
            check: the caller's check of this rank's arguments; its error is raised on all ranks.

        Raises:
            ValueError: an argument is invalid, or differs between ranks; on every rank.

        >>> RoutingPlan.make(torch.randn(1, 5, 8)).length
        5
        """
        ring = as_ring(group)
        error = error_of(check) or error_of(partial(_check, ring, x, mask, layout))
        same, own = {}, {}
        if error is None:
            b, n, dim = x.shape
            own["n"] = n
            grad = torch.is_grad_enabled()
            same = dict(
                also or {}, batch=b, dim=dim, dtype=x.dtype, device=x.device.type, layout=layout,
                mask=mask is not None, grad=grad, requires_grad=grad and x.requires_grad,
            )  # fmt: skip
        lengths = [note["n"] for note in agree(ring, caller, same, own, check=error)]
        raise_together(ring, caller, check=partial(check_shards, layout, lengths))
        segments = all_segments(layout, ring.size, sum(lengths))
        positions = torch.cat([segment_positions(s, x.device) for s in segments])
        real = torch.ones(len(x), len(positions), dtype=torch.bool, device=x.device)
        own_mask = None if mask is None else mask.clone()
        plan = cls(ring, layout, segments, own_mask, real, positions.argsort(), ring.steps.notes)
        if mask is not None:
            real.copy_(plan.whole(mask))
        return plan

    @classmethod
    def of(
        cls,
        plan: "RoutingPlan | None",
        x: Tensor,
        mask: Tensor | None,
        spread: ShardConfig,
        caller: str,
        also: Mapping[str, Any],
        check: Callable[[], object],
    ) -> "RoutingPlan":
        """Check and return a plan passed to a module; if it is None, make one."""
        if plan is None:
            ring = spread.ring(spread.ring_attn, None)
            layout: Any = spread.layout  # routed layers only take a layout's name
            return cls.make(
                x, mask, layout=layout, group=ring, caller=caller, also=also, check=check
            )
        with checks_of(caller):
            if mask is not None:
                raise ValueError("the plan already has the mask; pass one or the other")
            check()
        plan.check(x)
        return plan

    def check(self, x: Tensor) -> None:
        """Raise ValueError if the plan was made for other tokens."""
        mine = self.segments[self.ring.rank]
        want = [self.real.shape[0], count(mine)]
        if x.ndim != 3 or list(x.shape[:2]) != want:
            raise ValueError(
                f"the plan was made for tokens {want}, got {list(x.shape)}; make one for these"
            )

    @property
    def length(self) -> int:
        """Number of tokens of the whole sequence."""
        return self.real.shape[1]

    @checked
    def positions(self, device: torch.device | str | int | None = None) -> Tensor:
        """Return this rank's positions, int64 `[n]`."""
        return segment_positions(self.segments[self.ring.rank], known_device(device))

    def whole(self, x: Tensor) -> Tensor:
        """Gather all ranks' x `[b, ..., n]` as `[b, ..., N]`, in position order; no gradient."""
        lengths = map(count, self.segments)
        by_rank = all_gather_along(
            -1, x.detach(), lengths, Caller(self.ring, "routing", self.number)
        )
        return by_rank.index_select(-1, self.order)

    def homes(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return each position's owner and place on it; owner -1 for negative positions."""
        if self.length == 0:
            return torch.full_like(positions, -1), torch.zeros_like(positions)
        held = torch.tensor([count(s) for s in self.segments], device=positions.device)
        ends = held.cumsum(0)
        starts = ends - held
        place = self.order[positions.clamp(min=0)]
        rank = torch.bucketize(place, ends, right=True)
        return rank.masked_fill(positions < 0, -1), place - starts[rank]


def _check(ring: Ring, x: Tensor, mask: Tensor | None, layout: str) -> None:
    """Raise ValueError if this rank's arguments are invalid, or tokens are in a batch's block."""
    placement = current()
    if placement is not None and ring.size == placement.ring.size:
        raise ValueError(
            "routed layers take no layout, documents and mask from the block of a batch; leave "
            "`with batch:` out, and give them the layout and the mask"
        )
    if x.ndim != 3 or x.dtype not in DTYPES or x.is_meta:
        raise ValueError(
            "tokens must be floating [batch, tokens, dim] and have values, "
            f"got {x.dtype} {list(x.shape)} on {x.device}"
        )
    check_layout(layout)
    check_mask("mask", mask, x)
