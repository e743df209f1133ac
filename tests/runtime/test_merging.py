"""Parts that are merged are dense attention to all keys, and so are all gradients."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from ring_attention_pytorch import merge_attention
from ring_attention_pytorch.runtime import merging
from tests.support.interpreter import needs_triton
from tests.support.reference import dense_attention, relative_error

B, N, M, H, D, D_V = 3, 6, 9, 2, 4, 5
# borders of parts: the first queries see no key of some, nobody one of an empty one
CUTS = {"one": (0, M), "two": (0, 4, M), "an empty one": (0, 4, 4, M), "all": (*range(M + 1),)}
Drawn = tuple[list[Tensor], Tensor, Tensor, Tensor, Tensor]


def drawn() -> Drawn:
    """q, k, v; sinks; which keys are seen: of one sample none, of another not the first; dout."""
    draw = torch.Generator().manual_seed(0)
    shapes = (B, N, H, D), (B, M, H, D), (B, M, H, D_V), (H,), (B, N, H, D_V), (B, H, N)
    *qkv, sinks, dout, dlse = (torch.randn(s, generator=draw, dtype=torch.float64) for s in shapes)
    mask = torch.ones(B, M, dtype=torch.bool)
    mask[1], mask[2, :5] = False, False
    return [t.mul_(3).requires_grad_() for t in qkv], sinks.requires_grad_(), mask, dout, dlse


def dense(qkv: list[Tensor], keys: slice, mask: Tensor, sinks: Tensor | None) -> list[Tensor]:
    q, k, v = qkv
    at = torch.arange(1, N + 1), torch.arange(M)[keys]
    options = dict(causal=True, positions=at, key_mask=mask[:, keys], sinks=sinks)
    return [*dense_attention(q, k[:, keys], v[:, keys], **options)]


def grads(found: list[Tensor], leaves: list[Tensor], dout: Tensor, dlse: Tensor) -> list[Tensor]:
    along = dout.to(found[0]), dlse.to(found[1]).masked_fill(found[1] == -torch.inf, 0.0)
    return list(torch.autograd.grad(found, leaves, along))


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("sunk", ["no sinks", "of all", "of one part"])
def test_merged_parts_are_dense_attention_and_so_are_gradients(cuts, sunk):
    qkv, sinks, mask, dout, dlse = drawn()
    wanted = dense(qkv, slice(M), mask, None if sunk == "no sinks" else sinks)
    parts = []
    for number, ends in enumerate(pairwise(cuts)):
        of_part = sinks if sunk == "of one part" and number == 0 else None
        out, lse = dense(qkv, slice(*ends), mask, of_part)
        unseen = (lse == -torch.inf).transpose(1, 2)[..., None]
        parts += [out.masked_fill(unseen, torch.nan), lse]  # which is not read
    found = list(merge_attention(*parts, sinks=sinks if sunk == "of all" else None))
    assert relative_error(found[0], wanted[0]) < 1e-14
    assert relative_error(found[1], wanted[1]) < 1e-14
    leaves = qkv if sunk == "no sinks" else [*qkv, sinks]
    got, want = (grads(each, leaves, dout, dlse) for each in (found, wanted))
    for mine, theirs in zip(got, want):
        assert relative_error(mine, theirs) < 1e-13


def test_merging_can_be_differentiated_twice():
    draw = torch.Generator().manual_seed(0)
    out, other = (torch.randn(1, 2, 1, 3, generator=draw).double() for _ in range(2))
    lse, far = (torch.randn(1, 1, 2, generator=draw).double() for _ in range(2))
    far[..., 0] = -torch.inf  # of which finite differences tell nothing
    leaves = [t.requires_grad_() for t in (out, lse, other, torch.zeros(1).double())]

    def merged(out, lse, other, sinks):
        return merge_attention(out, lse, other, far, sinks=sinks)

    assert torch.autograd.gradcheck(merged, leaves, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(merged, leaves)


def test_a_part_that_is_given_twice_has_the_gradient_of_each_place():
    out, lse = torch.ones(1, 1, 1, 2).requires_grad_(), torch.zeros(1, 1, 1).requires_grad_()
    parts, along = (out, lse, out, lse), (torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1))
    found = merging._differentiable([False, True, False, True, False], None, parts, *along)
    assert found[1].tolist() == found[3].tolist() == [[[[0.5, 0.5]]]]


@pytest.mark.parametrize("far", [0.0, 90.0, 1e4, 1e30])
def test_nothing_overflows_however_far_two_lse_are_apart(far):
    out, lse = torch.ones(1, 1, 1, 2, requires_grad=True), torch.zeros(1, 1, 1, requires_grad=True)
    found = merge_attention(out, lse, torch.zeros(1, 1, 1, 2), lse.detach() + far)
    torch.autograd.backward(found, [torch.ones_like(t) for t in found])
    weight = torch.sigmoid(torch.tensor(-far).double()).float()
    torch.testing.assert_close(found[0], weight.expand(1, 1, 1, 2))
    torch.testing.assert_close(out.grad, weight.expand(1, 1, 1, 2))
    assert lse.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_results_have_the_dtypes_of_ring_attention(dtype):
    draw = torch.Generator().manual_seed(0)
    wide = torch.promote_types(dtype, torch.float32)
    outs = [torch.randn(2, 3, 4, 5, generator=draw).to(dtype) for _ in range(5)]
    lses = [torch.randn(2, 4, 3, generator=draw).to(wide) for _ in range(5)]
    given = [t for part in zip(outs, lses) for t in part]
    out, lse = merge_attention(*given)
    assert (out.dtype, lse.dtype) == (dtype, wide)
    weights = torch.stack(lses).double().softmax(0).transpose(2, 3)[..., None]
    want = (weights * torch.stack(outs).double()).sum(0)
    assert relative_error(out, want) < torch.finfo(dtype).eps
    first = [t.transpose(1, 2) if t.ndim == 4 else t for t in given]
    swapped = merge_attention(*first, heads_first=True)
    assert torch.equal(swapped[0].transpose(1, 2), out)
    assert torch.equal(swapped[1], lse)


OUT, LSE = torch.zeros(1, 3, 2, 4), torch.zeros(1, 2, 3)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ((), "got 0 tensors"),
        ((OUT, LSE, OUT), "got 3 tensors"),
        ((OUT[0], LSE), "out must be floating"),
        ((OUT, LSE.mT), r"lse \[b, h, n\] of part 0 must be \[1, 2, 3\]"),
        ((OUT, LSE.bfloat16()), "must be .* in torch.float32"),
        ((OUT, LSE, OUT[:, 1:], LSE), "of part 1 must be"),
        ((OUT, LSE, OUT.double(), LSE), "of part 1 must be"),
    ],
)
def test_parts_that_are_not_of_the_same_queries_are_refused(parts, said):
    with pytest.raises(ValueError, match=f"merge_attention: .*{said}"):
        merge_attention(*parts)


def test_sinks_that_are_not_of_each_head_are_refused():
    with pytest.raises(ValueError, match=r"merge_attention: sinks must be floating \[2\]"):
        merge_attention(OUT, LSE, sinks=torch.zeros(3))


def worst_of_kernels(number: int, dtype: torch.dtype) -> list[str]:
    """Results of our kernels, of so many parts, that are not the plain ones' in float64."""
    from ring_attention_pytorch.runtime._triton_rowwise import fused_merge_

    merging.merge_ = fused_merge_
    draw = torch.Generator().manual_seed(number)
    outs = [torch.randn(2, 7, 3, 6, generator=draw).to(dtype) for _ in range(number)]
    outs[0] = outs[0].transpose(1, 2).contiguous().transpose(1, 2)
    lses = [torch.randn(2, 3, 7, generator=draw) * 5 for _ in range(number)]
    lses[-1][:, 1] = -torch.inf
    lses[0][1] = -torch.inf
    outs[-1][:, :, 1] = torch.nan
    dout, dlse = torch.randn(2, 7, 3, 6, generator=draw), torch.randn(2, 3, 7, generator=draw)
    wrong, eps = [], torch.finfo(dtype).eps
    for sinks in (None, torch.randn(3, generator=draw)):
        parts = [t for part in zip(outs, lses) for t in part]
        given = [*parts, *([] if sinks is None else [sinks])]
        found, wanted = [], []
        for wide, results in ((False, found), (True, wanted)):
            leaves = [(t.double() if wide else t).detach().requires_grad_() for t in given]
            own, sunk = leaves[: 2 * number], (leaves[2 * number :] or [None])[0]
            both = merging._plain(own, sunk) if wide else merging._Merge.apply(sunk, *own)
            results += [*both, *grads(both, leaves, dout, dlse)]
        for i, (got, want) in enumerate(zip(found, wanted)):
            if not relative_error(got, want) < 16 * eps:
                wrong.append(f"{i} of {len(found)}: {relative_error(got, want)}")
    return wrong


@needs_triton
@pytest.mark.parametrize(("number", "dtype"), [(2, torch.float16), (5, torch.float32)])
def test_kernels_merge_and_differentiate_as_plain_pytorch_does(interpreted, number, dtype):
    assert interpreted.submit(worst_of_kernels, number, dtype).result() == []
