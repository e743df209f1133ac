"""Near exactly, far in summary: equal to the dense reference on any ring, and causal for real."""

import doctest
import importlib
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ring_attention_pytorch import default_attention, ring_attn
from ring_attention_pytorch.geometry.layouts import all_segments, segment_positions
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.schedule.hardware import H200
from ring_attention_pytorch.schedule.policy import is_few
from ring_attention_pytorch.summaries import (
    Summaries,
    SummaryAttention,
    SummaryPlan,
    select,
    summarize,
    summary_attn,
)
from ring_attention_pytorch.summaries.cells import (
    Cells,
    Places,
    chunks,
    edge_keys,
    edge_queries,
    shares,
)
from tests.support import threads
from tests.support.reference import relative_error
from tests.support.summary_cases import (
    D_V,
    KEY_HEADS,
    Case,
    D,
    Module,
    check_in_processes,
    check_in_threads,
    check_modules_in_threads,
    decoded,
    separate_rings,
)
from tests.support.summary_reference import summary_attention

LAYOUTS = ("contiguous", "striped", "zigzag")
RINGS = [(1, "zigzag"), *itertools.product((2, 3, 4), LAYOUTS)]
PACKED = Case(documents=True, masked=True, block=5)
CASES = {
    "overlapping blocks": Case(block=8, masked=True),
    "bounded": Case(distance=11, documents=True),
    "window of whole cells": Case(window=6, transport="gather"),
    "attention pooling": Case(pooled="attention", documents=True, masked=True, block=4),
    "selected": Case(select=2),
    "tied": Case(select=2, level=True, masked=True),
    "selected of few": Case(select=3, documents=True, masked=True, block=5, distance=14),
    "gates": Case(gated=True, documents=True),
    "nothing far": Case(window=4, stride=2, block=3, distance=4),
    "shorter than the window": Case(length=9, window=20),
    "one token each": Case(length=3, window=0, stride=1, block=1),
}


@pytest.mark.parametrize(("size", "layout"), RINGS)
def test_every_ring_and_layout_gives_the_dense_results(size: int, layout: str) -> None:
    check_in_threads(Case(layout=layout), size)
    check_in_threads(replace(PACKED, layout=layout), size)


@pytest.mark.parametrize("name", CASES)
def test_every_option_gives_the_dense_results(name: str) -> None:
    for size, layout in ((1, "contiguous"), (3, "striped"), (4, "zigzag")):
        check_in_threads(replace(CASES[name], layout=layout), size)


@pytest.mark.parametrize("name", CASES)
def test_how_long_the_far_part_takes_is_told_by_its_documents(name: str) -> None:
    """Whose tokens its rows and cells are not."""

    def main(ring: threads.ThreadRing) -> bool:
        for layout in LAYOUTS:
            case = replace(CASES[name], layout=layout)
            at, data = case.at(ring.rank, ring.size), case.data()
            masks = {mask: t[:, at] for mask, t in case.masks().items()}
            mine = [data[each][:, at] for each in "qkv"]
            far = SummaryPlan.make(*mine, **case.rule, **masks, layout=layout, group=ring).far
            if far is not None and not is_few(far.blocks, far.chosen.shape, H200):
                return False
        return True

    assert all(threads.run(2, main)[0])


def test_cells_are_chosen_and_read_for_some_queries_at_a_time(monkeypatch) -> None:
    monkeypatch.setattr(select, "_NUMBERS", 300)
    check_in_threads(replace(CASES["selected of few"], layout="zigzag"), 2)


def test_ranks_that_are_processes_give_the_dense_results(pools) -> None:
    cases = [replace(PACKED, layout=layout) for layout in LAYOUTS]
    check_in_processes(cases, pools(3))


# --- what it must equal, and what it must not see ---


def test_with_cells_of_one_token_it_is_causal_attention() -> None:
    data = Case(length=20).data()
    q, k, v = (data[name] for name in "qkv")
    plan = SummaryPlan.make(q, k, v, window=0, stride=1)
    out = summary_attn(q, k, v, *summarize(k, v, plan=plan), plan=plan)
    assert plan.visible.window == 0  # only the token itself is near
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


@pytest.mark.parametrize("rule", [Cells(5, 3, 3), Cells(0, 4, 4), Cells(7, 1, 1), Cells(9, 3, 3)])
def test_each_earlier_token_is_covered_exactly_once(rule: Cells) -> None:
    places = Places.of(rule, None, 1, 40)
    cells, tokens, _ = shares(rule, places.held(torch.arange(40)))
    for query in range(40):
        start = max(0, rule.row(query) * rule.stride)
        seen = tokens[cells < rule.row(query)].tolist() + list(range(start, query + 1))
        assert seen == list(range(query + 1))
        assert query - start < rule.window + rule.stride


# --- what travels ---


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("transport", ["ring", "gather"])
def test_only_summaries_travel_and_keys_that_are_near(layout: str, transport: str) -> None:
    """Beyond what a window sends: parts of cells, N / stride keys, few keys at windows' ends."""
    case, size = Case(length=96, batch=1, layout=layout, window=8, stride=4, block=4), 3
    rule = Cells(8, 4, 4)

    def rank_main(ring: Ring) -> list[int]:
        data = case.data()
        q, k, v = (data[name][:, case.at(ring.rank, size)] for name in "qkv")
        options = dict(layout=layout, group=ring, transport=transport)
        plan = SummaryPlan.make(q, k, v, **case.rule, **options)
        counts = [ring.hub.sent_bytes[ring.rank]]
        far = summarize(k, v, plan=plan)
        counts.append(ring.hub.sent_bytes[ring.rank])
        ring_attn(q, k, v, causal=True, window=rule.window, **options)
        counts.append(ring.hub.sent_bytes[ring.rank])
        summary_attn(q, k, v, *far, plan=plan)
        counts.append(ring.hub.sent_bytes[ring.rank])
        return torch.tensor(counts).diff().tolist()

    got, _ = threads.run(size, rank_main)
    pooled, window, both = (sum(of_ranks) for of_ranks in zip(*got))
    places, cells = Places.of(rule, None, 1, case.length), rule.count(case.length)
    held = [
        places.held(segment_positions(of_rank))
        for of_rank in all_segments(layout, size, case.length)
    ]
    bounds, sent, edges = chunks(cells, size), 0, 0
    for rank, mine in enumerate(held):
        touched = shares(rule, mine)[0].unique()
        sent += len([c for c in touched.tolist() if not bounds[rank] <= c < bounds[rank + 1]])
        for theirs in held[:rank] + held[rank + 1 :]:
            edges += len(
                {*edge_keys(rule, mine)[0].tolist()} & {*edge_queries(rule, theirs)[0].tolist()}
            )
    assert pooled == sent * KEY_HEADS * (D + D_V + 2) * 8
    a_key = KEY_HEADS * (D + D_V) * 8
    at_most = (size - 1) * cells + edges * (rule.stride - 1)
    assert 0 < both - window <= at_most * a_key
    assert cells <= case.length / case.stride


def test_what_the_plan_was_not_made_for_is_not_summarised() -> None:
    k, v = torch.randn(2, 30, 2, 6), torch.randn(2, 30, 2, 5)
    q = torch.randn(2, 30, 4, 6)
    plan = SummaryPlan.make(q, k, v, window=5, stride=3, block=4, group=Ring.alone())
    weights, far = torch.zeros(2, 4), torch.zeros(2, 6)
    right: dict[str, Any] = dict(k=k, v=v, weights=(weights, weights), queries=(far, None))
    summarize(**right, plan=plan)
    for wrong, why in (
        (dict(k=k[:, :9], v=v[:, :9]), r"k must be \[2, 30, 2, 6\] by the plan, got \[2, 9, 2, 6"),
        (dict(k=torch.cat((k, k), 1)), r"got \[2, 60, 2, 6\]; make one for these"),
        (dict(k=k[:1]), "k must be"),
        (dict(k=k[0]), "k must be"),
        (dict(v=v[..., :1]), r"v must be \[2, 30, 2, 5\]"),
        (dict(weights=(weights[:, :3], weights)), r"weights of keys must be \[2, 4\]"),
        (dict(weights=(weights, weights[:1])), r"weights of values must be \[2, 4\]"),
        (dict(queries=(far[:, :1], None)), r"queries of keys must be \[2, 6\]"),
        (dict(queries=(far, far)), r"queries of values must be \[2, 5\]"),
    ):
        with pytest.raises(ValueError, match=f"^summarize: .*{why}"):
            summarize(**{**right, **wrong}, plan=plan)


# --- modules ---


@pytest.mark.parametrize(
    "case", [Module(), Module(restart=True, gates=True, pool="attention", select=2)]
)
def test_models_on_a_ring_are_those_of_one_process(case: Module) -> None:
    for size, layout in ((2, "zigzag"), (3, "striped"), (4, "contiguous")):
        check_modules_in_threads(case, size, layout)


@pytest.mark.parametrize("restart", [False, True])
def test_a_layer_is_the_reference_of_its_projections(restart: bool) -> None:
    torch.manual_seed(0)
    made = dict(rotary_embed=True, rotary_restart=restart, num_grouped_query_heads=2)
    attn = SummaryAttention(12, window=5, stride=3, block=4, heads=4, dim_head=6, **made).double()
    x = torch.randn(2, 29, 12, dtype=torch.float64)
    ids = (torch.arange(29) >= 8).long().expand(2, -1)
    far = attn.summaries
    with torch.no_grad():
        for p in far.parameters():
            p.normal_()
        q, k, v = attn.project(x, None)
        angles = attn.rotary_embed.inv_freq.double().repeat(2)

        def rotate(t: Tensor, at: Tensor) -> Tensor:
            turned = torch.cat((-t[..., 3:], t[..., :3]), -1)
            # angles are computed in float32, as everywhere
            angle = (at[:, None].float() * angles.float())[:, None].double()
            return t * angle.cos() + turned * angle.sin()

        want = summary_attention(
            q, k, v, window=5, stride=3, block=4, weights=(far.key_weights, far.value_weights),
            bias=far.bias, documents=ids, rotate=rotate, restart=restart,
        )  # fmt: skip
        got = attn(x, documents=ids)
    assert relative_error(got, attn.to_out(want.flatten(2))) < 1e-6


@pytest.mark.parametrize(
    ("layout", "distance", "gates", "pool", "prompt"),
    [
        ("contiguous", None, False, "mean", 31), ("zigzag", 14, False, "attention", 30),
        ("striped", 14, True, "mean", 32), ("contiguous", 5, False, "mean", 17),
        ("zigzag", None, True, "mean", 4),
    ],
)  # fmt: skip
def test_decoding_goes_on_where_a_prompt_ends(pools, layout, distance, gates, pool, prompt) -> None:
    for found in pools(3).run(decoded, layout, distance, gates, pool, prompt):
        assert found["prompt"] < 1e-6, found  # angles are computed in float32
        assert found["later"] < 1e-6, found
        assert found["recent"] <= 5 + 2 * 3 + 4
        cells = (prompt + 25 - 5) // 3 + 1
        assert found["far"] <= (cells if distance is None else (distance - 5) // 3)


def test_rings_of_one_group_may_differ_in_what_is_far(pools) -> None:
    """One ring has summaries and the other none: nobody waits."""
    assert pools(4).run(separate_rings) == [True] * 4


# --- what is refused ---


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (dict(window=-1), "window must be at least 0"),
        (dict(window=4, stride=4, block=3), "block must be at least stride=4, got 3"),
        (dict(window=4, stride=4, distance=10), "distance must be window=4 and a multiple"),
        (dict(window=4, stride=4, distance=0), "distance must be window=4 and a multiple"),
        (dict(window=4, select=-1), "select must be at least 0"),
        (dict(window=4, pool="max"), "pool must be one of 'mean', 'attention'"),
    ],
)
def test_numbers_that_cannot_be_are_refused(given: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Summaries(**given)


@pytest.mark.parametrize(
    "given",
    [dict(causal=False), dict(dropout=0.1), dict(max_lookback_seq_len=3), dict(in_graphs=True)],
)
def test_layers_refuse_what_summaries_cannot_do(given: dict) -> None:
    with pytest.raises(ValueError, match="attn_summaries needs causal=True"):
        SummaryAttention(8, window=4, **given)


def test_plans_of_other_summaries_are_refused() -> None:
    layers = [SummaryAttention(8, window=4, stride=s, heads=2, dim_head=4) for s in (2, 4)]
    x = torch.randn(1, 30, 8)
    plan = layers[0].plan(x)
    assert torch.equal(layers[0](x, plan=plan), layers[0](x))
    with pytest.raises(ValueError, match="the plan is for summaries by"):
        layers[1](x, plan=plan)


def test_examples_run() -> None:
    for name in ("cells", "plain", "plan", "pooling", "attention", "layer", "module"):
        found = doctest.testmod(importlib.import_module(f"ring_attention_pytorch.summaries.{name}"))
        assert (found.attempted > 0, found.failed) == (True, 0), name
