"""Routed tokens to the ranks that work on them, and results home: two exchanges of just these.

The routed tokens of a sequence are a short sequence themselves. It is dealt like a striped one,
token i to rank i mod P, so that every rank has as many and causal work is even.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ring_attention_pytorch.comm.ring import Ring
from ring_attention_pytorch.geometry.layouts import all_segments, count, segment_positions
from ring_attention_pytorch.nn.sharding import all_to_all
from ring_attention_pytorch.routing.plan import RoutingPlan


def dealt(total: int, ring_size: int, device: torch.device) -> list[Tensor]:
    """Which of `total` slots each rank works on."""
    return [segment_positions(s, device) for s in all_segments("striped", ring_size, total)]


@dataclass(frozen=True, eq=False)
class Dispatch:
    """Who sends which tokens where. Every rank knows all of it from the choice alone.

    `sends[t]`: which of the tokens `[b * n]` held here go to rank t, and `routes[t]`: for which of
    the r routes; `lands[s]`: in which of the slots `[b * r * K]` here those of rank s arrive.
    `positions` `[b, r, K]` are those of the slots here, -1 where one is empty. `counts`: how many
    slots each rank has.
    """

    ring: Ring
    counts: tuple[int, ...]
    positions: Tensor
    sends: list[Tensor]
    routes: list[Tensor]
    lands: list[Tensor]

    @classmethod
    def make(cls, positions: Tensor, plan: RoutingPlan, slots: Sequence[Tensor]) -> "Dispatch":
        """positions `[b, r, K]` of all slots, -1 for none; `slots` are those of each rank."""
        ring, (b, r, _) = plan.ring, positions.shape
        ranks, places = plan.homes(positions)
        n = count(plan.segments[ring.rank])
        tokens = places + n * torch.arange(b, device=places.device)[:, None, None]
        route = torch.arange(r, device=places.device)[:, None].expand(positions.shape)
        mine = slots[ring.rank]
        here, coming = [ranks[..., to] == ring.rank for to in slots], ranks[..., mine]
        return cls(
            ring,
            tuple(map(len, slots)),
            positions[..., mine],
            [tokens[..., to][held] for to, held in zip(slots, here)],
            [route[..., to][held] for to, held in zip(slots, here)],
            [(coming == rank).flatten().nonzero().flatten() for rank in range(ring.size)],
        )

    def out(self, x: Tensor, *, by_route: bool = False) -> Tensor:
        """Tokens held here to the slots `[b, r, K, ...]` here.

        Empty slots are 1: a token of zeros has no direction, and its norm in 16 bits would be NaN.
        x is `[b, n, ...]`, or `[b, r, n, ...]` by route.
        """
        indices, rest = self.sends, x.shape[2 + by_route :]
        if by_route:
            r, n = x.shape[1:3]
            indices = [
                (sent // max(n, 1) * r + route) * n + sent % max(n, 1)
                for sent, route in zip(self.sends, self.routes)
            ]
        flat = x.flatten(0, 1 + by_route)
        shapes = [(len(land), *rest) for land in self.lands]
        got = all_to_all([flat.index_select(0, at) for at in indices], shapes, self.ring)
        empty = x.new_ones((self.positions.numel(), *rest))
        filled = empty.index_copy(0, torch.cat(self.lands), torch.cat(got))
        return filled.view(*self.positions.shape, *rest)

    def home(self, y: Tensor, base: Tensor) -> Tensor:
        """Slots `[b, 1, K, ...]` here into tokens like base `[b, n, ...]`."""
        flat = y.flatten(0, 2)
        shapes = [(len(sent), *base.shape[2:]) for sent in self.sends]
        got = all_to_all([flat.index_select(0, land) for land in self.lands], shapes, self.ring)
        filled = base.flatten(0, 1).index_copy(
            0, torch.cat(self.sends), torch.cat(got).to(base.dtype)
        )
        return filled.view(base.shape)
