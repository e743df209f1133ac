"""Calls that are captured and replayed: with graphs that do again what a CPU was told."""

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import Tensor

from ring_attention_pytorch import (
    RingAttention,
    RingPlan,
    RingTransformer,
    explain_plan,
    ring_attn,
)
from ring_attention_pytorch.comm.gather_symmetric import SymmetricGather
from ring_attention_pytorch.comm.ring import Ring
from ring_attention_pytorch.geometry.layouts import positions
from ring_attention_pytorch.runtime import graphs, streams
from ring_attention_pytorch.runtime.graphs import Graphs, with_graphs
from tests.runtime.test_streams import Machine, Stream, stood_in
from tests.support import threads
from tests.support.cases import Attention, over_shared_memory
from tests.support.reference import dense_attention, relative_error

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def again(run: Callable, device: torch.device) -> tuple[Callable[[], None], tuple]:
    """A graph that computes anew from what lies in the same places."""
    results = run()

    def replay() -> None:
        for place, new in zip(results, run()):
            if place is not None:
                place.copy_(new)

    return replay, results


def stand_in(patch: pytest.MonkeyPatch) -> None:
    """Graphs work on the CPU from now on."""
    patch.setattr(graphs, "captured", again)
    patch.setattr(graphs, "capturing", lambda device: False)
    patch.setattr(graphs, "current_stream", lambda device: None)


def test_what_graphs_of_ours_read_need_not_stay(monkeypatch):
    """They are dropped when another memory is shared."""
    for name in ("CUDAGraph", "Stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: SimpleNamespace(replay=None))
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    monkeypatch.setattr(streams, "capturing", lambda device: True)
    assert graphs.captured(lambda: streams.captures_for_good(CPU), CPU) == (None, False)
    assert streams.captures_for_good(CPU)


@pytest.fixture
def on_cpu(monkeypatch):
    stand_in(monkeypatch)


def more(plan: None, x: Tensor) -> tuple[Tensor]:
    return (x + 1,)


def plain(plan: RingPlan, given: list[Tensor], cotangents: list[Tensor]) -> list[Tensor]:
    out, lse = ring_attn(*given[:3], plan=plan, return_lse=True, sinks=given[3])
    return [out, lse, *torch.autograd.grad((out, lse)[: len(cotangents)], given, cotangents)]


def interleaved(plan: RingPlan, layers: list[tuple[list[Tensor], list[Tensor]]]) -> list:
    """Forward of each layer, then backward of each, the last one first."""
    found = []
    for given, cotangents in layers:
        out, lse = ring_attn(*given[:3], plan=plan, return_lse=True, sinks=given[3])
        found.append((given, cotangents, out, lse))
    return [
        [out, lse, *torch.autograd.grad((out, lse)[: len(cotangents)], given, cotangents)]
        for given, cotangents, out, lse in reversed(found)
    ][::-1]


@pytest.mark.parametrize("overtaken", [False, True])
def test_layers_that_share_graphs_get_what_is_theirs(on_cpu, overtaken):
    """Whatever they are given, and whether the gradient of lse comes or not."""
    shape = Attention(29, "zigzag", causal=True, d_v=5, kernel="eager")

    def main(ring: threads.ThreadRing) -> None:
        at, _ = shape.places(ring.rank, ring.size)
        layers = []
        for seed in range(9):
            (q, k, v), _, dout, dlse = replace(shape, seed=seed).data()
            sinks = torch.full((shape.heads,), 0.1 * seed, dtype=q.dtype)
            given = [*(t[:, at] for t in (q, k, v)), sinks]
            cotangents = [dout[:, at], dlse[..., at]][: 1 + seed % 2]
            layers.append(([t.requires_grad_() for t in given], cotangents))
        q, k, v, sinks = layers[0][0]
        plan = RingPlan.make(
            q, k, v, **shape.options(), group=ring, layout="zigzag", kernel="eager", sinks=sinks
        )
        plan = over_shared_memory(plan, [q, k, v], ring, 9, overtaken=overtaken)
        want = [plain(plan, *layer) for layer in layers]
        captured = with_graphs(plan)
        got = [t for i in (0, 3, 6) for t in interleaved(captured, layers[i : i + 3])]
        for layer, (mine, expected) in enumerate(zip(got, want)):
            for a, b in zip(mine, expected):
                assert torch.equal(a, b), f"layer {layer}"
        assert all(graph._replay for graph in captured.graphs._kept.values())
        assert len(captured.graphs._kept) == 3  # two of them backward

    threads.run(3, main)


def test_the_first_call_goes_as_ever_and_the_second_is_captured(on_cpu, monkeypatch):
    """For what the first makes can't be made while a graph is captured."""
    told = []
    monkeypatch.setattr(graphs, "captured", lambda *a: told.append("captured") or again(*a))

    def twice(plan: int, x: Tensor, nothing: None) -> tuple[Tensor, None]:
        told.append("run")
        return plan * x, nothing

    kept = Graphs(CPU, lambda: told.append("followed"))
    for i in range(4):
        x = torch.full((2,), float(i), requires_grad=True)
        result, nothing = kept.run(twice, 2, x.detach(), None)
        assert (result.tolist(), nothing) == ([2.0 * i] * 2, None)
    assert told == [
        "followed", "run", "followed", "captured", "run", "run", "followed", "run", "followed",
        "run",
    ]  # fmt: skip


def test_the_first_call_makes_what_is_made_for_the_graph(on_cpu):
    """For tensors as they lie there, however they were given."""
    strides = []

    def noted(plan: None, x: Tensor) -> tuple[Tensor]:
        strides.append((x.stride(), x.data_ptr()))
        return (x + 1,)

    kept, x = Graphs(CPU, lambda: None), torch.arange(12.0).view(3, 4).t()
    for _ in range(3):
        assert torch.equal(kept.run(noted, None, x)[0], x + 1)
    assert len(set(strides)) == 1
    assert strides[0][0] == (3, 1)


def another_plan_has_no_graphs_of_this_one() -> None:
    """Be it this one but for its mask."""
    q = torch.randn(1, 4, 2, 8)
    plan = with_graphs(RingPlan.make(q, q, q, kernel="eager", key_mask=torch.ones(1, 4).bool()))
    for _ in range(3):
        ring_attn(q, q, q, plan=plan)
    other = replace(plan, key_mask=torch.tensor([[True, False, True, True]]))
    assert not torch.equal(ring_attn(q, q, q, plan=other), ring_attn(q, q, q, plan=plan))


def test_another_plan_has_no_graphs_of_this_one(on_cpu):
    another_plan_has_no_graphs_of_this_one()


@pytest.mark.parametrize("what", ["memory", "determinism"])
def test_graphs_of_other_memory_or_other_kernels_are_not_replayed(on_cpu, monkeypatch, what):
    shared, deterministic, turns = [1], [False], []
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic[0])
    monkeypatch.setattr(graphs, "captured", lambda *a: turns.append(turn) or again(*a))
    kept = Graphs(CPU, lambda: tuple(shared))
    for turn in range(6):
        if turn == 3:
            (shared if what == "memory" else deterministic)[0] = 2
        assert kept.run(more, None, torch.full((2,), float(turn)))[0].tolist() == [turn + 1.0] * 2
    assert turns == [1, 4]
    assert len(kept._kept) == (1 if what == "memory" else 2)


def twofold(plan: None, x: Tensor) -> tuple[Tensor]:
    return (2 * x,)


def add(plan: None, x: Tensor, result: Tensor, y: Tensor) -> tuple[Tensor]:
    return (x + result + y,)


def copied(patch: pytest.MonkeyPatch) -> list[Tensor]:
    """All tensors that are copied to where graphs read, from now on."""
    found: list[Tensor] = []
    put = graphs._Place.put
    patch.setattr(
        graphs._Place,
        "put",
        lambda place, t, *a, **how: found.append(t) or put(place, t, *a, **how),
    )
    return found


def what_is_there_already_is_not_copied_again(patch: pytest.MonkeyPatch) -> None:
    """What a function was given, and what it returned, where another is given it next."""
    stand_in(patch)
    found, kept = copied(patch), Graphs(CPU, lambda: None)
    for turn in range(5):
        x, y = torch.full((2,), 1.0 + turn), torch.ones(2)
        (result,) = kept.run(twofold, None, x)
        found.clear()
        (total,) = kept.run(add, None, x, result, y, saved=True)
        assert total.tolist() == [3 * (1.0 + turn) + 1] * 2
        names = {id(x): "x", id(result): "result", id(y): "y"}
        new = [names[id(t)] for t in found]
        assert new == (["result", "y"] if turn == 0 else ["y"]), turn


def test_what_is_there_already_is_not_copied_again(monkeypatch):
    what_is_there_already_is_not_copied_again(monkeypatch)


def what_has_become_another_is_copied(patch: pytest.MonkeyPatch) -> None:
    """Be it changed in place, or another tensor at the same address, or others of its numbers."""
    stand_in(patch)
    kept, memory = Graphs(CPU, lambda: None), numpy.arange(8.0)
    nothing = torch.zeros(2, 2, dtype=torch.float64)

    def told(x: Tensor) -> Tensor:
        return kept.run(add, None, x, nothing, nothing, saved=True)[0]

    for _ in range(5):
        x = torch.from_numpy(memory)
        square = x[:4].view(2, 2)
        kept.run(twofold, None, square)
        x[:4] += 1
        assert torch.equal(told(square), square), "changed in place"
        kept.run(twofold, None, square)
        assert torch.equal(told(x[4:].view(2, 2)), x[4:].view(2, 2)), "others of its numbers"
        kept.run(twofold, None, square)
        assert torch.equal(told(square.t()), square.t()), "in another order"
        kept.run(twofold, None, torch.from_numpy(memory)[:4].view(2, 2))
        memory[:] += 1
        square = torch.from_numpy(memory)[:4].view(2, 2)
        assert torch.equal(told(square), square), "another at the same address"
        kept.run(twofold, None, square)
        memory[:] += 1  # nobody counts this change
        (result,) = kept.run(twofold, None, square)
        assert torch.equal(result, 2 * square), "not saved"
        assert torch.equal(told(square), square)
        memory[:] += 1
        assert torch.equal(told(square), square), "known only once"


def test_what_has_become_another_is_copied(monkeypatch):
    what_has_become_another_is_copied(monkeypatch)


def a_result_may_be_given_twice(patch: pytest.MonkeyPatch) -> None:
    """As a cotangent, too: it is in two places, whichever call is captured."""
    stand_in(patch)
    kept = Graphs(CPU, lambda: None)
    for turn in range(6):
        x, y = torch.full((2,), 1.0 + turn), torch.ones(2)
        (result,) = kept.run(twofold, None, x)
        y = result if turn < 3 else y
        (total,) = kept.run(add, None, x, result, y, saved=True)
        assert torch.equal(total, x + result + y), turn


def test_a_result_may_be_given_twice(monkeypatch):
    a_result_may_be_given_twice(monkeypatch)


def test_results_that_lie_otherwise_are_read_where_they_are_copied_to(on_cpu):
    """A graph that is captured reads tensors that lie as those of the first call did."""

    def turned(plan: None, x: Tensor) -> tuple[Tensor]:
        return ((2 * x).t(),)

    strides, kept = [], Graphs(CPU, lambda: None)

    def noted(plan: None, x: Tensor, result: Tensor) -> tuple[Tensor]:
        strides.append(result.stride())
        return (x + result.t(),)

    for turn in range(4):
        x = torch.arange(6.0).view(2, 3) + turn
        (result,) = kept.run(turned, None, x)
        (total,) = kept.run(noted, None, x, result, saved=True)
        assert torch.equal(total, 3 * x)
    assert set(strides) == {(2, 1)}


def layers_leave_in_place_what_their_backward_reads(patch: pytest.MonkeyPatch) -> None:
    """The last layer's backward copies one cotangent, whichever layer's call was captured."""
    stand_in(patch)
    found = copied(patch)
    q = torch.randn(1, 6, 2, 8)
    plan = with_graphs(RingPlan.make(q, q, q, kernel="eager"))
    for turn in range(4):
        layers = [[torch.randn(1, 6, 2, 8).requires_grad_() for _ in "qkv"] for _ in range(3)]
        outs = [ring_attn(*qkv, plan=plan) for qkv in layers]
        numbers = []
        for qkv, out in zip(reversed(layers), reversed(outs)):
            found.clear()
            torch.autograd.grad(out, qkv, torch.ones_like(out))
            numbers.append(len(found))
        if turn:
            assert numbers == [1, 6, 6], numbers  # dout; and q, k, v, out, lse


def test_layers_leave_in_place_what_their_backward_reads(monkeypatch):
    layers_leave_in_place_what_their_backward_reads(monkeypatch)


def test_copies_of_graphs_know_nothing_of_tensors(on_cpu):
    """Be it a deep copy, as of a module, or a pickle."""
    kept, x = Graphs(CPU, list), torch.ones(2)
    (result,) = kept.run(twofold, None, x)
    for other in (copy.deepcopy(kept), copy.deepcopy(kept)):
        assert all(place._holds is None for place in other._places.values())
        assert torch.equal(other.run(add, None, x, result, x, saved=True)[0], 4 * x)
    place = pickle.loads(pickle.dumps(next(iter(kept._places.values()))))
    assert place._holds is None
    assert torch.equal(place.memory, x)


def in_inference_mode_all_is_copied(patch: pytest.MonkeyPatch) -> None:
    """There nobody counts changes."""
    stand_in(patch)
    kept = Graphs(CPU, lambda: None)
    with torch.inference_mode():
        x, y = torch.zeros(2), torch.zeros(2)
        for turn in range(4):
            (result,) = kept.run(twofold, None, x)
            x.add_(1)
            assert kept.run(add, None, x, result, y, saved=True)[0].tolist() == [3 * turn + 1.0] * 2


def test_in_inference_mode_all_is_copied(monkeypatch):
    in_inference_mode_all_is_copied(monkeypatch)


def test_a_gathers_graphs_are_of_the_shelves_at_hand():
    told = []
    space = SimpleNamespace(keys="keys", grads="grads", follow_stream=lambda: told.append("waits"))
    gather = SymmetricGather(Ring.alone(), None, space=space, ranks=(0,))
    assert gather.follow_stream() == ("keys", "grads")
    assert told == ["waits"]


def test_what_fails_is_not_taken_for_captured(on_cpu):
    def fails(plan: None, x: Tensor) -> tuple[Tensor]:
        if x.sum() < 0:
            raise ValueError("no")
        return (x + 1,)

    kept = Graphs(CPU, lambda: None)
    with pytest.raises(ValueError, match="no"):
        kept.run(fails, None, torch.full((2,), -1.0))
    for i in range(3):
        assert kept.run(fails, None, torch.full((2,), float(i)))[0].tolist() == [i + 1.0] * 2


def test_while_a_graph_is_captured_there_is_no_replay(on_cpu, monkeypatch):
    monkeypatch.setattr(graphs, "capturing", lambda device: True)
    kept = Graphs(CPU, lambda: pytest.fail("a replay"))
    for _ in range(3):
        assert kept.run(more, None, torch.ones(1))[0].item() == 2


def replays_wait_for_those_before(machine: Machine, patch: pytest.MonkeyPatch) -> None:
    """On whatever stream those are, for they read and write in the same places."""
    patch.setattr(graphs, "captured", again)
    patch.setattr(Stream, "wait_stream", lambda self, other: self.before.update(other.before),
                  raising=False)  # fmt: skip
    used = []
    patch.setattr(Tensor, "record_stream", lambda t, stream: used.append(stream))
    patch.setattr(graphs, "capturing", lambda device: False)
    here, there = machine.stream, Stream(GPU)
    kept = Graphs(GPU, lambda: None)
    for stream, name in ((here, "a"), (here, "b"), (there, "c"), (here, "d")):
        machine.set_stream(stream)
        kept.run(more, None, torch.ones(1))
        machine.does(name)
    assert there.before == {"a", "b", "c"}
    assert here.before == {"a", "b", "c", "d"}
    assert used == [there, here]  # where the next ones are, whatever becomes of the plan


def test_replays_wait_for_those_before(monkeypatch):
    replays_wait_for_those_before(stood_in(monkeypatch), monkeypatch)


def test_layers_that_drop_otherwise_have_graphs_of_their_own():
    q = torch.zeros(1, 4, 2, 8)
    plan = RingPlan.make(q, q, q, kernel="eager", dropout=0.5, dropout_seed=1)
    plan = replace(plan, device=GPU).in_graphs()
    layer = plan.for_layer(1)
    assert layer.graphs is not None
    assert layer.graphs is not plan.graphs
    assert plan.for_layer(2).graphs is not layer.graphs
    assert plan.for_layer(1) is layer  # or it would never be replayed


def test_layers_that_drop_nothing_share_theirs():
    q = torch.zeros(1, 4, 2, 8)
    plan = replace(RingPlan.make(q, q, q, kernel="eager"), device=GPU).in_graphs()
    assert plan.for_layer(1).graphs is plan.graphs
    assert explain_plan(plan).splitlines()[0].endswith("kernel eager, in CUDA graphs")


def test_what_a_graph_holds_overlaps():
    """Whatever fewer calls would spare the host; but of a kernel that merges by itself."""
    q = torch.zeros(1, 4, 2, 8)
    plan = replace(RingPlan.make(q, q, q, kernel="eager"), device=GPU)
    other = replace(plan.transport)
    plan.calls(back=False)  # which may be others there
    two = replace(plan, overlapped=other)
    assert two.in_graphs().transport is two.in_graphs().in_graphs().transport is other
    assert not two.in_graphs()._calls
    merging = replace(two, kernel=plan.kernel._replace(fuses_merge=True))
    assert merging.in_graphs().transport is plan.in_graphs().transport is plan.transport


def test_what_travels_in_messages_is_refused():
    def main(ring: threads.ThreadRing) -> None:
        q = torch.zeros(1, 4, 2, 8)
        for transport in ("ring", "gather"):
            plan = RingPlan.make(q, q, q, kernel="eager", transport=transport, group=ring)
            for device in (CPU, GPU):
                with pytest.raises(ValueError, match="memory that GPUs share"):
                    replace(plan, device=device).in_graphs()

    threads.run(2, main)


def test_what_a_cpu_does_is_refused():
    q = torch.zeros(1, 4, 2, 8)
    with pytest.raises(ValueError, match="need tensors on CUDA"):
        RingPlan.make(q, q, q).in_graphs()


MODEL = dict(num_tokens=32, dim=16, depth=2, dim_head=8, heads=2, causal=True, kernel="eager")


def modules_graphs_on_cpu(patch: pytest.MonkeyPatch) -> list[None]:
    """Every capture from now on."""
    captures: list[None] = []
    stand_in(patch)
    patch.setattr(RingPlan, "in_graphs", with_graphs)
    patch.setattr(graphs, "can_be_captured", lambda plan: plan.transport.capturable)
    patch.setattr(graphs, "captured", lambda *a: captures.append(None) or again(*a))
    return captures


def stepped(model: RingTransformer, *given: Tensor) -> list[Tensor]:
    """The loss, and every gradient."""
    loss = model(*given, return_loss=True)
    return [loss.detach(), *torch.autograd.grad(loss, [*model.parameters()])]


def batches_alike_share_graphs(patch: pytest.MonkeyPatch) -> None:
    """All layers'. Others, those that come once and masked ones have nothing of theirs."""
    captures = modules_graphs_on_cpu(patch)
    torch.manual_seed(0)
    model, plain_one = RingTransformer(**MODEL, in_graphs=True), RingTransformer(**MODEL)
    plain_one.load_state_dict(model.state_dict())
    lengths = (7, 7, 5, 7, 9, 11, 13, 5, 7, 13, 13)  # 7 goes with the second 5, and comes anew
    batches = [(torch.randint(0, 32, (2, n)),) for n in lengths]
    batches += [(batches[0][0], torch.rand(2, 7) > 0.3) for _ in range(3)]
    for given in batches:
        for got, want in zip(stepped(model, *given), stepped(plain_one, *given)):
            torch.testing.assert_close(got, want)
    assert len(captures) == 2 * 2  # of 7 and of 13, forward and backward
    keeping = [attn.kept for attn, _ in model.layers if attn.kept._plans]
    assert [len(kept._plans) for kept in keeping] == [4]


def test_batches_alike_share_graphs(monkeypatch):
    batches_alike_share_graphs(monkeypatch)


def what_is_changed_on_a_module_counts(patch: pytest.MonkeyPatch) -> None:
    captures = modules_graphs_on_cpu(patch)
    how = dict(dim_head=8, heads=2, kernel="eager")  # another would be another kind
    attn, want = RingAttention(16, **how, in_graphs=True), RingAttention(16, **how)
    want.load_state_dict(attn.state_dict())
    for softclamp in (None, 0.05):
        attn.softclamp = want.softclamp = softclamp
        for _ in range(4):
            x = torch.randn(1, 5, 16)
            torch.testing.assert_close(attn(x), want(x))
    assert len(captures) == 2
    attn.dropout = 0.5
    x = torch.randn(1, 5, 16)
    assert not any(torch.equal(attn(x), attn(x)) for _ in range(3))


def test_what_is_changed_on_a_module_counts(monkeypatch):
    what_is_changed_on_a_module_counts(monkeypatch)


def test_a_layer_by_itself_has_graphs_too(monkeypatch):
    captures = modules_graphs_on_cpu(monkeypatch)
    attn = RingAttention(16, dim_head=8, heads=2, in_graphs=True)
    want = RingAttention(16, dim_head=8, heads=2)
    want.load_state_dict(attn.state_dict())
    for _ in range(5):
        x, context = torch.randn(1, 5, 16), torch.randn(1, 6, 16)
        torch.testing.assert_close(attn(x), want(x))
        torch.testing.assert_close(attn(x, context=context), want(x, context=context))
    assert len(captures) == 2
    assert attn.plan(torch.randn(1, 5, 16)).graphs is not None


def others_lengths_make_another_kind(patch: pytest.MonkeyPatch) -> None:
    """Where neighbours swap heads a rank's own and the ring's may be the same, but not theirs."""
    modules_graphs_on_cpu(patch)

    def main(ring: threads.ThreadRing) -> list[bool]:
        kept, found = graphs.GraphCache(), []
        for lengths in ((5, 3, 4, 4), (5, 3, 4, 4), (4, 4, 4, 4), (5, 3, 4, 4)):
            q = torch.zeros(1, lengths[ring.rank], 4, 8)
            k = torch.zeros(1, 4, 4, 8)
            plan = RingPlan.make(
                q, k, k, group=ring, cross=True, kernel="eager", transport="gather", ulysses=4
            )
            found.append(kept.of(plan).ulysses.queries == plan.ulysses.queries)
            found.append(kept.of(plan) is not plan)
        return found

    each, _ = threads.run(4, main)
    assert each == [[True, True] * 4] * 4


def test_others_lengths_make_another_kind(monkeypatch):
    others_lengths_make_another_kind(monkeypatch)


def test_graphs_of_another_group_or_device_go(monkeypatch):
    modules_graphs_on_cpu(monkeypatch)
    kept, q = graphs.GraphCache(), torch.zeros(1, 4, 2, 8)
    plan = RingPlan.make(q, q, q, kernel="eager")
    for group, left in (("first", 1), ("first", 1), ("second", 1), (None, 2), ("second", 2)):
        ring = SimpleNamespace(group=group, first=0, size=1, rank=0)
        kept.of(replace(plan, ring=ring))
        assert len(kept._plans) == left


def test_copies_of_a_module_have_graphs_of_their_own(monkeypatch):
    modules_graphs_on_cpu(monkeypatch)
    attn, x = RingAttention(16, dim_head=8, heads=2, in_graphs=True), torch.randn(1, 5, 16)
    want = attn(x)
    for other in (copy.deepcopy(attn), pickle.loads(pickle.dumps(attn))):
        assert other.kept is not attn.kept
        assert not other.kept._plans
        torch.testing.assert_close(other(x), want)


def test_modules_whose_calls_can_never_be_captured_are_refused():
    """Where they can't be here, on a CPU, they go as ever."""
    for how in (dict(dropout=0.1), dict(force_regular_attn=True),
                dict(ring_attn=True, transport="ring")):  # fmt: skip
        with pytest.raises(ValueError, match="in_graphs=True needs"):
            RingAttention(16, dim_head=8, heads=2, in_graphs=True, **how)
    attn = RingAttention(16, dim_head=8, heads=2, in_graphs=True)
    for _ in range(3):
        attn(torch.randn(1, 4, 16))
    assert not attn.kept._plans


def layouts_make_another_kind(patch: pytest.MonkeyPatch) -> None:
    """Where all ranks swap heads each has the whole sequence, whatever the layout; its queries go
    home to other places."""
    modules_graphs_on_cpu(patch)
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 16, 2, 8, generator=draw) for _ in range(3))

    def main(ring: threads.ThreadRing) -> list[float]:
        kept, found = graphs.GraphCache(), []
        for layout in ("zigzag", "zigzag", "striped", "zigzag", "striped", "contiguous"):
            at = positions(layout, rank=ring.rank, ring_size=2, length=16)
            mine = [t[:, at] for t in (q, k, v)]
            how = dict(causal=True, layout=layout, kernel="eager", transport="gather", ulysses=2)
            plan = kept.of(RingPlan.make(*mine, group=ring, **how))
            # graphs of threads would wait for one another
            out = ring_attn(*mine, plan=replace(plan))
            want = dense_attention(q, k, v, causal=True)[0][:, at]
            found.append(relative_error(out, want))
        return found

    for found in threads.run(2, main)[0]:
        assert max(found) < 1e-5, found


def test_layouts_make_another_kind(monkeypatch):
    layouts_make_another_kind(monkeypatch)
