"""torch.compile: operators in graphs, over processes; what comes out is what comes without it."""

import pytest
import torch

from docs.write_compile import PAGE_AT
from ring_attention_pytorch import RingAttention, RingPlan, ring_attn, shard_batch
from tests.support.compile_cases import LENGTHS, ROWS, measured
from tests.support.sampling import grid

QUICK = [
    ("ring_attn", "ulysses, sinks", 2),
    ("RingTransformer", "documents, loss", 1),
]


def drawn(**kinds):
    return [torch.randn(2, 6, h, 8, **kinds).requires_grad_() for h in (4, 2, 2)]


@pytest.fixture(autouse=True)
def compiled_anew():
    torch._dynamo.reset()


@pytest.mark.parametrize(("subject", "feature", "size"), QUICK)
def test_a_compiled_step_is_one_graph_and_gives_what_an_eager_one_does(
    pools, subject, feature, size
):
    for row in pools(size).run(measured, subject, feature, "aot_eager", (16, 17, 19)):
        assert row.whole
        assert row.graphs <= 3
        assert row.error < 1e-14


def test_ten_lengths_and_plans_take_three_graphs_at_most(pools):
    assert len(LENGTHS) == 10
    for row in pools(2).run(measured, "ring_attn", "causal, gradient of lse"):
        assert row.graphs <= 3
        assert row.error < 1e-14


def ranks_of(subject, feature):
    """Two where that is cheap or ranks do several things, and for one feature of layers; else one.

    Operators hide from a graph what they send, so it is the same graph.
    """
    return 2 if subject == "ring_attn" or feature in ("ulysses", "documents, angles restart") else 1


OTHERS = [row for row in ROWS if row not in {each[:2] for each in QUICK}]


@grid("subject, feature, size", [(*row, ranks_of(*row)) for row in OTHERS], always=0, drawn=6)
def test_every_row_of_the_matrix(pools, subject, feature, size):
    for found in pools(size).run(measured, subject, feature, "aot_eager", (16, 17, 19)):
        # without a plan, what follows it is compiled anew for a plan of as many tokens
        # here, too: first of another number, then of another length
        assert found.graphs <= (5 if feature == "without a plan" else 4)
        assert found.error < 1e-14


def test_the_page_of_the_matrix_has_every_row_and_no_recompilation():
    lines = [line.strip("|").split(" | ") for line in PAGE_AT.read_text().splitlines()]
    rows = [[cell.strip() for cell in line] for line in lines if len(line) > 3][2:]
    assert [(row[0].strip("`"), row[1]) for row in rows] == ROWS
    for _, _, step, *fields in rows:
        for field in fields:
            graphs, error = field.split(", ")
            assert int(graphs) <= (3 if step == "one graph" else 4)
            assert float(error) < 1e-14


@pytest.mark.thorough
def test_inductor(pools):
    for row in pools(2).run(measured, "ring_attn", "documents", "inductor", (16, 17)):
        assert row.error < 1e-13


def test_a_layer_of_a_large_number_is_that_layer_when_compiled():
    q, k, v = drawn()
    plan = RingPlan.make(q, k, v, dropout=0.5, dropout_seed=1)
    number = 2**20 - 1

    def attend(q, k, v, plan):
        return ring_attn(q, k, v, plan=plan.for_layer(number))

    found = torch.compile(attend, backend="aot_eager", fullgraph=True)(q, k, v, plan)
    assert torch.equal(found, attend(q, k, v, plan))


def test_a_plan_for_other_tensors_is_refused():
    q, k, v = drawn()
    other = torch.randn(2, 7, 4, 8)
    plan = RingPlan.make(other, other, other)
    compiled = torch.compile(
        lambda q, k, v, plan: ring_attn(q, k, v, plan=plan), fullgraph=True, backend="aot_eager"
    )
    with pytest.raises(ValueError, match="the plan was made for"):
        compiled(q, k, v, plan)


def test_options_beside_a_plan_are_refused():
    q, k, v = drawn()
    plan = RingPlan.make(q, k, v)
    compiled = torch.compile(
        lambda q, k, v, plan: ring_attn(q, k, v, plan=plan, window=3), backend="aot_eager"
    )
    with pytest.raises(ValueError, match="the plan already decides window"):
        compiled(q, k, v, plan)


def test_in_the_block_of_a_batch():
    ids = torch.arange(12)[None]
    attn = RingAttention(
        16, dim_head=8, heads=2, causal=True, ring_attn=True, rotary_embed=True
    )  # fmt: skip
    x = torch.randn(1, 12, 16)
    compiled = torch.compile(attn, fullgraph=True, backend="aot_eager")
    with shard_batch({"input_ids": ids, "labels": ids}):
        plan = attn.plan(x)
        torch.testing.assert_close(compiled(x, plan=plan), attn(x, plan=plan))


def test_under_autocast():
    q, k, v = drawn()
    compiled = torch.compile(
        lambda q, k, v, plan: ring_attn(q, k, v, plan=plan), fullgraph=True, backend="aot_eager"
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plan = RingPlan.make(q, k, v, causal=True)
        got = compiled(q, k, v, plan)
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got, ring_attn(q, k, v, plan=plan))


class Attends(torch.nn.Module):
    def __init__(self, plan):
        super().__init__()
        self.plan = plan

    def forward(self, q):
        return ring_attn(q, q, q, plan=self.plan)


@pytest.mark.parametrize("with_plan", [False, True])
def test_export_says_that_it_cannot(with_plan):
    q = torch.randn(2, 6, 4, 8)
    module = Attends(RingPlan.make(q, q, q) if with_plan else None)
    with pytest.raises(NotImplementedError, match="can't be exported"):
        torch.export.export(module, (q,), strict=False)
