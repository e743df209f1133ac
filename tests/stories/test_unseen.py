"""NaN and inf in keys and values that no query may see: nothing of them is anywhere in results."""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from ring_attention_pytorch import (
    RingPlan,
    SummaryPlan,
    default_attention,
    ring_attn,
    soft_topk,
    summarize,
    summary_attn,
)
from ring_attention_pytorch.kernels._configs import Config, configured
from ring_attention_pytorch.ranks.ring import Ring
from tests.support.interpreter import needs_triton
from tests.support.random_cases import problem
from tests.support.random_draw import Case
from tests.support.sampling import grid
from tests.support.unseen import SEEN, cached, rows_of_nan

PLACED = Case(
    seed=5, size=2, heads=4, key_heads=2, d=8, d_v=8, dtype="float32", causal=True, window=2,
    queries=(3, 2), keys=(9, 14), query_at=tuple(range(6, 11)), key_at=tuple(range(23)),
)  # fmt: skip
MASKED = Case(
    seed=5, size=3, batch=2, length=23, heads=4, key_heads=2, d=8, d_v=8, dtype="float32",
    causal=True, layout="zigzag", masked="some", sinks=True, lse="differentiated",
)  # fmt: skip
KINDS = {
    "out of reach": PLACED,
    "masked": MASKED,
    "nothing seen": replace(MASKED, masked="none"),
    "masked, heads swapped": replace(MASKED, size=2, ulysses=2),
    "masked anew": replace(MASKED, plan="replaced"),
    "masked, shared memory": replace(MASKED, transport="shared"),
    "masked, few tokens": replace(MASKED, transport="together"),
    "masked, a ring": replace(MASKED, transport="ring", window=3),
    "both": replace(PLACED, masked="some"),
    "decoding": Case(queries=(2,), keys=(9,), decode=True, learned=(), masked="some"),
}


@grid(
    "name, kernel, unseen",
    product(KINDS, ("eager", "sdpa"), ("nan", "inf")),
    always=2 * len(KINDS),
    drawn=4,
)
def test_what_no_query_sees_may_be_anything(name: str, kernel: str, unseen: str) -> None:
    assert not problem(replace(KINDS[name], kernel=kernel, unseen=unseen))


def test_what_is_out_of_reach_is_0_for_kernels() -> None:
    q, k = torch.randn(1, 5, 2, 4), torch.full((1, 9, 2, 4), torch.nan)
    given = dict(query_positions=torch.arange(5) + 3, key_positions=torch.arange(9))
    plan = RingPlan.make(q, k, k, causal=True, window=1, **given, group=Ring.alone())
    block = plan.keys(k, k)
    for t in block[:2]:
        assert t.isnan().all(-1).all(-1)[0].tolist() == [i in range(2, 8) for i in range(9)]
        assert (t[:, :2] == 0).all()
    assert torch.equal(torch.isnan(block.k), torch.isnan(block.v))


def by_triton(tma: bool, case: Case) -> dict[str, str]:
    """In blocks of which most are partly seen; by descriptors, which know no tiles."""
    config = Config(16, 16, 4, 1, tma=tma)
    with configured(forward=config, keys=config, queries=config):
        return problem(replace(case, size=1, kernel="triton", unseen="nan"))


@needs_triton
@grid("tma", [True, False], always=1, drawn=1)
def test_triton_reads_nothing_of_it(interpreted: ProcessPoolExecutor, tma: bool) -> None:
    cases = MASKED, replace(PLACED, queries=(5,), keys=(23,), d=16, d_v=16)
    found = [interpreted.submit(by_triton, tma, case) for case in cases]
    assert not any(each.result() for each in found)


def check_rows_of_nan(kernel: str) -> None:
    for options, rows in SEEN:
        seen = torch.tensor([row in rows for row in range(9)])
        bad, other_head = rows_of_nan(kernel, "k", options)
        assert torch.equal(bad, seen)
        assert not other_head.any()
        bad, other_head = rows_of_nan(kernel, "v", options)  # others may be NaN, by 0 * NaN
        assert bad[seen].all()
        assert not other_head.any()


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_queries_that_see_nan_are_nan_and_of_a_key_no_others(kernel: str) -> None:
    check_rows_of_nan(kernel)


@needs_triton
def test_queries_that_see_nan_are_nan_by_triton(interpreted: ProcessPoolExecutor) -> None:
    interpreted.submit(check_rows_of_nan, "triton").result()


@pytest.mark.parametrize("window", [None, 4])
def test_what_a_cache_hides_may_be_anything(window: int | None) -> None:
    assert cached("eager", window) < 1e-5


@needs_triton
@pytest.mark.parametrize("window", [None, 4])
def test_kernels_of_a_cache_read_nothing_of_it(
    interpreted: ProcessPoolExecutor, window: int | None
) -> None:
    assert interpreted.submit(cached, "triton", window).result() < 1e-5


def summaries(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    plan = SummaryPlan.make(*leaves, window=8, stride=4, select=1, key_mask=mask)
    out = summary_attn(*leaves, *summarize(*leaves[1:], plan=plan), plan=plan)
    return [out, *torch.autograd.grad(out.sin().sum(), leaves)]


def regular(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = default_attention(*leaves, mask, causal=True)
    return [out, *torch.autograd.grad(out.sin().sum(), leaves)]


def second_order(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = ring_attn(*leaves, key_mask=mask, kernel="eager")
    grads = torch.autograd.grad(out.sin().sum(), leaves, create_graph=True)
    return [*grads, *torch.autograd.grad(sum(g.cos().sum() for g in grads), leaves)]


@pytest.mark.parametrize("function", [summaries, regular, second_order])
def test_other_attention_looks_at_nothing_of_it(function) -> None:
    q, k, v = torch.randn(1, 40, 4, 8), torch.randn(1, 40, 2, 8), torch.randn(1, 40, 2, 8)
    mask = torch.ones(1, 40, dtype=torch.bool)
    mask[:, 5:9] = mask[:, 30:] = False
    hide = partial(Tensor.masked_fill, mask=~mask[..., None, None])
    want = function(q, hide(k, value=0.5), hide(v, value=0.5), mask)
    for value in (torch.nan, torch.inf):
        found = function(q, hide(k, value=value), hide(v, value=value), mask)
        assert all(map(torch.equal, found, want))


def test_soft_topk_looks_at_no_score_that_is_masked() -> None:
    mask = torch.arange(9) < torch.tensor([[7], [4]])
    s, dout = torch.randn(2, 2, 9, dtype=torch.float64)
    found = []
    for value in (0.0, torch.nan):
        scores = s.masked_fill(~mask, value).requires_grad_()
        gates = soft_topk(scores, 3, mask=mask)
        found.append((gates, *torch.autograd.grad(gates, scores, dout)))
    assert all(map(torch.equal, *found))
