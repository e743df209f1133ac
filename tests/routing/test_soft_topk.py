"""Soft top-k: the fixed point, the published descent, any ring."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ring_attention_pytorch import coordinate_descent, select_topk, soft_topk
from ring_attention_pytorch.ranks.ring import Ring
from tests.support import threads
from tests.support.routing_reference import soft_gates


def published(
    s: Tensor, k: float, n_iters: int, eps: float, eps_init: float | None, decay: float
) -> Tensor:
    """The algorithm as it is printed, with its vectors a and b."""
    e = max(eps_init or eps, eps)
    a, b = torch.zeros_like(s[..., :1]), -s
    for _ in range(n_iters):
        a = e * (torch.tensor(k, dtype=s.dtype).log() - ((s + b) / e).logsumexp(-1, keepdim=True))
        b = -(s + a).relu()
        e = max(e * decay, eps)
    return ((s + a + b) / e).exp()


@pytest.mark.parametrize("schedule", [(0.5, None, 1.0), (0.03, 4.0, 0.7), (1.0, 3.0, 0.9)])
@pytest.mark.parametrize("n_iters", [1, 2, 7, 20])
def test_descent_is_the_published_one_gradients_included(n_iters: int, schedule: tuple) -> None:
    s = torch.randn(3, 40, dtype=torch.float64, requires_grad=True)
    eps, eps_init, decay = schedule
    options = dict(n_iters=n_iters, k=6, eps=eps, eps_init=eps_init, eps_decay=decay)
    got, want = coordinate_descent(s, **options), published(s, 6, n_iters, *schedule)
    dout = torch.randn_like(s)
    grads = [torch.autograd.grad(p, s, dout)[0] for p in (got, want)]
    assert (got - want).abs().max() < 1e-12
    assert (grads[0] - grads[1]).abs().max() < 1e-11 * grads[1].abs().max().clamp(min=1)


@pytest.mark.parametrize("eps", [0.2, 1.0, 5.0])
def test_the_fixed_point_is_where_a_long_descent_ends(eps: float) -> None:
    s = torch.randn(4, 50, dtype=torch.float64, requires_grad=True)
    got, want = soft_topk(s, 7, eps=eps), coordinate_descent(s, n_iters=6000, k=7, eps=eps)
    dout = torch.randn_like(s)
    grads = [torch.autograd.grad(p, s, dout)[0] for p in (got, want)]
    assert (got - want).abs().max() < 1e-10
    assert (grads[0] - grads[1]).abs().max() < 1e-10


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 30), st.floats(0.1, 31), st.floats(0.01, 10), st.floats(0.01, 50),
    st.integers(0, 10**6),
)  # fmt: skip
def test_gates_are_in_0_to_1_sum_to_k_and_keep_the_order(
    n: int, k: float, eps: float, spread: float, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    s = torch.randn(n, generator=draw, dtype=torch.float64) * spread
    s[: n // 3] = s[0].clone()  # ties
    p = soft_topk(s, torch.tensor(k, dtype=torch.float64), eps=eps)
    assert ((p >= 0) & (p <= 1)).all()
    assert abs(p.sum().item() - min(k, n)) < 1e-9 * n
    by_score = p[s.sort().indices]
    assert (by_score.diff() >= 0).all()
    want, _ = soft_gates(s, k, eps)
    assert (p - want).abs().max() < 1e-7


@pytest.mark.parametrize("k", [3, 0.3, 60])
def test_a_mask_hides_scores_and_k_is_of_each_sample(k: float) -> None:
    s, mask = torch.randn(3, 20, dtype=torch.float64, requires_grad=True), torch.rand(3, 20) < 0.6
    mask[2] = False
    p = soft_topk(s, k, mask=mask)
    assert not p[~mask].any()
    for row, real, gates in zip(s, mask, p):
        count = min(k, real.sum().item()) if k >= 1 else -(-3 * real.sum().item() // 10)
        assert abs(gates.sum().item() - count) < 1e-12
        assert torch.equal(gates[real], soft_topk(row[real], max(count, 1))) or count == 0
    (grad,) = torch.autograd.grad(p, s, torch.randn_like(p))
    assert grad.isfinite().all()
    assert not grad[~mask].any()


@pytest.mark.parametrize("k", [1, 2, 3, 0.5])
def test_a_score_of_minus_infinity_is_as_if_masked(k: float) -> None:
    """Also where all real ones are chosen, when the threshold is infinite, too."""
    s = torch.tensor([[2.0, -torch.inf, 1.0, -torch.inf], [3.0] + 3 * [-torch.inf]])
    s = s.double().requires_grad_()
    dout = torch.randn_like(s)
    for gates in (soft_topk, lambda s, **how: coordinate_descent(s, n_iters=9, **how)):
        got, want = gates(s, k=k), gates(s.nan_to_num(neginf=0.0), k=k, mask=s > -torch.inf)
        grads = [torch.autograd.grad(p, s, dout)[0] for p in (got, want)]
        assert got.equal(want)
        assert torch.allclose(*grads, rtol=1e-12, atol=1e-12)


def test_gradients_are_those_of_finite_differences() -> None:
    s = torch.randn(2, 12, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(2, 12) < 0.8
    for k in (3, 0.5, torch.tensor([1.5, 4.0], dtype=torch.float64)):
        assert torch.autograd.gradcheck(lambda s, k=k: soft_topk(s, k, eps=0.4, mask=mask), s)
    descent = dict(n_iters=9, k=4, eps=0.3, eps_init=4.0, eps_decay=0.7)
    assert torch.autograd.gradcheck(lambda s: coordinate_descent(s, mask=mask, **descent), s)


def test_scores_far_apart_need_no_more_work_and_give_no_nan() -> None:
    s = -100.0 * torch.arange(2000, dtype=torch.float64).requires_grad_()
    p = soft_topk(s, 700, eps=0.01)
    assert torch.equal(p, (torch.arange(2000) < 700).double())
    assert torch.autograd.grad(p.sum(), s)[0].isfinite().all()


def test_a_million_scores() -> None:
    s = torch.randn(1, 2**20) * 20
    p = soft_topk(s, 2**16, eps=0.5)
    assert p.dtype == torch.float32
    assert abs(p.double().sum().item() / 2**16 - 1) < 1e-6


# --- on a ring ---


def soft_shard(ring: Ring, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    s = torch.randn((2, sum(lengths)), generator=draw, dtype=torch.float64)
    mask = torch.rand((2, sum(lengths)), generator=draw) < 0.8
    dout = torch.randn((2, sum(lengths)), generator=draw, dtype=torch.float64)
    s, mask, dout = (t.split(lengths, 1)[ring.rank] for t in (s, mask, dout))
    s = s.clone().requires_grad_()
    p = soft_topk(s, 0.3, eps=0.7, mask=mask, group=ring)
    return p.detach(), torch.autograd.grad(p, s, dout)[0]


@pytest.mark.parametrize("lengths", [(9, 8), (3, 0, 14), (5, 4, 4, 4), (0, 0, 17), (1,) * 8])
def test_soft_topk_over_shards_of_any_lengths(lengths: tuple[int, ...], pools: Callable) -> None:
    want = soft_shard(Ring.alone(), (sum(lengths),))
    by_rank = threads.run(len(lengths), lambda ring: soft_shard(ring, lengths))[0]
    if len(lengths) == 4:
        by_rank += pools(4).run(in_process, lengths)
    for first in range(0, len(by_rank), len(lengths)):
        for got, wanted in zip(zip(*by_rank[first : first + len(lengths)]), want):
            assert (torch.cat(got, 1) - wanted).abs().max() < 1e-12


def in_process(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    return soft_shard(Ring(), lengths)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(k=0), "k must be at least 1"),
        (dict(k=1.5), "k as a share must be above 0 and at most 1"),
        (dict(k=torch.ones(3)), r"k must be \[2\]"),
        (dict(k=torch.ones(2, dtype=torch.complex64)), "k must be integers or floating"),
        (dict(k=torch.ones(2, dtype=torch.bool)), "k must be integers or floating"),
        (dict(eps=0.0), "eps must be positive"),
        (dict(mask=torch.ones(2, 4, dtype=torch.bool)), r"mask must be bool \[2, 5\]"),
        (dict(k=4), "k must be the same on every rank"),
    ],
)
def test_what_can_t_be_is_the_same_error_on_all_ranks(wrong: dict, message: str) -> None:
    def main(ring: threads.ThreadRing) -> str:
        options = dict(k=3) | (wrong if ring.rank == 1 else {})
        with pytest.raises(ValueError, match=message) as error:
            soft_topk(torch.randn(2, 5), options.pop("k"), group=ring, **options)
        return str(error.value)

    said, hub = threads.run(2, main)
    assert said[0] == said[1]
    assert not any(hub.sent_bytes)


def test_wrong_arguments_of_the_others() -> None:
    s = torch.randn(2, 5)
    with pytest.raises(ValueError, match="n_iters must be at least 1"):
        coordinate_descent(s, n_iters=0, k=2)
    with pytest.raises(ValueError, match="scores must be floating"):
        coordinate_descent(s.long(), n_iters=2, k=2)
    with pytest.raises(ValueError, match="scores must be \\[batch, tokens\\]"):
        select_topk(s[0], 2)
    with pytest.raises(ValueError, match="k must be at least 1"):
        select_topk(s, -1)
