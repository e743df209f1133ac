"""Near exactly, far in summary: what travels, and models on a ring."""

import doctest
import importlib

import pytest
import torch

from ring_attention_pytorch import ring_attn
from ring_attention_pytorch.geometry.layouts import all_segments, segment_positions
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.summaries import SummaryPlan, summarize, summary_attn
from ring_attention_pytorch.summaries.cells import (
    Cells,
    Places,
    edge_keys,
    edge_queries,
    first_cells,
    shares,
)
from tests.support import threads
from tests.support.summary_cases import (
    D_V,
    KEY_HEADS,
    Case,
    D,
    Module,
    check_modules_in_threads,
    separate_rings,
)

LAYOUTS = ("contiguous", "striped", "zigzag")


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
    bounds, sent, edges = first_cells(cells, size), 0, 0
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


# --- modules ---


@pytest.mark.parametrize(
    "case", [Module(), Module(restart=True, gates=True, pool="attention", select=2)]
)
def test_models_on_a_ring_are_those_of_one_process(case: Module) -> None:
    for size, layout in ((2, "zigzag"), (3, "striped"), (4, "contiguous")):
        check_modules_in_threads(case, size, layout)


def test_rings_of_one_group_may_differ_in_what_is_far(pools) -> None:
    """One ring has summaries and the other none: nobody waits."""
    assert pools(4).run(separate_rings) == [True] * 4


def test_examples_run() -> None:
    for name in ("cells", "plain", "plan", "pooling", "attention", "layer", "module"):
        found = doctest.testmod(importlib.import_module(f"ring_attention_pytorch.summaries.{name}"))
        assert (found.attempted > 0, found.failed) == (True, 0), name
