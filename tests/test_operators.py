"""Operators of calls: they are what they promise, and do what functions do."""

from functools import partial
from itertools import product
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from ring_attention_pytorch import RingPlan, operators, ring_attn
from ring_attention_pytorch.operators import SAVED
from ring_attention_pytorch.runtime import handles
from tests.support import threads
from tests.support.sampling import grid

ops = torch.ops.ring_attention


@pytest.fixture(autouse=True)
def compiled_anew():
    torch._dynamo.reset()


def drawn(**kinds):
    return [torch.randn(2, 6, h, 8, **kinds).requires_grad_() for h in (4, 2, 2)]


@grid(
    "dtype, overload, with_sinks",
    product((torch.float64, torch.bfloat16), ("default", "messages"), (False, True)),
    always=2,
    drawn=2,
)
def test_operators_are_what_they_promise(dtype, overload, with_sinks):
    """No alias, no mutation, right shapes and strides, gradients: as PyTorch checks it."""
    q, k, _ = drawn(dtype=dtype)
    v = torch.randn(2, 6, 2, 5, dtype=dtype, requires_grad=True)
    sinks = torch.randn(4, dtype=dtype, requires_grad=True) if with_sinks else None
    plan = RingPlan.make(q, k, v, causal=True, sinks=sinks)
    opcheck(getattr(ops.forward, overload), (q, k, v, sinks, plan.handle))
    with torch.no_grad():
        out, lse, number = ops.forward(q, k, v, sinks, plan.handle)
        given = [None if t is None else t.detach() for t in (q, k, v, sinks)]
    rest = torch.randn(out.shape, dtype=dtype), torch.randn(lse.shape, dtype=lse.dtype), out, lse
    opcheck(getattr(ops.backward, overload), (*given, *rest, number, plan.handle))
    opcheck(getattr(ops.total, overload), (q, False, plan.handle))


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
        *got, number = ops.forward.messages(q, k, v, sinks, handle)
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
        *told, of = ops.forward.messages(*fake, handle)
        assert (of.shape, of.dtype) == (number.shape, number.dtype)
        told += ops.backward.messages(*fake, *told, *told, of, handle)
    found = torch.autograd.grad(got, given, cotangents)
    for a, b in zip(told, (*got, *found)):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
    ring.group = "these threads"  # of which sums are
    x = torch.full((2,), ring.rank + 1.0, requires_grad=True)
    total = ops.total.messages(x, False, handle)
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
        assert operators._of(SimpleNamespace(capturable=True), op) is op.default


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

    def counted(self, direction, *rest, back_of):
        directions.append(direction)
        return run(self, direction, *rest, back_of=back_of)

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
