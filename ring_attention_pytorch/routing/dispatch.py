"""Exchange of routed tokens: to the ranks that work on them, and results back to the owners.

The routed tokens of a sequence are a short sequence themselves, of K slots. It is dealt in layout
"striped", slot i to rank i mod P, so that ranks have equal numbers and equal causal work.
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
    """List for each rank which of `total` slots it works on, int64."""
    return [segment_positions(s, device) for s in all_segments("striped", ring_size, total)]


@dataclass(frozen=True, eq=False)
class Dispatch:
    """An assignment of routed tokens to slots of ranks, which every rank derives from the choice.

    Attributes:
        counts: how many slots each rank has.
        positions: `[b, r, K]`, the positions of the tokens in this rank's slots, -1 where empty.
        sends: for each rank t, which of the tokens `[b * n]` held here go to it.
        routes: for each rank t, the route of each token in `sends[t]`.
        lands: for each rank s, the slots `[b * r * K]` here where its tokens arrive.
    """

    ring: Ring
    counts: tuple[int, ...]
    positions: Tensor
    sends: list[Tensor]
    routes: list[Tensor]
    lands: list[Tensor]

    @classmethod
    def make(cls, positions: Tensor, plan: RoutingPlan, slots: Sequence[Tensor]) -> "Dispatch":
        """Make it from positions `[b, r, K]` of all slots, -1 for none, and each rank's slots."""
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
        """Send tokens x held here to their ranks; return those in this rank's slots.

        x is `[b, n, ...]`, or `[b, r, n, ...]` with by_route; the result is `[b, r, K, ...]`. Empty
        slots are 1: a token of zeros has no direction, and its norm in 16 bits would be NaN.
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
        """Send y `[b, 1, K, ...]` of the slots here to the owners; return base with what came.

        base `[b, n, ...]` has the results of tokens that are not routed.
        """
        flat = y.flatten(0, 2)
        shapes = [(len(sent), *base.shape[2:]) for sent in self.sends]
        got = all_to_all([flat.index_select(0, land) for land in self.lands], shapes, self.ring)
        filled = base.flatten(0, 1).index_copy(
            0, torch.cat(self.sends), torch.cat(got).to(base.dtype)
        )
        return filled.view(base.shape)
