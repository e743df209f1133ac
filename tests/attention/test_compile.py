"""torch.compile: operators in graphs, over processes; what comes out is what comes without it."""

from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from docs.write_compile import PAGE_AT
from ring_attention_pytorch import RingAttention, RingPlan, operators, ring_attn, shard_batch
from ring_attention_pytorch.operators import SAVED
from ring_attention_pytorch.runtime import handles
from ring_attention_pytorch.runtime.replay import ALWAYS
from tests.support import threads
from tests.support.compile_cases import LENGTHS, ROWS, measured

ops = torch.ops.ring_attention
QUICK = [
    ("ring_attn", "documents", 2),
    ("ring_attn", "ulysses, sinks", 2),
    ("RingAttention", "dropout by layer", 1),
    ("RingTransformer", "documents, loss", 2),
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


@pytest.mark.thorough
@pytest.mark.parametrize(("subject", "feature"), ROWS)
def test_every_row_of_the_matrix(pools, subject, feature):
    for found in pools(2).run(measured, subject, feature, "aot_eager", (16, 17, 19)):
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("overload", ["default", "messages"])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_operators_are_what_they_promise(dtype, overload, with_sinks):
    """No alias, no mutation, right shapes and strides, gradients: as PyTorch checks it."""
    q, k, _ = drawn(dtype=dtype)
    v = torch.randn(2, 6, 2, 5, dtype=dtype, requires_grad=True)
    sinks = torch.randn(4, dtype=dtype, requires_grad=True) if with_sinks else None
    plan = RingPlan.make(q, k, v, causal=True, sinks=sinks)
    opcheck(getattr(ops.forward, overload), (q, k, v, sinks, plan.handle))
    with torch.no_grad():
        out, lse = ops.forward(q, k, v, sinks, plan.handle)
        given = [None if t is None else t.detach() for t in (q, k, v, sinks)]
    rest = torch.randn(out.shape, dtype=dtype), torch.randn(lse.shape, dtype=lse.dtype), out, lse
    opcheck(getattr(ops.backward, overload), (*given, *rest, plan.handle))
    opcheck(getattr(ops.total, overload), (q, plan.handle))


def test_positions_are_what_they_promise():
    q, k, v = drawn()
    documents = (torch.arange(6) // 4, torch.zeros(6, dtype=torch.long))
    for ids in (None, torch.stack(documents)):
        plan = RingPlan.make(q, k, v, documents=ids)
        for in_documents in {False, ids is not None}:
            opcheck(ops.positions.default, (q, in_documents, plan.handle))
    assert ops.positions(q, True, plan.handle).tolist() == [[0, 1, 2, 3, 0, 1], [*range(6)]]
    alike = RingPlan.make(q, k, v, documents=documents[0].expand(2, 6))
    assert ops.positions(q, True, alike.handle).tolist() == [[0, 1, 2, 3, 0, 1]] * 2
    assert ops.positions(q, False, alike.handle).tolist() == [*range(6)]


class Called(TorchDispatchMode):
    """The operators that are called meanwhile."""

    def __init__(self):
        super().__init__()
        self.ops = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "ring_attention":
            self.ops.add(func)
        return func(*args, **kwargs or {})


MESSAGES = {ops.forward.messages, ops.backward.messages}


def by_operators(ring, with_sinks, **options):
    """Whether operators give on this rank what functions give: results, and gradients of each."""
    torch.manual_seed(ring.rank)
    dtype = torch.float64 if options else torch.bfloat16
    q, k, _ = drawn(dtype=dtype)
    v = torch.randn(2, 6, 2, 5, dtype=dtype, requires_grad=True)
    sinks = torch.arange(4.0, dtype=dtype, requires_grad=True) if with_sinks else None
    of_all = RingPlan.make(q, k, v, sinks=sinks, group=ring, causal=True, **options)
    handle, plan = handles.handle_of_layer(of_all.handle, 1), of_all.for_layer(1)
    given = [t for t in (q, k, v, sinks) if t is not None]
    want = ring_attn(q, k, v, sinks=sinks, plan=plan, return_lse=True)
    assert operators._of(plan, ops.forward) is ops.forward.messages
    with Called() as called:
        got = ops.forward.messages(q, k, v, sinks, handle)
        assert all(t.is_contiguous() for t in got)
        cotangents = [torch.randn_like(t) for t in got]
        for which in ([0], [1], [0, 1]):
            pairs = []
            for results in (got, want):
                asked = [results[i] for i in which]
                by = [cotangents[i] for i in which]
                found = torch.autograd.grad(asked, given, by, retain_graph=True)
                pairs.append([*results, *found])
            for a, b in zip(*pairs):
                torch.testing.assert_close(a, b)
    assert called.ops == MESSAGES
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [None if t is None else mode.from_tensor(t.detach()) for t in (q, k, v, sinks)]
        told = ops.forward.messages(*fake, handle)
        told += ops.backward.messages(*fake, *told, *told, handle)
    found = torch.autograd.grad(got, given, cotangents)
    for a, b in zip(told, (*got, *found)):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
    ring.group = "these threads"  # of which sums are
    x = torch.full((2,), ring.rank + 1.0, requires_grad=True)
    total = ops.total.messages(x, handle)
    assert (total.tolist(), x.tolist()) == ([3.0, 3.0], [ring.rank + 1.0] * 2)
    (grad,) = torch.autograd.grad(total, x, torch.full((2,), ring.rank + 1.0))
    assert grad.tolist() == [3.0, 3.0]


BY_OPERATORS = [
    (True, {}),
    (False, dict(dropout=0.3, dropout_seed=1)),
    (True, dict(ulysses=2)),
    (False, dict(ulysses=2)),
]


@pytest.mark.parametrize(("with_sinks", "options"), BY_OPERATORS, ids=str)
def test_operators_do_what_functions_do(with_sinks, options):
    threads.run(2, lambda ring: by_operators(ring, with_sinks, **options))


def test_an_operator_refuses_tensors_that_its_plan_is_not_for():
    q, k, v = drawn()
    other = torch.randn(2, 7, 4, 8)
    plan = RingPlan.make(other, other, other)
    with pytest.raises(ValueError, match="the plan was made for"):
        ops.forward(q, k, v, None, plan.handle)


def test_what_travels_in_messages_is_left_out_of_cuda_graphs():
    for op in (ops.forward, ops.backward, ops.total):
        assert torch.Tag.cudagraph_unsafe in op.messages.tags
        assert torch.Tag.cudagraph_unsafe not in op.default.tags
        assert operators._of(SimpleNamespace(replay=ALWAYS), op) is op.default


def kept_by(context):
    """How often each direction runs where a block is checkpointed, and the worst error."""
    q, k, v = drawn(dtype=torch.float64)
    plan = RingPlan.make(q, k, v, causal=True)

    def block(q, k, v, plan):
        return torch.sin(ring_attn(torch.cos(q), k, v, plan=plan))

    def step(q, k, v, plan):
        more = {} if context is None else dict(context_fn=context)
        return checkpoint(block, q, k, v, plan, use_reentrant=False, **more)

    want = torch.autograd.grad(block(q, k, v, plan).sum(), (q, k, v))
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager_decomp_partition")
    run, directions = RingPlan.run, []

    def counted(self, direction, *rest):
        directions.append(direction)
        return run(self, direction, *rest)

    with mock.patch.object(RingPlan, "run", counted):
        got = torch.autograd.grad(compiled(q, k, v, plan).sum(), (q, k, v))
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b)
    return directions


def test_checkpointing_computes_again_and_selective_checkpointing_does_not_exchange_again():
    assert kept_by(None) == ["forward", "forward", "backward"]
    context = partial(create_selective_checkpoint_contexts, list(SAVED))
    assert kept_by(context) == ["forward", "backward"]


def test_a_plan_that_nobody_holds_is_there_in_backward():
    q, k, v = drawn()
    compiled = torch.compile(
        lambda q, k, v, plan: ring_attn(q, k, v, plan=plan), fullgraph=True, backend="aot_eager"
    )
    out = compiled(q, k, v, RingPlan.make(q, k, v, causal=True))
    want = ring_attn(q, k, v, causal=True)
    for a, b in zip(*(torch.autograd.grad(t.square().sum(), (q, k, v)) for t in (out, want))):
        torch.testing.assert_close(a, b)


def test_handles_are_of_one_object_each_and_gone_ones_raise():
    class Thing:
        pass

    things = [Thing() for _ in range(3)]
    numbers = [handles.new_handle(thing) for thing in things]
    assert [handles.object_of(handles.handle_of_layer(n, 5)) for n in numbers] == [
        (thing, 5) for thing in things
    ]
    assert handles.object_of(numbers[0]) == (things[0], None)
    lost = handles.new_handle(Thing())
    with pytest.raises(RuntimeError, match="plan is gone"):
        handles.object_of(lost)


def test_layers_of_a_plan_never_meet_another_plan():
    numbers = [handles.new_handle(object) for _ in range(3)]
    layers = (0, 1, 2**20 - 2, 2**20 - 1, handles.LAYERS - 1)
    found = [handles.handle_of_layer(n, layer) for n in numbers for layer in layers]
    assert len({*found, *numbers}) == len(numbers) * (1 + len(layers))
    assert [handles.parted(n) for n in found] == [(n, layer) for n in numbers for layer in layers]
    assert max(found) < 2**63


@pytest.mark.parametrize("number", [-1, handles.LAYERS])
def test_numbers_that_no_layer_has_are_refused(number):
    plan = RingPlan.make(*drawn(), dropout=0.5, dropout_seed=1)
    with pytest.raises(ValueError, match="a layer's number must be at least 0"):
        plan.for_layer(number)


def test_a_layer_of_a_large_number_is_that_layer_when_compiled():
    q, k, v = drawn()
    plan = RingPlan.make(q, k, v, dropout=0.5, dropout_seed=1)
    number = 2**20 - 1

    def attend(q, k, v, plan):
        return ring_attn(q, k, v, plan=plan.for_layer(number))

    found = torch.compile(attend, backend="aot_eager", fullgraph=True)(q, k, v, plan)
    assert torch.equal(found, attend(q, k, v, plan))


def test_those_used_last_are_kept():
    class Thing:
        pass

    def used_and_left():
        thing = Thing()
        number = handles.new_handle(thing)
        handles.object_of(number)
        return number

    first, second = used_and_left(), used_and_left()
    for _ in range(handles._HELD - 1):
        handles.object_of(first)
        last = used_and_left()
    for number in (first, last):
        handles.object_of(number)
    with pytest.raises(RuntimeError, match="plan is gone"):
        handles.object_of(second)


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
