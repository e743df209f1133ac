"""Gradients of a call: slopes, whichever are asked for, however tensors lie; in little memory."""

from contextlib import nullcontext
from itertools import product

import pytest
import torch
from torch import Tensor

from ring_attention_pytorch.functional import ring_attn
from ring_attention_pytorch.geometry.layouts import LAYOUTS
from ring_attention_pytorch.ranks.ring import Ring
from tests.support import threads
from tests.support.cases import CPU_KERNELS, NAMES, Attention, check, errors, oracle, results
from tests.support.counted import Live
from tests.support.reference import dense_attention, relative_error
from tests.support.sampling import grid


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


@grid(
    "place, kernel",
    product((("contiguous", 2), ("striped", 3), ("zigzag", 2)), CPU_KERNELS),
    always=3,
    drawn=1,
)
def test_gradients_are_the_slopes_of_the_results(place, kernel):
    layout, size = place
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


@grid("layout, backward", product(sorted(LAYOUTS), (False, True)), always=4, drawn=2)
def test_memory_does_not_grow_with_the_ring(layout, backward):
    def most(size: int) -> int:
        shard_length, d = 16, 64
        case = Attention(shard_length * size, layout, causal=True, batch=1, d=d, d_v=d)
        tensors, _, dout, _ = case.data()

        def main(ring: Ring) -> int:
            at, _ = case.places(ring.rank, size)
            mine, cotangent = [t[:, at].requires_grad_() for t in tensors], dout[:, at]
            # one rank counts: PyTorch may crash where several threads look up a mode's rules
            live = Live()
            with live if ring.rank == size - 1 else nullcontext():
                out = ring_attn(*mine, causal=True, layout=layout, group=ring, kernel="eager")
                if backward:
                    torch.autograd.grad(out, mine, cotangent)
            return live.most

        return threads.run(size, main)[0][-1]

    keys = 16 * 2 * (64 + 64) * 8  # bytes of one rank's k and v
    # a sent block dies when its receiver has taken it: one more or less, but not one a hop
    small, large = most(4), most(12)
    assert large <= small + keys
    assert small <= (15 if backward else 8) * keys


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
