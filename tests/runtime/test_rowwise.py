"""Parts merged by lse, and summed, are dense attention in float64; gradients too."""

from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from ring_attention_pytorch.runtime.rowwise import merge, merge_, merge_sinks_
from tests.support.interpreter import needs_triton
from tests.support.kernel_cases import far
from tests.support.reference import dense_attention, relative_error

# --- merging ---


LSES = [-torch.inf, -1e4, -50.0, 0.0, 50.0, 50.1, 1e4]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("a", LSES)
@pytest.mark.parametrize("b", LSES)
def test_merging_survives_any_pair_of_lse(a, b, dtype):
    out, part = torch.randn(1, 1, 1, 4, dtype=dtype), torch.randn(1, 1, 1, 4, dtype=dtype)
    out, part = (t * float(x > -torch.inf) for t, x in ((out, a), (part, b)))
    lse, part_lse = (torch.full((1, 1, 1), x, dtype=dtype) for x in (a, b))
    exact_lse = torch.logaddexp(lse.double(), part_lse.double())
    # of the two lse's difference: far from 0 their logarithm of a sum is too coarse
    weight = 0.0 if b == -torch.inf else torch.sigmoid(part_lse.double() - lse.double()).item()
    want = out.double() * (1 - weight) + part.double() * weight
    before = part.clone(), part_lse.clone()
    merge_(out, lse, part, part_lse)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(lse.double(), exact_lse, rtol=2 * eps, atol=2 * eps)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=60 * eps)
    assert torch.equal(part, before[0])
    assert torch.equal(part_lse, before[1])


def test_merging_in_any_order_gives_the_same():
    parts = [
        (torch.randn(2, 3, 4, 5).double(), torch.randn(2, 4, 3).double() * 30) for _ in range(6)
    ]
    results = []
    for order in (range(6), reversed(range(6)), (3, 0, 5, 1, 4, 2)):
        out, lse = torch.zeros(2, 3, 4, 5).double(), torch.full((2, 4, 3), -torch.inf).double()
        for i in order:
            merge_(out, lse, *parts[i])
        results.append((out, lse))
    for out, lse in results[1:]:
        assert relative_error(out, results[0][0]) < 1e-14
        assert relative_error(lse, results[0][1]) < 1e-14


@pytest.mark.parametrize("where", range(4))
def test_merging_does_not_hide_a_nan(where):
    given = [
        torch.zeros(1, 1, 1, 2),
        torch.zeros(1, 1, 1),
        torch.zeros(1, 1, 1, 2),
        torch.zeros(1, 1, 1),
    ]
    given[where].fill_(torch.nan)
    merge_(*given)
    assert given[0].isnan().all()
    assert given[1].isnan().all() == (where in (1, 3))


def wrong_sums(dtype: torch.dtype) -> list[tuple]:
    """List sums that are not rounded once, of parts of several layouts and dtypes."""
    from ring_attention_pytorch.runtime import _triton_rowwise

    _triton_rowwise._ELEMENTS = 32  # so that heads of some are one row, of others not
    draw, found = torch.Generator().manual_seed(0), []
    for n, number, fresh, heads in product((0, 1, 7), (1, 9, 17), (False, True), (3, 7)):
        for alike in (True, False):
            several = [torch.randn(2, n + 3, heads, 6, generator=draw) for _ in range(number + 1)]
            parts = [t[:, 1 : n + 1].to(dtype) for t in several]
            if not alike:
                parts[::3] = [t[:, 1 : n + 1] for t in several[::3]]
                parts[1::3] = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in parts[1::3]]
            total = parts.pop().float()
            want = sum((part.double() for part in parts), total.double() * (not fresh))
            _triton_rowwise.fused_add_(total, *parts, fresh=fresh)
            if not torch.allclose(total.double(), want, atol=1e-5):
                found.append((n, number, fresh, heads, alike))
    return found


def wrong_far_away(dim: int) -> list[str]:
    """List passes over rows that go wrong where indices times strides pass 32 bits."""
    from ring_attention_pytorch.runtime import _triton_rowwise

    draw = torch.Generator().manual_seed(0)
    x, y, z = (torch.randn(1, 5, 3, 6, generator=draw).half() for _ in range(3))
    lse, lse_x = (torch.randn(1, 3, 5, generator=draw) for _ in range(2))
    at = far(x, dim)
    total, merged = z.clone(), z.float()
    _triton_rowwise.fused_add_(total, at, y, fresh=False)
    _triton_rowwise.fused_merge_(merged, new := lse.clone(), at, far(lse_x, (0, 2, 1, 1)[dim]))
    weight = torch.sigmoid(lse_x - lse).transpose(1, 2).unsqueeze(-1)
    results = {
        "add_": (total, z + x + y),
        "merge_": (merged, z.float().lerp(x.float(), weight)),
        "merge_'s lse": (new, torch.logaddexp(lse, lse_x)),
        "sum_of_products": (
            _triton_rowwise.fused_sum_of_products(y, at),
            (x.float() * y.float()).sum(-1).transpose(1, 2),
        ),
    }
    return [name for name, (got, want) in results.items() if not got.allclose(want, atol=2e-3)]


@needs_triton
@pytest.mark.parametrize("dim", [1, 2, 3])
def test_passes_over_rows_reach_beyond_32_bits(interpreted, dim):
    assert interpreted.submit(wrong_far_away, dim).result() == []


@needs_triton
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.thorough)]
)
def test_parts_are_summed_however_they_lie(interpreted, dtype):
    assert interpreted.submit(wrong_sums, dtype).result() == []


B, N, M, H, D, D_V = 3, 6, 9, 2, 4, 5
# borders of parts: one; none of whose keys the first queries see; without a key; one key each
CUTS = {"one": (0, M), "two": (0, 4, M), "an empty one": (0, 4, 4, M), "all": range(M + 1)}


def parts_of(cuts, qkv: list[Tensor], mask: Tensor, sinks: Tensor | None = None):
    """Dense attention to each part; causal, so that early queries see nothing of later keys."""
    q, k, v = qkv
    found = []
    for start, stop in pairwise(cuts):
        at = torch.arange(1, N + 1), torch.arange(start, stop)
        kv = k[:, start:stop], v[:, start:stop]
        options = dict(causal=True, positions=at, key_mask=mask[:, start:stop], sinks=sinks)
        found.append(dense_attention(q, *kv, **options))
    return found


def drawn() -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """q, k and v; the second sample sees no key at all, the third none of the first five."""
    draw = torch.Generator().manual_seed(0)
    shapes = (B, N, H, D), (B, M, H, D), (B, M, H, D_V), (B, N, H, D_V), (B, N, H)
    *qkv, dout, dlse = (torch.randn(s, generator=draw, dtype=torch.float64) for s in shapes)
    mask = torch.ones(B, M, dtype=torch.bool)
    mask[1], mask[2, :5] = False, False
    return [t.mul_(3).requires_grad_() for t in qkv], mask, dout, dlse


def by_query(found: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Lse [b, h, n] as [b, n, h], like out."""
    return found[0], found[1].transpose(1, 2)


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_merged_parts_are_dense_attention_and_so_are_gradients(cuts):
    qkv, mask, dout, dlse = drawn()
    wanted = by_query(parts_of((0, M), qkv, mask)[0])
    found = merge([by_query(part) for part in parts_of(cuts, qkv, mask)])
    blind = wanted[1] == -torch.inf
    assert blind[1].all()
    assert torch.equal(found[1] == -torch.inf, blind)
    assert relative_error(found[0], wanted[0]) < 1e-14
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-14, atol=1e-14)
    cotangents = dout, dlse.masked_fill(blind, 0.0)
    got, want = (torch.autograd.grad(each, qkv, cotangents) for each in (found, wanted))
    for of_found, of_wanted in zip(got, want):
        assert relative_error(of_found, of_wanted) < 1e-13


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_parts_of_any_dtype_are_merged_in_wide_numbers(dtype):
    qkv, mask, *_ = drawn()
    parts = [by_query(part) for part in parts_of(CUTS["all"], qkv, mask)]
    parts = [(out.detach().to(dtype), lse.detach().to(dtype)) for out, lse in parts]
    weights = torch.stack([lse for _, lse in parts]).double().exp()
    total = weights.sum(0)
    outs = torch.stack([out for out, _ in parts]).double()
    want = (weights[..., None] * outs).sum(0) / total.clamp(min=1e-300)[..., None]
    out, lse = merge(parts)
    wide = torch.promote_types(dtype, torch.float32)
    assert (out.dtype, lse.dtype) == (wide, wide)
    assert relative_error(out.double(), want) < 4 * torch.finfo(wide).eps
    eps = 4 * torch.finfo(wide).eps
    torch.testing.assert_close(lse.double(), total.log(), rtol=eps, atol=eps)


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("sunk", [False, True])
def test_parts_merged_in_place_with_sinks_are_dense_attention(cuts, sunk):
    qkv, mask, *_ = drawn()
    sinks = torch.tensor([-2.0, 3.0], dtype=torch.float64) if sunk else None
    with torch.no_grad():
        want = parts_of((0, M), qkv, mask, sinks)[0]
        (out, lse), *others = parts_of(cuts, qkv, mask)
        merge_(out, lse, *(t for part in others for t in part))
        if sinks is not None:
            merge_sinks_(out, lse, sinks)
    assert relative_error(out, want[0]) < 1e-14
    torch.testing.assert_close(lse, want[1], rtol=1e-14, atol=1e-14)
