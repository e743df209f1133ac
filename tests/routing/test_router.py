"""The router by itself: scores, choices, and tokens that go out and come back."""

import inspect
from functools import partial

import pytest
import torch
from torch import Tensor

from ring_attention_pytorch import RoutingPlan, routing
from ring_attention_pytorch.geometry.layouts import positions
from ring_attention_pytorch.routing.router import _OF_ROUTERS
from tests.support import routing_reference, threads
from tests.support.reference import relative_error
from tests.support.routing_cases import DIM


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("scale", [0.5, 8])
def test_a_router_by_cosines_is_that_of_the_definition(size: int, scale: float) -> None:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(2, 17, DIM, generator=draw, dtype=torch.float64)
    x = (x * torch.linspace(0.1, 9, 17)[:, None]).requires_grad_()  # only directions matter
    toward = torch.randn(2, DIM, generator=draw, dtype=torch.float64, requires_grad=True)
    dgates = torch.randn(2, 2, 17, generator=draw, dtype=torch.float64)
    positions_, gates = routing_reference.cosine_gates(x, toward, 5, scale, eps=0.7)
    want = [gates, *torch.autograd.grad(gates, (x, toward), dgates)]

    def main(ring: threads.ThreadRing) -> list[Tensor]:
        router = routing.CoordinateDescentRouter(
            DIM, straight_through=False, eps=0.7, num_routing_tokens=2, cosine_sim_routing=True,
            cosine_sim_scale=scale, ring_attn=True, group=ring, layout="zigzag",
        ).double()  # fmt: skip
        router.routing_token.data = toward.detach().clone()
        here = positions("zigzag", rank=ring.rank, ring_size=size, length=17)
        mine = x.detach()[:, here].requires_grad_()
        plan = RoutingPlan.make(mine, group=ring, layout="zigzag")
        found = router.choose(mine, plan, 5)
        assert found.positions.tolist() == positions_
        grads = torch.autograd.grad(found.gates, (mine, router.routing_token), dgates[..., here])
        assert relative_error(found.gates, want[0][..., here]) < 1e-12
        assert relative_error(grads[0], want[1][:, here]) < 1e-10
        return grads[1]

    along, _ = threads.run(size, main)
    assert relative_error(sum(along), want[2]) < 1e-10


# --- the router by itself ---


def test_the_router_gives_tokens_out_and_takes_them_back() -> None:
    x = torch.randn(2, 11, DIM)
    router = routing.CoordinateDescentRouter(DIM)
    found = router(x, num_tokens=4, mask=torch.ones(2, 11, dtype=torch.bool))
    assert found.indices.shape == (2, 4)
    assert torch.equal(found.routed_tokens, x.gather(1, found.indices[..., None].expand(2, 4, DIM)))
    assert torch.allclose(found.scores, torch.ones(2, 4))
    back = router.route_back(torch.zeros_like(x), found.routed_tokens, found.dispatch)
    for b in range(2):
        here = torch.isin(torch.arange(11), found.indices[b])
        assert torch.equal(back[b, here], x[b, here])
        assert not back[b, ~here].any()


def test_routers_of_all_kinds() -> None:
    x = torch.randn(2, 40, DIM)
    for options in (
        dict(num_routing_tokens=3),
        dict(cosine_sim_routing=True, cosine_sim_scale=4),
        dict(route_block_size=10),
        dict(n_iters=20, eps=0.03, eps_init=4.0, eps_decay=0.7),
    ):
        found = routing.CoordinateDescentRouter(DIM, **options)(
            x, num_tokens=8, keep_one_route_dim=True
        )
        assert found.indices.shape == (2, options.get("num_routing_tokens", 1), 8)
        assert found.routed_mask.all()
        assert (found.indices.diff() > 0).all()
    blocks = routing.CoordinateDescentRouter(DIM, route_block_size=10)(x, num_tokens=8).indices
    assert torch.equal((blocks // 10)[0], torch.arange(4).repeat_interleave(2))
    learned = routing.CoordinateDescentRouter(DIM, learned_routing_tokens=True)
    assert learned(x, num_tokens=3, routing_tokens=torch.randn(2, DIM)).indices.shape == (2, 3)


def test_random_routes_are_any_tokens_with_gates_1() -> None:
    x, router = torch.randn(1, 200, DIM), routing.CoordinateDescentRouter(DIM)
    picks = [router(x, num_tokens=5, random_route=True) for _ in range(2)]
    assert not torch.equal(picks[0].indices, picks[1].indices)
    assert (picks[0].scores == 1).all()


def test_scores_are_the_same_whatever_is_worked_on_at_once(monkeypatch) -> None:
    x, router = torch.randn(2, 23, DIM, requires_grad=True), routing.CoordinateDescentRouter(DIM)
    found = []
    for at_once in (65536, 5):
        monkeypatch.setattr(routing.router, "_AT_ONCE", at_once)
        scores = router.scores(x)
        grads = torch.autograd.grad(scores.sin().sum(), [x, router.routing_token])
        found.append([scores, *grads])
    for a, b in zip(*found):
        assert relative_error(a, b) < 1e-6
    assert torch.equal(found[0][0], found[1][0])


DECIDED = [
    {"straight_through": False}, {"num_routing_tokens": 2}, {"learned_routing_tokens": True},
    {"ring_attn": True}, {"layout": "zigzag"}, {"group": None}, {"dim": 3}, {"epz": 1.0}, {1: 2},
]  # fmt: skip


@pytest.mark.parametrize("given", DECIDED, ids=str)
def test_a_router_s_options_are_not_what_its_module_decides(given: dict) -> None:
    (name,) = given
    cross = partial(routing.ConditionalRoutedCrossAttention, 8, num_tokens_q=2, num_tokens_kv=2)
    of_heavy = partial(routing.ConditionalRoutedAttention, 8, num_heavy_tokens_q=2)
    feed_forward = partial(routing.ConditionalRoutedFeedForward, 8, num_heavy_tokens=2)
    for make in (cross, partial(of_heavy, num_heavy_tokens_kv=2), feed_forward):
        with pytest.raises(ValueError, match=f"router_kwargs may be .* got {name}; what else"):
            make(router_kwargs=given)
    with pytest.raises(ValueError, match=r"router_kwargs may be .* got route_block_size; what"):
        cross(router_kwargs={"route_block_size": 2})


def test_all_other_options_of_a_router_are_its_module_s() -> None:
    has = {*inspect.signature(routing.CoordinateDescentRouter.__init__).parameters} - {"self"}
    assert has - _OF_ROUTERS == {name for given in DECIDED[:7] for name in given}
    assert has > _OF_ROUTERS
