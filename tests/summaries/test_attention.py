"""Near exactly, far in summary: equal to the dense reference on any ring, and causal for real."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ring_attention_pytorch import default_attention
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.summaries import SummaryPlan, summarize, summary_attn
from tests.support import threads
from tests.support.reference import relative_error
from tests.support.summary_cases import CASES, PACKED, Case, check_in_processes, check_in_threads

LAYOUTS = ("contiguous", "striped", "zigzag")
RINGS = [(1, "zigzag"), *itertools.product((2, 3, 4), LAYOUTS)]


@pytest.mark.parametrize(("size", "layout"), RINGS)
def test_every_ring_and_layout_gives_the_dense_results(size: int, layout: str) -> None:
    check_in_threads(Case(layout=layout), size)
    check_in_threads(replace(PACKED, layout=layout), size)


@pytest.mark.parametrize("name", CASES)
def test_every_option_gives_the_dense_results(name: str) -> None:
    for size, layout in ((1, "contiguous"), (3, "striped"), (4, "zigzag")):
        check_in_threads(replace(CASES[name], layout=layout), size)


def test_ranks_that_are_processes_give_the_dense_results(pools) -> None:
    cases = [replace(PACKED, layout=layout) for layout in LAYOUTS]
    check_in_processes(cases, pools(3))


# --- what it must equal, and what it must not see ---


def test_with_cells_of_one_token_it_is_causal_attention() -> None:
    data = Case(length=20).data()
    q, k, v = (data[name] for name in "qkv")
    plan = SummaryPlan.make(q, k, v, window=0, stride=1)
    out = summary_attn(q, k, v, *summarize(k, v, plan=plan), plan=plan)
    assert plan.near.visible.window == 0  # only the token itself is near
    assert relative_error(out, default_attention(q, k, v, causal=True)) < 1e-14


@pytest.mark.parametrize("size", [1, 2])
def test_no_token_changes_anything_before_it(size: int) -> None:
    """Each token is perturbed: earlier results keep every bit, those that see it do not."""
    case = Case(
        length=23, batch=1, window=3, stride=4, block=6, layout="zigzag", distance=11, select=1
    )

    def results(moved: int | None) -> Tensor:
        data = case.data()
        if moved is not None:
            for name in "kv":
                data[name][:, moved] += 1.0

        def rank_main(ring: Ring) -> Tensor:
            at = case.at(ring.rank, size)
            q, k, v = (data[name][:, at] for name in "qkv")
            plan = SummaryPlan.make(q, k, v, **case.rule, layout=case.layout, group=ring)
            return summary_attn(q, k, v, *summarize(k, v, plan=plan), plan=plan)

        out = torch.empty(*data["dout"].shape, dtype=torch.float64)
        for rank, mine in enumerate(threads.run(size, rank_main)[0]):
            out[:, case.at(rank, size)] = mine
        return out

    whole = results(None)
    for token in range(case.length):
        changed = (results(token) != whole).flatten(2).any(-1)[0]
        assert changed.nonzero().flatten().tolist() == sees(case, token)


def sees(case: Case, token: int) -> list[int]:
    """The queries that see a token, exactly or in any summary that it is in."""
    found = []
    for query in range(token, case.length):
        start = (query - case.window) // case.stride * case.stride
        oldest = (query - case.distance) // case.stride * case.stride
        ends = range(max(oldest, 0) + case.stride, start + 1, case.stride)
        if token >= start or any(end - case.block <= token < end for end in ends):
            found.append(query)
    return found


@pytest.mark.parametrize("select", [0, 2])
def test_autocast_casts_inputs_and_nothing_else(select: int) -> None:
    """Results are those of inputs in bfloat16, of which all is summed in float32."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 60, 2, 16, generator=draw)
    bias, weights, queries = (torch.randn(2, *d, generator=draw) for d in ((), (4,), (16,)))
    found = []
    for autocast in (False, True):
        qkv = [t.bfloat16() for t in (q, k, v)]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            plan = SummaryPlan.make(*qkv, window=9, stride=4, select=select)
            pools = dict(weights=(weights, None), queries=(queries, None))
            far = summarize(*qkv[1:], plan=plan, **pools)
            found.append((*far, summary_attn(*qkv, *far, plan=plan, bias=bias)))
    assert all(map(torch.equal, *found))
