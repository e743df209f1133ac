"""Mistakes of CoLT5-attention (C1 to C12), as tests that pass here; and the bytes sent."""

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ring_attention_pytorch import (
    ConditionalRoutedAttention,
    ConditionalRoutedAutoregressiveAttention,
    ConditionalRoutedCrossAttention,
    ConditionalRoutedFeedForward,
    ConditionalRoutedImageAttention,
    CoordinateDescentRouter,
    RingPlan,
    RoutingPlan,
    coordinate_descent,
    positions,
    routing,
    soft_topk,
)
from ring_attention_pytorch.functional import ring_attn
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.routing.attention import Routed, light_attention
from tests.support import threads
from tests.support.reference import dense_attention, relative_error

DIM = 8
SMALL = dict(heavy_dim_head=4, heavy_heads=4, light_dim_head=4, light_heads=2)
LAYOUTS = ("contiguous", "striped", "zigzag")


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def attention(**over) -> nn.Module:
    options = SMALL | dict(num_heavy_tokens_q=4, num_heavy_tokens_kv=4, light_window_size=4) | over
    return ConditionalRoutedAttention(DIM, **options).double()


def autoregressive(**over) -> nn.Module:
    options = SMALL | dict(num_heavy_tokens_q=2, num_heavy_tokens_kv=2, light_window_size=4) | over
    return ConditionalRoutedAutoregressiveAttention(DIM, **options).double()


def cross(**over) -> nn.Module:
    options = dict(num_tokens_q=4, num_tokens_kv=4, dim_head=4, heads=4) | over
    return ConditionalRoutedCrossAttention(DIM, **options).double()


@pytest.mark.parametrize("kind", ["self", "autoregressive", "cross"])
def test_c1_several_key_sets_do_not_mix_the_batch(kind: str) -> None:
    module = {
        "self": lambda: attention(num_routed_kv=2),
        "autoregressive": lambda: autoregressive(num_routed_kv=2),
        "cross": lambda: cross(kv_routing_tokens=2),
    }[kind]()
    x, context = normal(3, 20, DIM), normal(3, 20, DIM)
    rest = (context,) if kind == "cross" else ()
    before = module(x, *rest)
    x[0], context[0] = normal(20, DIM), normal(20, DIM)
    after = module(x, *rest)
    assert torch.equal(before[1:], after[1:])
    assert not torch.equal(before[0], after[0])


def test_c2_cross_attention_runs_for_all_of_its_options() -> None:
    x, context = normal(2, 9, DIM), normal(2, 14, DIM)
    for options in (
        {}, dict(num_tokens_q=None), dict(use_null_q_tokens=False), dict(kv_routing_tokens=2),
        dict(multiply_keys_by_score=True), dict(use_flash_attn=True), dict(route_block_size=5),
    ):  # fmt: skip
        assert cross(**options)(x, context).isfinite().all()
    without = cross(use_null_q_tokens=False)(x, context)
    assert without.eq(0).all(-1).sum(-1).tolist() == [5, 5]  # 4 of 9 queries are routed


def test_c3_blocks_give_equal_shares_in_a_long_context() -> None:
    """The original's own example: a million tokens of context, routed by blocks."""
    n, block = 2**17, 2**14
    module = cross(route_block_size=block, num_tokens_kv=256).float()
    context = torch.randn(1, n, DIM)
    module(torch.randn(1, 10, DIM), context)
    found = module.kv_router(context, num_tokens=256).indices[0]
    assert torch.equal((found // block).bincount(), torch.full((n // block,), 256 * block // n))
    # and the tail is a block as the others, not dropped
    tail = module.kv_router(context[:, : block + 100], num_tokens=20).indices[0]
    assert torch.equal((tail // block).bincount(), torch.tensor([10, 10]))


def test_c4_image_tokens_are_routed_from_all_the_image() -> None:
    module = ConditionalRoutedImageAttention(
        DIM, num_heavy_tokens_q=4, num_heavy_tokens_kv=4, light_window_size=4, channel_first=True,
        use_null_q_tokens=False, router_straight_through=False, **SMALL,
    ).double()  # fmt: skip
    image = normal(1, DIM, 12, 8) * 0.1
    loud = module.q_router.routing_token[0].detach() * 5
    image[0, :, 1, 1:5] += loud[:, None]  # four tokens, of two windows
    tokens = image.flatten(2).transpose(1, 2)
    found = module.q_router(tokens, num_tokens=4).indices[0]
    assert found.tolist() == [9, 10, 11, 12]
    assert module(image).shape == image.shape
    # a far token moves what they read: no window holds both
    far = image.clone()
    far[0, :, 11, 7] += module.kv_router.routing_token[0].detach() * 9
    assert (module(far) - module(image))[0, :, 1, 1:5].abs().max() > 1e-6


def test_c5_later_tokens_do_not_choose_earlier_queries() -> None:
    module, x = autoregressive(heavy_window_size=8), normal(1, 32, DIM)
    before = module(x)
    for token in range(32):
        changed = x.clone()
        changed[:, token] += 100 * module.q_router.routing_token[0].detach()
        assert (module(changed) - before)[:, :token].norm() < 1e-12


def test_c6_gates_sum_to_k_where_the_published_descent_has_not_converged() -> None:
    s = normal(4, 1024) * 20
    assert ((soft_topk(s, 64, eps=0.03).sum(-1) - 64).abs() < 1e-9).all()
    schedule = dict(n_iters=20, eps=0.03, eps_init=4.0, eps_decay=0.7)
    assert ((coordinate_descent(s, k=64, **schedule).sum(-1) - 64).abs() > 1).all()


def test_c6_choices_go_by_scores_not_by_gates_that_are_equal() -> None:
    router = CoordinateDescentRouter(DIM, eps=0.03, fetch_k_ratio=3).double()
    x = normal(1, 300, DIM) * 20
    scores = router.scores(x)[0, 0]
    found = router(x, num_tokens=40)
    assert found.indices[0].tolist() == sorted(scores.topk(40).indices.tolist())


def test_c7_masked_tokens_are_never_chosen() -> None:
    x, mask = normal(2, 50, DIM), torch.rand(2, 50) < 0.5
    for k in (5, 0.9, 50):
        found = CoordinateDescentRouter(DIM).double()(x, num_tokens=k, mask=mask)
        for row, real in zip(found.indices, mask):
            assert real[row[row >= 0]].all()


def test_c7_random_routes_without_a_mask_and_sequences_shorter_than_a_window() -> None:
    module = autoregressive(light_window_size=64)
    for n in (0, 1, 63, 64, 65):
        assert module(normal(1, n, DIM)).isfinite().all()
        assert module(normal(1, n, DIM), random_route=True).isfinite().all()


def test_c8_routed_keys_are_held_once_and_not_once_for_each_window(monkeypatch) -> None:
    held = []
    real = Routed.gather.__func__

    def noted(cls: type, *args) -> Routed:
        routed = real(cls, *args)
        held.append(routed.tokens.numel())
        return routed

    monkeypatch.setattr(Routed, "gather", classmethod(noted))
    module = autoregressive()
    for windows in (8, 16, 32):
        module(normal(1, 4 * windows, DIM))
    assert held == [w * 2 * DIM for w in (8, 8, 16, 16, 32, 32)]


def test_c10_k_may_be_a_share_of_each_sample_s_real_length() -> None:
    mask = torch.arange(40).expand(3, 40) < torch.tensor([[40], [10], [0]])
    found = CoordinateDescentRouter(DIM)(torch.randn(3, 40, DIM), num_tokens=0.1, mask=mask)
    assert found.routed_mask.sum(-1).tolist() == [4, 1, 0]


def test_c10_what_is_not_routed_gets_the_null_token_masked_or_not() -> None:
    module = attention(has_light_attn=False, num_heavy_tokens_q=9)
    mask = torch.arange(20).expand(1, 20) < 5
    out = module(normal(1, 20, DIM), mask=mask)[0]
    null = module.null_q_token
    assert torch.equal(out[5:], null.expand(15, DIM))
    assert not (out[:5] == null).all(-1).any()


def test_c11_options_are_not_shared_and_any_kernel_is_taken_by_name() -> None:
    for module in (ConditionalRoutedAttention, ConditionalRoutedFeedForward):
        assert inspect.signature(module).parameters["router_kwargs"].default is None
    x = normal(1, 30, DIM)
    torch.manual_seed(1)
    ours = [attention(kernel=kernel) for kernel in ("eager", "sdpa")]
    ours[1].load_state_dict(ours[0].state_dict())
    assert relative_error(ours[0](x), ours[1](x)) < 1e-12


def test_c12_fewer_tokens_than_are_asked_for() -> None:
    x = normal(2, 3, DIM)
    for router in (CoordinateDescentRouter(DIM), CoordinateDescentRouter(DIM, n_iters=50)):
        found = router.double()(x, num_tokens=8)
        assert found.indices.tolist() == [[0, 1, 2]] * 2
        assert torch.equal(found.scores, torch.ones_like(found.scores))
        assert torch.equal(found.routed_tokens, x)
    for module in (
        attention(),
        autoregressive(),
        ConditionalRoutedFeedForward(DIM, num_heavy_tokens=8).double(),
    ):
        assert module(x).isfinite().all()


# --- what is sent ---


class Weighed(threads.ThreadRing):
    """A ring that also counts what each rank receives."""

    received = 0

    def exchange(self, sends, receives) -> threads.ThreadTransfer:
        self.received += sum(t.nbytes for _, t in receives)
        return super().exchange(sends, receives)


def weigh(size: int, main: Callable[[Weighed], object]) -> list[int]:
    """Bytes received by each rank."""

    def counted(ring: threads.ThreadRing) -> int:
        weighed = Weighed(ring.hub, ring.rank)
        main(weighed)
        return weighed.received

    return threads.run(size, counted)[0]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("size", [2, 4, 5])
def test_a_halo_is_only_the_rows_that_a_window_needs(size: int, causal: bool) -> None:
    n, w, heads, key_heads, d = 100, 6, 4, 2, 8
    q, k, v = normal(1, n, heads, d), normal(1, n, key_heads, d), normal(1, n, key_heads, d)
    want, _ = dense_attention(q, k, v, causal=causal, window=w)

    def forward(ring: Ring) -> None:
        at = positions("contiguous", rank=ring.rank, ring_size=size, length=n)
        mine = [t[:, at] for t in (q, k, v)]
        plan = RingPlan.make(*mine, causal=causal, window=w, group=ring, transport="gather")
        assert relative_error(ring_attn(*mine, plan=plan), want[:, at]) < 1e-12

    a_side = 2 * w * key_heads * d * 8  # keys and values, of 8 bytes
    sides = [(r > 0) + (r < size - 1 and not causal) for r in range(size)]
    assert weigh(size, forward) == [a_side * s for s in sides]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("size", [2, 4])
def test_the_light_branch_receives_a_halo_and_no_more(size: int, causal: bool) -> None:
    n, x = 64, normal(1, 64, DIM)

    def light(ring: Ring) -> None:
        at = positions("contiguous", rank=ring.rank, ring_size=size, length=n)
        over = dict(ring_attn=True, layout="contiguous", group=ring)
        module = autoregressive(**over) if causal else attention(**over)
        plan = RoutingPlan.make(x[:, at], group=ring)
        before = ring.received
        light_attention(module.light_attn, x[:, at], plan)
        sides = (ring.rank > 0) + (ring.rank < size - 1 and not causal)
        window = 4 if causal else 2
        assert ring.received - before == sides * 2 * window * 2 * 4 * 8  # 2 heads of 4, 8 bytes

    weigh(size, light)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_dispatch_brings_each_rank_its_share_of_the_routed_tokens(size: int, layout: str) -> None:
    n, k, b = 60, 14, 2
    x = normal(b, n, DIM)
    torch.manual_seed(0)
    weights = CoordinateDescentRouter(DIM).double().state_dict()

    def dispatch(ring: Ring) -> None:
        here = positions(layout, rank=ring.rank, ring_size=size, length=n)
        router = CoordinateDescentRouter(DIM).double()
        router.load_state_dict(weights)
        plan = RoutingPlan.make(x[:, here], layout=layout, group=ring)
        routed = router.choose(x[:, here], plan, k)
        before = ring.received
        found = Routed.gather(x[:, here], routed, plan)
        received = ring.received - before
        share = -(-k // size) if ring.rank < k % size or k % size == 0 else k // size
        assert found.tokens.shape == (b, 1, share, DIM)
        assert received <= b * share * (DIM + 1) * 8  # tokens and their gates

    weigh(size, dispatch)


def test_scores_are_all_that_choosing_sends() -> None:
    n, size = 64, 4
    x = normal(1, n, DIM)

    def choose(ring: Ring) -> None:
        plan = RoutingPlan.make(x[:, :16], group=ring)
        before = ring.received
        CoordinateDescentRouter(DIM).choose(x[:, :16].float(), plan, 8)
        assert ring.received - before == (n - 16) * 4

    weigh(size, choose)


def test_all_names_of_the_original_are_there() -> None:
    names = ("FeedForward", "Attention", "AutoregressiveAttention", "CrossAttention")
    names += ("ImageAttention", "TransformerBlock")
    assert {f"ConditionalRouted{name}" for name in names} <= set(routing.__all__)
