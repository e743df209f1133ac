"""Ring attention equals dense attention over the whole: over threads, and over processes."""

import weakref
from dataclasses import replace
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ring_attention_pytorch.functional import ring_attn
from ring_attention_pytorch.geometry.layouts import LAYOUTS
from ring_attention_pytorch.kernels import KERNELS, refusal
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime.interfaces import KernelRequest
from tests.support import threads
from tests.support.cases import (
    CPU_KERNELS,
    NAMES,
    TOLERANCES,
    Attention,
    check,
    check_in_processes,
    check_in_threads,
    errors,
    oracle,
    process_case,
    results,
    shard,
)
from tests.support.ranks import alone
from tests.support.reference import dense_attention, relative_error

LENGTH = 29
HEADS = ((4, 4), (4, 2), (3, 1))


def kernels(case: Attention) -> list[str]:
    asked = KernelRequest("cpu", case.dtype, case.softclamp is not None)
    return [name for name in KERNELS if refusal(name, asked) is None]


def matrix(layout: str, **kinds) -> list[Attention]:
    """Every combination of options."""
    options = product((False, True), (None, 0, 6), (False, True), HEADS, (None, 1.5))
    cases = [
        Attention(
            LENGTH, layout, causal=causal, window=window, masked=masked, softclamp=softclamp,
            heads=h, key_heads=h_kv, **kinds,
        )
        for causal, window, masked, (h, h_kv), softclamp in options
    ]  # fmt: skip
    return [replace(case, kernel=name) for case in cases for name in kernels(case)]


# --- the matrix ---


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_all_combinations_of_options_over_threads(layout, size):
    for case in matrix(layout)[:: {4: 2, 8: 5}.get(size, 1)]:
        check_in_threads(case, size)


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_single_precision_over_threads(layout, size):
    for case in matrix(layout, dtype=torch.float32, d_v=5)[::3]:
        check_in_threads(case, size)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_all_combinations_of_options_over_processes(layout, size, pools):
    # every option is among each five, for they come in threes and nines
    check_in_processes(matrix(layout)[:: 1 if size == 3 else 5], pools(size))


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_eight_processes(layout, pools):
    check_in_processes(matrix(layout)[::11], pools(8))


def test_single_precision_and_odd_lengths_over_processes(pools):
    cases = [
        Attention(length, layout, causal=True, window=window, masked=masked, dtype=dtype, d_v=3)
        for length, layout, window, masked, dtype in product(
            (0, 1, 2, 3, 5, 8, 31), sorted(LAYOUTS), (None, 2), (False, True), TOLERANCES
        )
    ]
    check_in_processes(cases, pools(3))


attention = st.builds(
    Attention,
    length=st.integers(0, 40),
    layout=st.sampled_from(sorted(LAYOUTS)),
    causal=st.booleans(),
    window=st.none() | st.integers(0, 45),
    masked=st.booleans(),
    softclamp=st.none() | st.sampled_from([0.5, 3.0]),
    scale=st.none() | st.sampled_from([0.2, 1.0]),
    batch=st.integers(1, 2),
    d=st.integers(1, 9),
    d_v=st.integers(1, 9),
    bucket_size=st.integers(1, 20),
    seed=st.integers(0, 3),
)


@settings(deadline=None, max_examples=80)
@given(attention, st.integers(1, 9))
def test_any_length_any_ring_any_mask(case, size):
    check_in_threads(case, size)


@pytest.mark.parametrize("kernel", CPU_KERNELS)
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_shards_longer_than_a_kernels_own_blocks(layout, kernel):
    for window in (None, 50):
        case = Attention(
            531, layout, causal=True, window=window, masked=True, kernel=kernel, bucket_size=64,
            batch=1, heads=2, key_heads=1,
        )  # fmt: skip
        check_in_threads(case, 3)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_results_of_different_ring_sizes_agree(layout):
    case, wholes = Attention(37, layout, causal=True, window=9, masked=True), []
    for size in (1, 2, 3, 4, 8):
        got, _ = threads.run(size, lambda ring: shard(case, ring))
        order = torch.cat([case.places(r, size)[0] for r in range(size)]).argsort()
        parts = [torch.cat(p, 2 if name == "lse" else 1) for name, p in zip(NAMES, zip(*got))]
        wholes.append([t.index_select(2 if n == "lse" else 1, order) for n, t in zip(NAMES, parts)])
    for other in wholes[1:]:
        assert max(map(relative_error, other, wholes[0])) < 1e-12


CROSS = [
    ((4, 4, 4), (9, 9, 9)),
    ((9, 9, 9), (4, 4, 4)),
    ((5, 5, 5), (5, 5, 5)),
    ((1, 7, 3), (6, 2, 11)),
    ((0, 5, 4), (3, 0, 8)),
    ((6, 0, 0), (0, 0, 5)),
    ((3, 3, 3), (0, 0, 0)),
]


def cross(queries: tuple[int, ...], keys: tuple[int, ...], **options) -> Attention:
    return Attention(sum(queries), query_lengths=queries, key_lengths=keys, **options)


@pytest.mark.parametrize(("queries", "keys"), CROSS)
@pytest.mark.parametrize("masked", [False, True])
def test_cross_attention_with_shards_of_any_lengths(queries, keys, masked):
    for softclamp in (None, 2.0):
        check_in_threads(cross(queries, keys, masked=masked, softclamp=softclamp), 3)


def test_cross_attention_over_processes(pools):
    cases = [cross(q, k, masked=masked) for (q, k), masked in product(CROSS, (False, True))]
    check_in_processes(cases, pools(3))


def test_cross_attention_with_other_lengths_is_found_without_being_asked_for():
    case = cross((4, 4), (7, 3))
    (q, k, v), _, _, _ = case.data()

    def main(ring: Ring) -> Tensor:
        queries, keys = case.places(ring.rank, 2)
        return ring_attn(q[:, queries], k[:, keys], v[:, keys], group=ring)

    got, _ = threads.run(2, main)
    assert relative_error(torch.cat(got, 1), oracle(case)[0]) < 1e-12


# --- gradients, by other means ---


class Threaded(torch.autograd.Function):
    """A whole ring of threads as one function of whole tensors, for gradcheck."""

    @staticmethod
    def forward(ctx, q, k, v, case: Attention, size: int):
        def main(ring: Ring):
            at, _ = case.places(ring.rank, size)
            mine = [t.detach()[:, at].requires_grad_() for t in (q, k, v)]
            out, lse = ring_attn(
                *mine, **case.options(), layout=case.layout, kernel=case.kernel, group=ring,
                return_lse=True, bucket_size=2,
            )  # fmt: skip
            return ring, mine, out, lse

        ctx.ranks, _ = threads.run(size, main)
        ctx.case, ctx.size = case, size
        ctx.order = torch.cat([case.places(r, size)[0] for r in range(size)]).argsort()
        out, lse = (torch.cat([r[i].detach() for r in ctx.ranks], i - 1) for i in (2, 3))
        return out[:, ctx.order], lse[..., ctx.order]

    @staticmethod
    def backward(ctx, dout, dlse):
        def main(ring: Ring):
            theirs, mine, out, lse = ctx.ranks[ring.rank]
            theirs.join(ring.hub)
            at, _ = ctx.case.places(ring.rank, ctx.size)
            return torch.autograd.grad(
                (out, lse), mine, (dout[:, at], dlse[..., at]), retain_graph=True
            )

        shards, _ = threads.run(ctx.size, main)
        return *(torch.cat(parts, 1)[:, ctx.order] for parts in zip(*shards)), None, None


@pytest.mark.parametrize("kernel", CPU_KERNELS)
@pytest.mark.parametrize(("layout", "size"), [("contiguous", 2), ("striped", 3), ("zigzag", 2)])
def test_gradients_are_the_slopes_of_the_results(layout, size, kernel):
    case = Attention(
        5, layout, causal=True, window=3, kernel=kernel, batch=1, heads=2, key_heads=1, d=3, d_v=2,
        softclamp=2.0 if kernel == "eager" else None,
    )  # fmt: skip
    leaves = [t.requires_grad_() for t in case.data()[0]]
    assert torch.autograd.gradcheck(Threaded.apply, (*leaves, case, size), atol=1e-7)


@pytest.mark.parametrize("which", ["out", "lse"])
@pytest.mark.parametrize("kernel", CPU_KERNELS)
def test_either_result_may_be_the_only_one_with_a_gradient(which, kernel):
    case = Attention(21, "zigzag", causal=True, kernel=kernel)
    tensors, _, dout, dlse = case.data()
    whole = [t.clone().requires_grad_() for t in tensors]
    i = ("out", "lse").index(which)
    cotangent = (dout, dlse)[i]
    picked = dense_attention(*whole, causal=True)[i]
    want = torch.autograd.grad(picked, whole, cotangent, materialize_grads=True)

    def main(ring: Ring) -> None:
        at, _ = case.places(ring.rank, 3)
        mine = [t[:, at].requires_grad_() for t in tensors]
        got = ring_attn(
            *mine, causal=True, layout="zigzag", kernel=kernel, group=ring, return_lse=True
        )
        grads = torch.autograd.grad(
            got[i], mine, cotangent.index_select(i + 1, at), materialize_grads=True
        )
        for g, w in zip(grads, want):
            assert relative_error(g, w[:, at]) < 1e-12

    threads.run(3, main)


def test_gradients_of_only_some_of_q_k_v():
    case = Attention(14, causal=True)
    tensors, _, dout, dlse = case.data()
    for wanted in product((False, True), repeat=3):
        if not any(wanted):
            continue

        def main(ring: Ring, wanted=wanted) -> dict[str, float]:
            at, _ = case.places(ring.rank, 2)
            mine = [t[:, at].requires_grad_(w) for t, w in zip(tensors, wanted)]
            out, lse = ring_attn(*mine, causal=True, group=ring, return_lse=True)
            leaves = [t for t in mine if t.requires_grad]
            grads = torch.autograd.grad((out, lse), leaves, (dout[:, at], dlse[..., at]))
            names = [n for n, w in zip(NAMES[2:], wanted) if w]
            exact = dict(zip(NAMES, oracle(case)))
            return {n: relative_error(g, exact[n][:, at]) for n, g in zip(names, grads)}

        check(case, 2, threads.run(2, main)[0])


# --- messages ---


def hops(case: Attention, size: int) -> list[tuple[int, int]]:
    """(exchanges, bytes sent) of each rank."""
    _, hub = threads.run(size, lambda ring: shard(case, ring))
    return list(zip(hub.exchanges, hub.sent_bytes))


def forward_only(case: Attention, size: int) -> threads.Hub:
    tensors, mask, _, _ = case.data()

    def main(ring: Ring) -> None:
        at, _ = case.places(ring.rank, size)
        ring_attn(
            *(t[:, at] for t in tensors), **case.options(), layout=case.layout, group=ring,
            key_mask=None if mask is None else mask[:, at], transport=case.transport,
            ulysses=case.ulysses, memory=case.memory,
        )  # fmt: skip

    return threads.run(size, main)[1]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_messages_are_as_many_as_hops(layout, size):
    case = Attention(32, layout, causal=True)
    forward = forward_only(case, size).exchanges
    both, _ = zip(*hops(case, size))
    assert forward == [size - 1] * size
    assert all(b - f <= 2 * (size - 1) for b, f in zip(both, forward))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_bytes_sent_are_keys_there_and_keys_and_gradients_back(masked, dtype):
    size, n = 4, 6
    case = Attention(size * n, masked=masked, dtype=dtype, d=8, d_v=5)
    elements = case.batch * n * case.key_heads * (case.d + case.d_v)
    keys = elements * dtype.itemsize + (case.batch * n if masked else 0)
    grads = elements * max(4, dtype.itemsize)
    assert forward_only(case, size).sent_bytes == [(size - 1) * keys] * size
    _, sent = zip(*hops(case, size))
    assert max(sent) <= (size - 1) * (2 * keys + grads)


@pytest.mark.parametrize(
    ("layout", "window", "distances"),
    [
        ("zigzag", 3, 2), ("contiguous", 3, 1), ("contiguous", 7, 1), ("contiguous", 9, 2),
        ("striped", 2, 2),
    ],
)  # fmt: skip
def test_a_window_sends_only_what_somebody_can_see(layout, window, distances):
    case = Attention(64, layout, causal=True, window=window)
    assert forward_only(case, 8).exchanges == [distances] * 8
    both, _ = zip(*hops(case, 8))
    assert max(both) <= 3 * distances


def test_a_ring_of_one_sends_nothing():
    assert hops(Attention(11), 1) == [(0, 0)]


def counted(case: Attention) -> tuple[int, int]:
    """For a pool: batches of messages forward, and forward and backward together."""
    ring, (tensors, _, dout, _) = Ring(), case.data()
    at, _ = case.places(ring.rank, ring.size)
    mine = [t[:, at].requires_grad_() for t in tensors]
    send = dist.batch_isend_irecv
    with mock.patch.object(dist, "batch_isend_irecv", side_effect=send) as sent:
        out = ring_attn(*mine, **case.options(), layout=case.layout)
        forward = sent.call_count
        torch.autograd.grad(out, mine, dout[:, at])
        return forward, sent.call_count


@pytest.mark.parametrize("size", [2, 4])
def test_processes_send_as_many_messages_as_threads(size, pools):
    for case, hops in ((Attention(32), size - 1), (Attention(32, causal=True, window=2), 1)):
        for forward, both in pools(size).run(counted, case):
            assert forward == hops
            assert both - forward <= 2 * hops


class Live(TorchDispatchMode):
    """The most bytes of tensors made here that were alive at once."""

    def __init__(self):
        super().__init__()
        self.owners: dict[int, list[int]] = {}  # storage -> [tensors that use it, bytes]
        self.bytes = self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(t, Tensor):
                self._born(t)
        return result

    def _born(self, t: Tensor) -> None:
        storage = t.untyped_storage()
        owner = self.owners.get(storage._cdata)
        if owner is None:
            owner = self.owners[storage._cdata] = [0, storage.nbytes()]
            self.bytes += owner[1]
            self.most = max(self.most, self.bytes)
        owner[0] += 1
        weakref.finalize(t, self._died, storage._cdata)

    def _died(self, storage: int) -> None:
        owner = self.owners[storage]
        owner[0] -= 1
        if owner[0] == 0:
            del self.owners[storage]
            self.bytes -= owner[1]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_memory_does_not_grow_with_the_ring(layout, backward):
    def most(size: int) -> int:
        shard_length, d = 16, 64
        case = Attention(shard_length * size, layout, causal=True, batch=1, d=d, d_v=d)
        tensors, _, dout, _ = case.data()

        def main(ring: Ring) -> int:
            at, _ = case.places(ring.rank, size)
            mine, cotangent = [t[:, at].requires_grad_() for t in tensors], dout[:, at]
            with Live() as live:
                out = ring_attn(*mine, causal=True, layout=layout, group=ring, kernel="eager")
                if backward:
                    torch.autograd.grad(out, mine, cotangent)
            return live.most

        return max(threads.run(size, main)[0])

    keys = 16 * 2 * (64 + 64) * 8  # bytes of one rank's k and v
    # a sent block dies when its receiver has taken it: one more or less, but not one a hop
    small, large = most(4), most(12)
    assert large <= small + keys
    assert small <= (15 if backward else 8) * keys


# --- plans ---


def test_a_plan_is_agreed_on_once_and_used_many_times():
    case = Attention(22, "zigzag", causal=True, window=8, masked=True)
    tensors, mask, dout, dlse = case.data()

    def main(ring: Ring) -> list[list[Tensor]]:
        at, _ = case.places(ring.rank, 3)
        mine = [t[:, at].requires_grad_() for t in tensors]
        plan = RingPlan.make(
            *mine, causal=True, window=8, key_mask=mask[:, at], layout="zigzag", group=ring
        )
        assert ring.hub.gathers[ring.rank] == 1
        found = []
        for _ in range(3):
            out, lse = ring_attn(*mine, plan=plan, return_lse=True)
            found.append(results(mine, out, lse, dout[:, at], dlse[..., at]))
        assert ring.hub.gathers[ring.rank] == 1
        assert torch.equal(plan.positions(), at)
        return found

    by_rank, _ = threads.run(3, main)
    for round_ in zip(*by_rank):
        check(case, 3, (errors(case, r, 3, got, oracle(case)) for r, got in enumerate(round_)))


@pytest.mark.parametrize(
    "option",
    [
        {"causal": True}, {"window": 3}, {"scale": 1.0}, {"softclamp": 2.0}, {"layout": "zigzag"},
        {"kernel": "eager"}, {"bucket_size": 7}, {"cross": True}, {"group": Ring.alone()},
        {"key_mask": torch.ones(2, 6, dtype=torch.bool)},
    ],
    ids=lambda option: next(iter(option)),
)  # fmt: skip
def test_a_plan_with_other_options_is_refused(option):
    q = torch.randn(2, 6, 4, 8)
    plan = RingPlan.make(q, q, q)
    with pytest.raises(ValueError, match=f"plan already decides {next(iter(option))}"):
        ring_attn(q, q, q, plan=plan, **option)


@pytest.mark.parametrize(
    "other",
    [(1, 6, 4, 8), (2, 7, 4, 8), (2, 6, 2, 8), (2, 6, 4, 4)],
    ids=["batch", "n", "heads", "d"],
)
def test_a_plan_for_other_shapes_is_refused(other):
    q = torch.randn(2, 6, 4, 8)
    plan = RingPlan.make(q, q, q)
    for wrong in (torch.randn(other), q.double()):
        with pytest.raises(ValueError, match=r"plan was made for batch=2, n=6.* got batch="):
            ring_attn(wrong, wrong, wrong, plan=plan)


# --- how tensors may come ---


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("kernel", CPU_KERNELS)
def test_inputs_and_cotangents_may_lie_in_memory_as_they_like(layout, kernel):
    case = Attention(19, layout, causal=True, kernel=kernel)
    tensors, _, dout, dlse = case.data()

    def transposed(t: Tensor) -> Tensor:
        return t.transpose(1, 2).contiguous().transpose(1, 2)

    def sliced(t: Tensor) -> Tensor:
        return torch.cat((t, t), -1)[..., : t.shape[-1]]

    for laid in (transposed, sliced):

        def main(ring: Ring, laid=laid) -> list[Tensor]:
            at, _ = case.places(ring.rank, 3)
            mine = [laid(t[:, at]).requires_grad_() for t in tensors]
            assert not any(t.is_contiguous() for t in mine if t.numel())
            out, lse = ring_attn(
                *mine, causal=True, layout=layout, kernel=kernel, group=ring, return_lse=True
            )
            return results(mine, out, lse, laid(dout[:, at]), dlse[..., at])

        got, _ = threads.run(3, main)
        check(case, 3, (errors(case, r, 3, g, oracle(case)) for r, g in enumerate(got)))


@pytest.mark.parametrize("kernel", CPU_KERNELS)
@pytest.mark.parametrize("reduce", [Tensor.sum, Tensor.mean])
def test_an_expanded_gradient_is_a_gradient(kernel, reduce):
    case = Attention(19, "striped", causal=True, kernel=kernel)
    tensors, _, _, _ = case.data()
    whole = [t.clone().requires_grad_() for t in tensors]
    size = 3
    out, _ = dense_attention(*whole, causal=True)
    losses = sum(reduce(out[:, case.places(r, size)[0]]) for r in range(size))
    want = torch.autograd.grad(losses, whole)

    def main(ring: Ring) -> None:
        at, _ = case.places(ring.rank, size)
        mine = [t[:, at].requires_grad_() for t in tensors]
        out = ring_attn(*mine, causal=True, layout="striped", kernel=kernel, group=ring)
        reduce(out).backward()
        for t, w in zip(mine, want):
            assert relative_error(t.grad, w[:, at]) < 1e-12

    threads.run(size, main)


def test_autocast_makes_one_dtype_of_mixed_inputs():
    case = Attention(64, "zigzag", causal=True, d=16, d_v=16)
    (q, k, v), _, dout, _ = case.data()
    q, k, v = q.float(), k.float(), v.bfloat16()
    rounded = [t.bfloat16() for t in (q, k, v)]

    def dense(dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in rounded]
        out, _ = dense_attention(*leaves, causal=True)
        return [out, *torch.autograd.grad(out, leaves, dout.to(dtype))]

    exact, plain = dense(torch.float64), dense(torch.bfloat16)
    bounds = [times * (p - e).abs().max() for times, p, e in zip((2, 3, 3, 3), plain, exact)]

    def main(ring: Ring) -> None:
        at, _ = case.places(ring.rank, 2)
        mine = [t[:, at].requires_grad_() for t in (q, k, v)]
        with torch.autocast("cpu", torch.bfloat16):
            out = ring_attn(*mine, causal=True, layout="zigzag", group=ring)
        got = [out, *torch.autograd.grad(out, mine, dout[:, at].to(out.dtype))]
        bf16, fp32 = torch.bfloat16, torch.float32
        assert [t.dtype for t in got] == [bf16, fp32, fp32, bf16]
        for g, e, bound in zip(got, exact, bounds):
            assert (g - e[:, at]).abs().max() <= bound

    threads.run(2, main)


def test_mixed_dtypes_without_autocast_are_refused():
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(ValueError, match=r"one floating dtype.*bfloat16.*autocast"):
        ring_attn(q, q, q.bfloat16())


def test_inputs_are_left_as_they_were():
    case = Attention(17, "zigzag", causal=True, masked=True)
    tensors, mask, dout, _ = case.data()

    def main(ring: Ring) -> None:
        at, _ = case.places(ring.rank, 3)
        mine = [t[:, at].requires_grad_() for t in tensors]
        given = [*mine, mask[:, at], dout[:, at]]
        before = [t.detach().clone() for t in given]
        out = ring_attn(*mine, causal=True, layout="zigzag", key_mask=given[3], group=ring)
        kept = out.detach().clone()
        torch.autograd.grad(out, mine, given[4])
        assert all(torch.equal(a, b) for a, b in zip(given, before))
        assert torch.equal(out, kept)

    threads.run(3, main)


# --- numbers ---


@pytest.mark.parametrize("kernel", CPU_KERNELS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_huge_logits_stay_finite_and_err_by_their_size(kernel, dtype):
    case = Attention(23, "zigzag", causal=True, kernel=kernel, dtype=dtype, logits=1e5)
    got, _ = threads.run(3, lambda ring: shard(case, ring))
    largest = max(t.abs().max().item() for t in oracle(case)[1:2])
    allowed = 10 * torch.finfo(dtype).eps * largest
    for rank, mine in enumerate(got):
        assert all(t.isfinite().all() for t in mine)
        assert max(errors(case, rank, 3, mine, oracle(case)).values()) < allowed


@pytest.mark.parametrize("kernel", CPU_KERNELS)
def test_logits_below_any_sentinel_are_still_logits(kernel):
    torch.manual_seed(0)
    q = torch.ones(1, 12, 2, 4, dtype=torch.float64) * -1e5
    k = torch.ones(1, 12, 2, 4, dtype=torch.float64) + torch.randn(1, 12, 2, 4).double() * 1e-5
    v = torch.randn(1, 12, 2, 4, dtype=torch.float64)
    want, _ = dense_attention(q, k, v, causal=True)

    def main(ring: Ring) -> Tensor:
        at = slice(4 * ring.rank, 4 * ring.rank + 4)
        return ring_attn(q[:, at], k[:, at], v[:, at], causal=True, kernel=kernel, group=ring)

    got, _ = threads.run(3, main)
    assert relative_error(torch.cat(got, 1), want) < 1e-9


def test_twenty_repeats_are_equal_in_every_bit():
    case = Attention(37, "zigzag", causal=True, masked=True, dtype=torch.float32)
    first, _ = threads.run(4, lambda ring: shard(case, ring))
    for _ in range(19):
        again, _ = threads.run(4, lambda ring: shard(case, ring))
        assert all(torch.equal(a, b) for x, y in zip(first, again) for a, b in zip(x, y))


# --- processes: groups, checkpoints, beginnings and ends ---


def repeated(case: Attention, times: int) -> int:
    """For a pool: how many different results the repeats gave."""
    ring, first, different = Ring(), None, set()
    for i in range(times):
        got = shard(case, ring)
        first = first or got
        if not all(torch.equal(a, b) for a, b in zip(first, got)):
            different.add(i)
    return len(different)


def test_repeats_over_processes_are_equal_in_every_bit(pools):
    case = Attention(37, "zigzag", causal=True, masked=True, dtype=torch.float32)
    assert pools(4).run(repeated, case, 20) == [0] * 4


def checkpointed(case: Attention, use_reentrant: bool) -> tuple[dict[str, float], int]:
    """For a pool: two checkpointed layers; the gradients' errors, and batches of messages."""
    ring, (tensors, _, dout, _) = Ring(), case.data()

    def layers(q: Tensor, k: Tensor, v: Tensor, attend, remember) -> Tensor:
        first = remember(attend, q, k, v)
        return remember(attend, first, k, v)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ring_attn(q, k, v, causal=True, layout=case.layout)

    def remember(f, *args: Tensor) -> Tensor:
        return checkpoint(f, *args, use_reentrant=use_reentrant)

    whole = [t.clone().requires_grad_() for t in tensors]
    out = layers(
        *whole, lambda q, k, v: dense_attention(q, k, v, causal=True)[0], lambda f, *args: f(*args)
    )
    want = torch.autograd.grad(out, whole, dout)
    at, _ = case.places(ring.rank, ring.size)
    mine = [t[:, at].requires_grad_() for t in tensors]
    send = dist.batch_isend_irecv
    with mock.patch.object(dist, "batch_isend_irecv", side_effect=send) as sent:
        layers(*mine, attend, remember).backward(dout[:, at])
    found = zip(NAMES[2:], mine, want)
    return {name: relative_error(t.grad, w[:, at]) for name, t, w in found}, sent.call_count


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_layers_run_their_messages_again(use_reentrant, pools):
    case = Attention(21, "zigzag", causal=True)
    found, sent = zip(*pools(3).run(checkpointed, case, use_reentrant))
    check(case, 3, found)
    assert max(sent) <= 2 * (2 + 2 + 4)


def in_subgroups(case: Attention, kind: str) -> list[list[dict[str, float]]]:
    """For a pool of four: rings of two at once, each with another sequence."""
    rank = dist.get_rank()
    if kind == "new_group":
        groups = [dist.new_group(ranks) for ranks in ([0, 2], [3, 1])]
        rings = [Ring(groups[0 if rank in (0, 2) else 1])]
    elif kind == "size":
        rings = [Ring(dist.group.WORLD, size=2)]
    else:
        mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        rings = [Ring(mesh["dp"]), Ring(mesh["cp"])]
    found = []
    for ring in rings:
        # every ring its own data: what goes astray is found
        members = ring.gather_notes("members", str(rank).encode())
        members = members[ring.first : ring.first + ring.size]
        mine = replace(case, seed=int(b"".join(members)))
        found.append(errors(mine, ring.rank, ring.size, shard(mine, ring), oracle(mine)))
    return found


@pytest.mark.parametrize("kind", ["new_group", "size", "mesh"])
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_several_rings_at_once_do_not_meet(kind, layout, pools):
    case = Attention(15, layout, causal=True, masked=True)
    for found in zip(*pools(4).run(in_subgroups, case, kind)):
        check(case, 2, found)


def refused_groups() -> list[str]:
    """For a pool of four: what is said of groups that can be no ring."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    said = []
    q = torch.zeros(1, 4, 1, 4)
    for make in (lambda: Ring(mesh), lambda: Ring(size=3), lambda: Ring(size=0)):
        try:
            ring_attn(q, q, q, group=make())
        except ValueError as error:
            said.append(str(error))
    return said


def test_groups_that_can_be_no_ring_are_refused(pools):
    for mesh, three, none in pools(4).run(refused_groups):
        assert "one dimension, got 2" in mesh
        assert "divide the group's 4 ranks, got 3" in three
        assert "got 0" in none


def alone_in_a_group(case: Attention) -> dict[str, float]:
    """For a pool: a ring of one inside an initialised group; no message may be sent."""
    group = [dist.new_group([r]) for r in range(dist.get_world_size())][dist.get_rank()]
    with mock.patch.object(dist, "batch_isend_irecv", side_effect=AssertionError("a message")):
        found = [
            errors(case, 0, 1, shard(case, ring), oracle(case))
            for ring in (Ring(group), Ring(size=1), Ring.alone())
        ]
    return {name: max(each[name] for each in found) for name in NAMES}


def test_a_ring_of_one_in_a_larger_world_sends_nothing(pools):
    check(Attention(9), 1, pools(2).run(alone_in_a_group, Attention(9, causal=True)))


def before_and_after(rank: int, folder: str) -> list[list[dict[str, float]]]:
    """Three processes: alone, then a ring of three, alone again, then two of them a ring."""
    cases = [Attention(11, "zigzag", causal=True, masked=True)]

    def begin(name: str, size: int) -> None:
        dist.init_process_group(
            "gloo", rank=rank, world_size=size, init_method=f"file://{folder}/{name}"
        )

    assert not dist.is_initialized()
    found = [process_case(cases)[0]]
    begin("three", 3)
    found.append(process_case(cases)[0])
    dist.destroy_process_group()
    found.append(process_case(cases)[0])
    if rank < 2:
        begin("two", 2)
        found.append(process_case(cases)[0])
        dist.destroy_process_group()
    return found


def test_groups_may_begin_and_end_between_calls(tmp_path):
    by_rank = alone(before_and_after, 3, str(tmp_path))
    assert [len(found) for found in by_rank] == [4, 4, 3]
    for found in by_rank:
        check(Attention(), 3, found)
