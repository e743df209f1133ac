"""Routed tokens go to the ranks that work on them, and results home, against plain indexing."""

import pytest
import torch
from torch import Tensor

from ring_attention_pytorch import RoutingPlan, positions
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.routing.dispatch import Dispatch, dealt
from tests.support import threads

N, K, ROUTES = 11, 5, 2
X = torch.randn(2, N, 3, generator=torch.Generator().manual_seed(0))
CHOSEN = torch.tensor([  # positions of two routes, -1 where too few are real
    [[0, 3, 4, 9, 10], [1, 3, 5, 6, 7]],
    [[2, 8, -1, -1, -1], [0, 1, 2, 3, -1]],
])  # fmt: skip


@pytest.mark.parametrize(("total", "ranks"), [(0, 2), (1, 3), (7, 3), (8, 4)])
def test_slots_are_dealt_in_turn_and_each_once(total: int, ranks: int) -> None:
    slots = dealt(total, ranks, torch.device("cpu"))
    assert [each.tolist() for each in slots] == [
        [*range(rank, total, ranks)] for rank in range(ranks)
    ]


@pytest.mark.parametrize("layout", ["contiguous", "striped", "zigzag"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_tokens_come_to_their_slots_and_go_home(size: int, layout: str) -> None:
    by_route = torch.stack([X[..., 0], X[..., 0] + 100], 1)  # [b, r, N]

    def main(ring: Ring) -> tuple[Tensor, Tensor]:
        at = positions(layout, rank=ring.rank, ring_size=size, length=N)
        mine = X[:, at]
        plan = RoutingPlan.make(mine, layout=layout, group=ring)
        slots = dealt(K, size, torch.device("cpu"))
        way, here = Dispatch.make(CHOSEN, plan, slots), CHOSEN[..., slots[ring.rank]]
        assert torch.equal(way.positions, here)
        assert way.counts == tuple(map(len, slots))
        got, gates = way.out(mine), way.out(by_route[:, :, at], by_route=True)
        for b, r, i in torch.cartesian_prod(*map(torch.arange, here.shape)).tolist():
            token = here[b, r, i]
            assert torch.equal(got[b, r, i], X[b, token] if token >= 0 else torch.ones(3))
            assert gates[b, r, i] == (by_route[b, r, token] if token >= 0 else 1)
        one = Dispatch.make(CHOSEN[:, :1], plan, slots)
        return at, one.home(one.out(mine) * 2, torch.zeros_like(mine))

    want = torch.zeros_like(X)
    for b in range(2):
        chosen = CHOSEN[b, 0][CHOSEN[b, 0] >= 0]
        want[b, chosen] = X[b, chosen] * 2
    for at, came in threads.run(size, main)[0]:
        assert torch.equal(came, want[:, at])
