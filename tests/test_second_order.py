"""Second derivatives and forward mode equal those of dense attention, whatever the kernel."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import grad, jvp, vmap
from torch.utils.checkpoint import checkpoint

from ring_attention_pytorch import attention
from ring_attention_pytorch.functional import ring_attn
from ring_attention_pytorch.nn.attention import RingAttention
from ring_attention_pytorch.nn.loss import mean_cross_entropy
from ring_attention_pytorch.nn.sharding import shard_sequence, unshard_sequence
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.routing import CoordinateDescentRouter, soft_topk
from tests.support import threads
from tests.support.features import FEATURES, LAYOUTS, together
from tests.support.ranks import Pool
from tests.support.reference import dense_attention, relative_error
from tests.support.sampling import grid
from tests.support.second_order import Second, shared_level

NAMES = list(FEATURES)
MANY = ("causal", "softclamp", "key mask", "sinks", "d_v != d")


def check(errors: dict[str, float], bound: float = 1e-12) -> None:
    bad = {name: error for name, error in errors.items() if not error < bound}
    assert not bad, bad


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


# --- right ---


@grid("name", NAMES, always=9, drawn=4)
def test_each_feature_on_a_ring(name):
    number = NAMES.index(name)
    check(Second(FEATURES[name]).errors(number % 3 + 1, LAYOUTS[number % 4]))


@pytest.mark.parametrize(("layout", "size"), [*zip(LAYOUTS, (3, 2, 3, 1))])
def test_many_features_in_every_layout(layout, size):
    check(Second(together(MANY)).errors(size, layout))


@pytest.mark.parametrize(
    ("name", "size", "options"),
    [
        ("causal", 3, dict(transport="gather")),
        ("cu_seqlens", 4, dict(transport="gather", memory=0)),
        ("key mask", 2, dict(ulysses=2)),
        ("one key head", 4, dict(ulysses=2, transport="gather")),
    ],
)
def test_whatever_transport_carries_keys(name, size, options):
    check(Second(FEATURES[name] | FEATURES["d_v != d"]).errors(size, "zigzag", **options))


def one_case(names: tuple[str, ...], layout: str) -> list[Tensor]:
    """For a pool."""
    found = Second(together(names)).shard(Ring(), layout)
    return [t.detach() for t in found]


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_over_processes(layout, pools: Callable[[int], Pool]):
    """The plan is made within transforms, too: ranks compare notes, and tell their documents."""
    names = ("documents", "causal", "sinks", "bias")
    check(Second(together(names)).compared(pools(3).run(one_case, names, layout), layout))


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03), (torch.float16, 0.004)]
)
def test_narrow_inputs_are_summed_wide(dtype, bound):
    """Out is rounded to 16 bits before its tangents and delta are made of it."""
    rounded = Second(FEATURES["causal"] | FEATURES["sinks"], dtype)
    check(rounded.errors(2, "zigzag"), bound)


@pytest.mark.parametrize(
    "options",
    [{}, dict(causal=True, softclamp=0.7), dict(window=1, sinks=drawn(2))],
    ids=["plain", "softclamp", "sinks"],
)
def test_finite_differences(options):
    """All modes agree with finite differences: forward, both over reverse, reverse over forward."""
    given = (drawn(1, 4, 2, 3), drawn(1, 4, 1, 3), drawn(1, 4, 1, 2))
    given += (options.get("sinks"),) if "sinks" in options else ()

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Any:
        how = options | dict(sinks=sinks, kernel="eager", bucket_size=3, return_lse=True)
        return ring_attn(q, k, v, **how)

    along = tuple(torch.randn_like(t) for t in given)

    def tangent(*given: Tensor) -> Any:
        return jvp(attend, given, along)[1]

    gradcheck(attend, given, check_forward_ad=True, fast_mode=True)
    gradgradcheck(attend, given, check_fwd_over_rev=True, fast_mode=True)
    gradcheck(tangent, given, fast_mode=True)


def test_transforms_of_transforms():
    """Reverse over reverse and forward over reverse by torch.func, and forward mode by hand."""
    q, k, v = (drawn(1, 5, 2, 4).detach() for _ in range(3))
    found = []
    for attend in (lambda *t: ring_attn(*t, kernel="eager", causal=True), dense_causal):
        loss = lambda q, attend=attend: attend(q, k, v).sin().sum()  # noqa: E731
        found.append([grad(loss)(q), grad(lambda q, of=loss: (grad(of)(q) * v).sum())(q)])
        found[-1].append(jvp(grad(loss), (q,), (v,))[1])
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(q.clone().requires_grad_(), v)
            found[-1].append(forward_ad.unpack_dual(loss(dual)).tangent)
            (moved,) = torch.autograd.grad(loss(dual), dual)
            found[-1].append(forward_ad.unpack_dual(moved).tangent)
    assert all(relative_error(got, want) < 1e-12 for got, want in zip(*found))


def dense_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return dense_attention(q, k, v, causal=True)[0]


@pytest.mark.parametrize("ulysses", [1, 2])
def test_what_has_no_tangent_or_cotangent_counts_as_zero(ulysses):
    """Only k moves of q, k, v; only dv of their gradients is used, and only lse of (out, lse)."""
    q, k, v, t = (drawn(1, 6, 2, 4) for _ in range(4))

    def of(attend: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> list[Tensor]:
        out, lse = jvp(lambda k: attend(q.detach(), k, v.detach()), (k.detach(),), (t.detach(),))[1]
        (dv,) = torch.autograd.grad(attend(q, k, v)[0], v, t, create_graph=True)
        (dk,) = torch.autograd.grad(attend(q, k, v)[1].sum(), k, create_graph=True)
        twice = [torch.autograd.grad(g.square().sum(), (q, k)) for g in (dv, dk)]
        return [out, lse.mT, *(g for each in twice for g in each)]

    want = of(dense_attention, q, k, v, t)

    def main(ring: Ring) -> list[Tensor]:
        mine = (x.detach().chunk(2, 1)[ring.rank].requires_grad_() for x in (q, k, v, t))
        how = dict(kernel="eager", group=ring, ulysses=ulysses, return_lse=True)
        return of(lambda *given: ring_attn(*given, **how), *mine)

    with shared_level():
        parts = zip(*threads.run(2, main)[0])
    for got, wanted in zip(parts, want):
        assert relative_error(torch.cat(got, 1), wanted) < 1e-12


def test_a_gradient_penalty_trains():
    """The loss and the norm of its gradient in one backward, added to what .grad has."""
    q, k, v = (drawn(1, 6, 2, 4) for _ in range(3))
    found = []
    for attend in (dense_causal, lambda *t: ring_attn(*t, kernel="eager+eager", causal=True)):
        leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
        for _ in range(2):
            loss = attend(*leaves).square().sum()
            grads = torch.autograd.grad(loss, leaves, create_graph=True)
            (loss + sum(g.square().sum() for g in grads)).backward()
        found.append([t.grad for t in leaves])
    assert all(relative_error(got, want) < 1e-12 for want, got in zip(*found))


def penalised(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """The gradients of the squared norm of the loss's gradients."""
    grads = torch.autograd.grad(loss, leaves, create_graph=True)
    return list(torch.autograd.grad(sum(g.square().sum() for g in grads), leaves))


def test_a_penalty_on_what_whole_sequences_are_made_into():
    """Every rank's loss is of the whole, and all of them are summed."""
    whole, size = [drawn(1, 7, 2, 4) for _ in range(3)], 3
    want = penalised(size * dense_causal(*whole).sin().sum(), whole)

    def main(ring: Ring) -> list[Tensor]:
        how = dict(layout="striped", group=ring)
        mine = [shard_sequence(t.detach(), **how).requires_grad_() for t in whole]
        out = ring_attn(*mine, causal=True, kernel="eager", **how)
        return penalised(unshard_sequence(out, length=7, **how).sin().sum(), mine)

    for rank, mine in enumerate(threads.run(size, main)[0]):
        for got, exact in zip(mine, want):
            assert relative_error(got, exact[:, rank::size]) < 1e-12


def penalised_loss(logits: Tensor, labels: Tensor) -> list[Tensor]:
    """For a pool."""
    ring = Ring()
    mine = [logits[:, ring.rank :: ring.size].clone().requires_grad_()]
    loss = mean_cross_entropy(mine[0], labels[:, ring.rank :: ring.size], -1, ring)
    return penalised(loss.square(), mine)


def test_a_penalty_on_the_mean_loss(pools: Callable[[int], Pool]):
    logits, labels = drawn(2, 9, 5), torch.randint(-1, 5, (2, 9))
    of_one = mean_cross_entropy(logits, labels, -1, Ring.alone()).square()
    (want,) = penalised(3 * of_one, [logits])
    for rank, (got,) in enumerate(pools(3).run(penalised_loss, logits.detach(), labels)):
        assert relative_error(got, want[:, rank::3]) < 1e-12


def test_autocast_and_a_plan_of_its_own():
    q = drawn(1, 6, 2, 4, dtype=torch.float32).detach()
    plan = RingPlan.make(q.bfloat16(), q.bfloat16(), q.bfloat16(), causal=True, kernel="eager")
    with torch.autocast("cpu", torch.bfloat16):
        made = jvp(lambda q: ring_attn(q, q, q, causal=True, kernel="eager"), (q,), (q,))[1]
        given = jvp(lambda q: ring_attn(q, q, q, plan=plan), (q,), (q,))[1]
        assert grad(lambda q: ring_attn(q, q, q, causal=True).sum())(q).dtype == torch.float32
    assert made.dtype == torch.bfloat16
    assert torch.equal(made, given)
    exact = jvp(lambda q: dense_causal(q, q, q), (q.double(),), (q.double(),))[1]
    assert relative_error(made, exact) < 0.03


def test_a_penalty_may_be_checkpointed():
    leaves = [drawn(1, 7, 2, 4).requires_grad_() for _ in range(3)]

    def energy(*qkv: Tensor) -> Tensor:
        out = ring_attn(*qkv, causal=True, kernel="eager")
        return torch.autograd.grad(out.square().sum(), qkv, create_graph=True)[0].square().sum()

    want = torch.autograd.grad(energy(*leaves), leaves)
    got = torch.autograd.grad(checkpoint(energy, *leaves, use_reentrant=False), leaves)
    assert all(torch.equal(a, b) for a, b in zip(got, want))


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_a_sink_s_gradient_is_wide_under_autocast(kernel):
    q, sinks = drawn(1, 7, 2, 4).float().requires_grad_(), drawn(2).float().requires_grad_()
    found = []
    for enabled in (False, True):
        out = ring_attn(q, q, q, causal=True, kernel=kernel, sinks=sinks)
        with torch.autocast("cpu", enabled=enabled):
            found.append(torch.autograd.grad(out.square().sum(), sinks)[0])
    assert torch.equal(*found)


def test_first_gradients_take_no_further_pass():
    """Nothing of the second order runs, or is kept, where nobody asks for it."""
    q = drawn(1, 4, 1, 4)
    with mock.patch.object(attention, "gathered_attention", side_effect=AssertionError):
        for kernel in ("eager", "sdpa"):
            (once,) = torch.autograd.grad(ring_attn(q, q, q, kernel=kernel).sum(), q)
            assert once.grad_fn is None


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_every_kernel_has_second_derivatives(kernel):
    """Also for a cotangent that needs no gradient."""
    q, along = drawn(1, 7, 2, 4), drawn(1, 7, 2, 4).detach()
    found = []
    for attend in (dense_causal, lambda *t: ring_attn(*t, kernel=kernel, causal=True)):
        given = q.detach().clone().requires_grad_()
        (first,) = torch.autograd.grad(attend(given, given, given), given, along, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), given)
        found.append([second, jvp(lambda q, of=attend: of(q, q, q), (q.detach(),), (along,))[1]])
    assert all(relative_error(got, want) < 1e-12 for want, got in zip(*found))


def test_third_derivatives():
    q = drawn(1, 4, 1, 4).detach()
    found = []
    for attend in (dense_causal, lambda *t: ring_attn(*t, causal=True)):
        loss = lambda q, of=attend: of(q, q, q).sin().sum()  # noqa: E731
        second = lambda q, of=loss: grad(lambda q: grad(of)(q).square().sum())(q)  # noqa: E731
        given = q.clone().requires_grad_()
        (first,) = torch.autograd.grad(loss(given), given, create_graph=True)
        (again,) = torch.autograd.grad(first.square().sum(), given, create_graph=True)
        found.append([torch.autograd.grad(again.square().sum(), given)[0]])
        found[-1].append(jvp(second, (q,), (q,))[1])
    errors = [relative_error(got, want) for want, got in zip(*found)]
    assert max(errors) < 1e-11, errors


# --- refused ---


def test_soft_topk_and_routing_have_first_gradients_only():
    scores = drawn(2, 9)
    with pytest.raises(NotImplementedError, match="soft_topk can't be differentiated twice"):
        penalised(soft_topk(scores, 3).sin().sum(), [scores])
    router, x = CoordinateDescentRouter(4), drawn(1, 9, 4, dtype=torch.float32)
    with pytest.raises(NotImplementedError, match="can't be differentiated twice"):
        penalised(router(x, num_tokens=3).scores.sin().sum(), [x])


def test_forward_mode_over_forward_mode_and_vmap_are_refused():
    q, loss = drawn(1, 4, 1, 4).detach(), lambda q: ring_attn(q, q, q).square().sum()
    for inner in (loss, lambda q: grad(loss)(q).sum()):
        with pytest.raises(NotImplementedError, match="forward mode over forward mode"):
            jvp(lambda t, of=inner: jvp(of, (t,), (q,))[1], (q,), (q,))
    with pytest.raises(RuntimeError, match="vmap"):
        vmap(lambda q: ring_attn(q, q, q).square().sum())(drawn(1, 1, 4, 1, 4))


@pytest.mark.parametrize("by_module", [False, True])
def test_ranks_that_differ_in_tangents_all_say_so(by_module):
    """A rank without tangents would leave the others waiting for its keys."""

    def main(ring: Ring) -> str | None:
        q = drawn(1, 4, 1, 4).detach()
        options = dict(ring_attn=True, auto_shard_seq=False, group=ring, kernel="eager")
        module = RingAttention(4, dim_head=4, heads=1, **options).double().requires_grad_(False)
        given = forward_ad.make_dual(q, q) if ring.rank == 1 else q

        def attend() -> Tensor:
            if by_module:
                return module(given[:, :, 0])
            return ring_attn(given, q, q, group=ring, kernel="eager")

        with pytest.raises(ValueError, match="tangents must be the same on every rank") as error:
            attend()
        return str(error.value)

    with shared_level():
        assert len(set(threads.run(3, main)[0])) == 1
