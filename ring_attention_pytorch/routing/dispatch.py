"""Exchange of routed tokens: to the ranks that work on them, and results back to the owners.

The routed tokens form a short sequence of K slots. Its layout is "striped", slot i on rank i mod P,
so that ranks have equal numbers of tokens and equal causal work.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ring_attention_pytorch.comm.collectives import scatter_rows
from ring_attention_pytorch.geometry.layouts import all_segments, count, segment_positions
from ring_attention_pytorch.ranks.ring import Caller
from ring_attention_pytorch.routing.plan import RoutingPlan


def dealt(total: int, ring_size: int, device: torch.device) -> list[Tensor]:
    """List for each rank the slots that it works on, of `total`, int64."""
    return [segment_positions(s, device) for s in all_segments("striped", ring_size, total)]


@dataclass(frozen=True, eq=False)
class Dispatch:
    """An assignment of routed tokens to slots of ranks, which every rank derives from the choice.

    Attributes:
        counts: number of slots of each rank.
        positions: `[b, r, K]`, positions of the tokens in this rank's slots, -1 for empty slots.
        sends: for each rank t, this rank's tokens, of `[b * n]`, that go to it.
        routes: for each rank t, the route of each token in `sends[t]`.
        lands: for each rank s, this rank's slots, of `[b * r * K]`, where its tokens arrive.
    """

    plan: RoutingPlan
    counts: tuple[int, ...]
    positions: Tensor
    sends: list[Tensor]
    routes: list[Tensor]
    lands: list[Tensor]

    @classmethod
    def make(cls, positions: Tensor, plan: RoutingPlan, slots: Sequence[Tensor]) -> "Dispatch":
        """Make it from positions `[b, r, K]` of all slots, -1 if empty, and each rank's slots."""
        ring = plan.ring
        b, r, _ = positions.shape
        owners, places = plan.homes(positions)
        n = count(plan.segments[ring.rank])
        samples = torch.arange(b, device=places.device)
        routes = torch.arange(r, device=places.device)
        tokens = places + n * samples[:, None, None]
        route = routes[:, None].expand(positions.shape)
        my_slots = slots[ring.rank]
        my_owners = owners[..., my_slots].flatten()
        counts = tuple(map(len, slots))
        way = cls(plan, counts, positions[..., my_slots], [], [], [])
        for rank, its_slots in enumerate(slots):
            held = owners[..., its_slots] == ring.rank
            way.sends.append(tokens[..., its_slots][held])
            way.routes.append(route[..., its_slots][held])
            arrives = my_owners == rank
            way.lands.append(arrives.nonzero().flatten())
        return way

    def out(self, x: Tensor, *, by_route: bool = False) -> Tensor:
        """Send this rank's tokens x to the ranks of their slots; return this rank's slots.

        x is `[b, n, ...]`, or `[b, r, n, ...]` with by_route; the result is `[b, r, K, ...]`. Empty
        slots are 1: a token of zeros has no direction, and its norm in 16 bits would be NaN.
        """
        indices, width = self.sends, x.shape[2 + by_route :]
        if by_route:
            r, n = x.shape[1:3]
            indices = []
            for sent, route in zip(self.sends, self.routes):
                sample, place = sent // max(n, 1), sent % max(n, 1)
                indices.append((sample * r + route) * n + place)
        flat = x.flatten(0, 1 + by_route)
        pieces = [flat.index_select(0, index) for index in indices]
        empty = x.new_ones((self.positions.numel(), *width))
        filled = scatter_rows(
            pieces,
            self.lands,
            empty,
            Caller(self.plan.ring, "tokens to their slots", self.plan.number),
        )
        return filled.view(*self.positions.shape, *width)

    def home(self, y: Tensor, base: Tensor) -> Tensor:
        """Send results y `[b, 1, K, ...]` of this rank's slots to the owners; put them into base.

        base `[b, n, ...]` has the results of tokens that are not routed. Returns the filled base.
        """
        flat = y.flatten(0, 2)
        pieces = [flat.index_select(0, land) for land in self.lands]
        caller = Caller(self.plan.ring, "results to their tokens", self.plan.number)
        filled = scatter_rows(pieces, self.sends, base.flatten(0, 1), caller)
        return filled.view(base.shape)
