"""Calls that are captured and replayed: with graphs that do again what a CPU was told."""

import copy
import pickle
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ring_attention_pytorch import RingPlan, explain_plan, observe, ring_attn
from ring_attention_pytorch.plan import explain
from ring_attention_pytorch.plan.plan_cache import GraphCache
from ring_attention_pytorch.runtime import graphs, streams
from ring_attention_pytorch.runtime.graphs import Graph, has_graphs, with_graphs
from ring_attention_pytorch.runtime.interfaces import Traits
from ring_attention_pytorch.runtime.replay import Recordings
from ring_attention_pytorch.runtime.uncopied import replaced
from ring_attention_pytorch.schedule.cost import Cost
from tests.support import threads
from tests.support.cases import Attention, over_shared_memory
from tests.support.graphs import again, stand_in
from tests.support.streams import Machine, Stream, stood_in

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def in_place(function: Callable) -> Callable:
    """Write the results to memory that is given, as graphs need it."""

    def found(plan: object, *given: Tensor | None, into: tuple | None = None) -> tuple:
        results = function(plan, *given)
        for place, t in zip(into or (), results):
            if place is not None:
                place.copy_(t)
        return results if into is None else into

    return found


class Recorded:
    """A CUDA graph that nobody launches."""

    def __init__(self, keep_graph: bool) -> None:
        assert keep_graph  # or nobody could read its nodes
        self.told: list[str] = []

    def instantiate(self) -> None:
        self.told.append("instantiated")

    def replay(self) -> None:
        self.told.append("replayed")


def a_call_is_captured_twice_and_its_graph_told_of_tensors(patch: pytest.MonkeyPatch) -> None:
    """In memory that both captures have at the same time; what they read need not stay."""
    patch.setattr(torch.cuda, "CUDAGraph", Recorded)
    patch.setattr(torch.cuda, "Stream", lambda device: None)
    patch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    at = []
    patch.setattr(torch.cuda, "device", lambda device: at.append(device) or nullcontext())
    patch.setattr(streams, "capturing", lambda device: True)
    captures, told = [], []

    class Addresses:
        def __init__(self, *both: graphs.Capture) -> None:
            captures.extend(both)

        def set(self, tensors: tuple) -> None:
            told.append(tensors)

    patch.setattr(graphs, "Addresses", Addresses)
    for_good, made = [], []

    def function(*given: Tensor | None, into: tuple) -> None:
        for_good.append(streams.captures_for_good(CPU))
        made.append((*given, *into))

    x, y = torch.ones(2, 3), torch.ones(4, dtype=torch.int32)
    replay = graphs.captured(function, (x, None), (y, None), GPU)
    assert at == [GPU]
    assert for_good == [False, False]
    assert streams.captures_for_good(CPU)
    assert len({t.data_ptr() for c in captures for t in (c.given[0], c.results[0])}) == 4
    for capture, of in zip(captures, reversed(made)):
        tensors = [*capture.given, *capture.results]
        assert all(a is b for a, b in zip(tensors, of, strict=True))
        kinds = [None if t is None else (t.shape, t.dtype) for t in tensors]
        assert kinds == [(x.shape, x.dtype), None, (y.shape, y.dtype), None]
    replay((x, None, y, None))
    assert [t is x for t in told[0]] == [True, False, False, False]
    assert captures[0].graph.told == ["instantiated", "replayed"]
    assert captures[1].graph.told == []
    gone = [weakref.ref(t) for of in made for t in of if t is not None]
    del capture, tensors, of
    captures.clear()
    made.clear()
    assert [t() for t in gone] == [None] * 4  # a graph that is replayed keeps none of these


def test_a_call_is_captured_twice_and_its_graph_told_of_tensors(monkeypatch):
    a_call_is_captured_twice_and_its_graph_told_of_tensors(monkeypatch)


@pytest.fixture
def on_cpu(monkeypatch):
    stand_in(monkeypatch)


@pytest.fixture
def new_driver(monkeypatch):
    monkeypatch.setattr(graphs, "can_be_set", lambda: True)


@in_place
def more(plan: None, x: Tensor) -> tuple[Tensor]:
    return (x + 1,)


def on(plan: RingPlan, device: torch.device) -> RingPlan:
    """Say that a plan is for another device than it was made on."""
    return replaced(plan, expected=plan.expected._replace(device=device))


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


@pytest.mark.parametrize("own_low_priority", [False, True])
def test_layers_that_share_graphs_get_what_is_theirs(on_cpu, own_low_priority):
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
        plan = over_shared_memory(plan, [q, k, v], ring, 9, own_low_priority=own_low_priority)
        want = [plain(plan, *layer) for layer in layers]
        captured = with_graphs(plan)
        got = [t for i in (0, 3, 6) for t in interleaved(captured, layers[i : i + 3])]
        for layer, (mine, expected) in enumerate(zip(got, want)):
            for a, b in zip(mine, expected):
                assert torch.equal(a, b), f"layer {layer}"
        assert all(graph.replay for graph in captured.recordings._recordings.values())
        assert len(captured.recordings._recordings) == 3  # two of them backward

    threads.run(3, main)


def swaps_are_captured(ulysses: int) -> None:
    """The all-to-all of heads and its way back, and their gradients', summed where heads repeat."""
    shape = Attention(29, "zigzag", causal=True, d_v=5, heads=4, key_heads=2, kernel="eager")

    def main(ring: threads.ThreadRing) -> None:
        at, _ = shape.places(ring.rank, ring.size)
        layers = []
        for seed in range(4):
            (q, k, v), _, dout, dlse = replace(shape, seed=seed).data()
            sinks = torch.full((shape.heads,), 0.1 * seed, dtype=q.dtype)
            given = [*(t[:, at] for t in (q, k, v)), sinks]
            layers.append(([t.requires_grad_() for t in given], [dout[:, at], dlse[..., at]]))
        q, k, v, sinks = layers[0][0]
        plan = RingPlan.make(
            q, k, v, **shape.options(), group=ring, layout="zigzag", kernel="eager", sinks=sinks,
            ulysses=ulysses,
        )  # fmt: skip
        plan = over_shared_memory(plan, [q, k, v], ring, 9)
        captured = with_graphs(plan)
        assert not has_graphs(plan.ulysses)
        for layer in layers:
            for a, b in zip(plain(captured, *layer), plain(plan, *layer), strict=True):
                assert torch.equal(a, b)
        assert has_graphs(captured.ulysses)
        kept = captured.ulysses.recordings._recordings
        assert len(kept) == 4
        assert all(graph.replay for graph in kept.values())

    threads.run(4, main)


@pytest.mark.parametrize("ulysses", [2, 4])
def test_swaps_of_heads_are_captured(on_cpu, ulysses):
    swaps_are_captured(ulysses)


def messages_between_neighbours_are_no_graphs() -> None:
    """Keys may be captured where nothing is left to exchange, and heads still come by messages."""

    def main(ring: threads.ThreadRing) -> None:
        q = torch.randn(1, 4, 4, 8)
        plan = RingPlan.make(q, q, q, causal=True, group=ring, ulysses=2)
        captured = with_graphs(plan)
        assert not has_graphs(captured.ulysses)

    threads.run(2, main)


def test_messages_between_neighbours_are_no_graphs(on_cpu):
    messages_between_neighbours_are_no_graphs()


def test_the_first_call_goes_as_ever_and_the_second_is_captured(on_cpu, monkeypatch):
    """For what the first makes can't be made while a graph is captured."""
    told = []
    monkeypatch.setattr(graphs, "captured", lambda *a: told.append("captured") or again(*a))

    @in_place
    def twice(plan: int, x: Tensor, nothing: None) -> tuple[Tensor, None]:
        told.append("run")
        return plan * x, nothing

    kept = Recordings(Graph, lambda: told.append("followed"))
    for i in range(4):
        x = torch.full((2,), float(i), requires_grad=True)
        result, nothing = kept.run(twice, 2, x.detach(), None)
        assert (result.tolist(), nothing) == ([2.0 * i] * 2, None)
    assert told == [
        "followed", "run", "followed", "captured", "run", "followed", "run", "followed", "run",
    ]  # fmt: skip


def tensors_are_read_where_they_are(patch: pytest.MonkeyPatch) -> None:
    """Nothing is copied, but tensors that lie otherwise than those that were captured; results
    are new ones each time, and stay."""
    stand_in(patch)
    read = []

    @in_place
    def noted(plan: None, x: Tensor) -> tuple[Tensor]:
        read.append((x.stride(), x.data_ptr()))
        return (x + 1,)

    kept, buffer, results = Recordings(Graph), torch.arange(32.0), []
    aligned, apart = (buffer[-buffer.data_ptr() // 4 % 8 + at :][:12].view(3, 4) for at in (0, 4))
    for x, as_it_is in ((aligned, True), (aligned.t().contiguous().t(), False), (apart, False)):
        for _ in range(2):
            (result,) = kept.run(noted, None, x)
            assert torch.equal(result, x + 1)
            assert read[-1][0] == (4, 1)
            assert (read[-1][1] == x.data_ptr()) == as_it_is
            assert read[-1][1] % 32 == 0 or not as_it_is
            results.append((result, x + 1))
    for result, want in results:
        assert torch.equal(result, want)
    assert len({result.data_ptr() for result, _ in results}) == len(results)


def test_tensors_are_read_where_they_are(monkeypatch):
    tensors_are_read_where_they_are(monkeypatch)


def another_plan_has_no_graphs_of_this_one() -> None:
    """Be it this one but for its mask."""
    q = torch.randn(1, 4, 2, 8)
    plan = with_graphs(RingPlan.make(q, q, q, kernel="eager", key_mask=torch.ones(1, 4).bool()))
    for _ in range(3):
        ring_attn(q, q, q, plan=plan)
    other = replaced(plan, key_mask=torch.tensor([[True, False, True, True]]))
    for each in (other, with_graphs(other)):
        assert not torch.equal(ring_attn(q, q, q, plan=each), ring_attn(q, q, q, plan=plan))


def test_another_plan_has_no_graphs_of_this_one(on_cpu):
    another_plan_has_no_graphs_of_this_one()


@pytest.mark.parametrize("what", ["memory", "determinism", "precision"])
def test_graphs_of_other_memory_or_other_kernels_are_not_replayed(on_cpu, monkeypatch, what):
    shared, deterministic, precision, turns = [1], [False], ["highest"], []
    monkeypatch.setattr(torch._C, "_get_deterministic_algorithms", lambda: deterministic[0])
    monkeypatch.setattr(torch._C, "_get_float32_matmul_precision", lambda: precision[0])
    monkeypatch.setattr(graphs, "captured", lambda *a: turns.append(turn) or again(*a))
    kept = Recordings(Graph, lambda: tuple(shared))
    for turn in range(6):
        if turn == 3:
            dict(memory=shared, determinism=deterministic, precision=precision)[what][0] = 2
        assert kept.run(more, None, torch.full((2,), float(turn)))[0].tolist() == [turn + 1.0] * 2
    assert turns == [1, 4]
    assert len(kept._recordings) == (1 if what == "memory" else 2)


def test_copies_of_graphs_are_none(on_cpu):
    """Be it a deep copy, as of a module, or a pickle: a graph is of this process's memory."""
    kept, x = Recordings(Graph, list), torch.ones(2)
    for _ in range(2):
        kept.run(more, None, x)
    for other in (copy.deepcopy(kept), pickle.loads(pickle.dumps(kept))):
        assert not other._recordings
        assert other.run(more, None, x)[0].tolist() == [2.0, 2.0]


def test_in_inference_mode_there_are_graphs_too(on_cpu):
    kept = Recordings(Graph)
    with torch.inference_mode():
        x = torch.zeros(2)
        for turn in range(4):
            assert kept.run(more, None, x)[0].tolist() == [turn + 1.0] * 2
            x.add_(1)


def test_what_fails_is_not_taken_for_captured(on_cpu):
    @in_place
    def fails(plan: None, x: Tensor) -> tuple[Tensor]:
        if x.sum() < 0:
            raise ValueError("no")
        return (x + 1,)

    kept = Recordings(Graph)
    with pytest.raises(ValueError, match="no"):
        kept.run(fails, None, torch.full((2,), -1.0))
    for i in range(3):
        assert kept.run(fails, None, torch.full((2,), float(i)))[0].tolist() == [i + 1.0] * 2


def observed_calls_are_replayed_too(patch: pytest.MonkeyPatch) -> None:
    """Forward and backward; nothing of what is within is known then."""
    stand_in(patch)
    given = [torch.randn(1, 6, 2, 8).requires_grad_() for _ in "qkv"]
    plan = RingPlan.make(*given, kernel="eager")
    captured, found = with_graphs(plan), []
    for each, watches in ((plan, False), *[(captured, False), (captured, True)] * 3):
        with observe() if watches else nullcontext():
            out = ring_attn(*given, plan=each)
            found.append([out, *torch.autograd.grad(out, given, torch.ones_like(out))])
    for results in found:
        assert all(torch.equal(a, b) for a, b in zip(results, found[0]))
    with pytest.raises(ValueError, match="without in_graphs"):
        captured.statistics()


def test_observed_calls_are_replayed_too(monkeypatch):
    observed_calls_are_replayed_too(monkeypatch)


def test_while_a_graph_is_captured_there_is_no_replay(on_cpu, monkeypatch):
    monkeypatch.setattr(graphs, "capturing", lambda device: True)
    kept = Recordings(Graph)
    for _ in range(3):
        assert kept.run(more, None, torch.ones(1))[0].item() == 2
    assert not kept._recordings


def replays_wait_for_those_before(machine: Machine, patch: pytest.MonkeyPatch) -> None:
    """On whatever stream those are, for they have the same memory for what is between."""
    patch.setattr(graphs, "captured", again)
    patch.setattr(Stream, "wait_stream", lambda self, other: self.before.update(other.before),
                  raising=False)  # fmt: skip
    patch.setattr(graphs, "capturing", lambda device: False)
    here, there = machine.stream, Stream(GPU)
    kept = Recordings(Graph)
    for stream, name in ((here, "a"), (here, "b"), (there, "c"), (here, "d")):
        machine.set_stream(stream)
        kept.run(more, None, torch.ones(1))
        machine.does(name)
    assert there.before == {"a", "b", "c"}
    assert here.before == {"a", "b", "c", "d"}


def test_replays_wait_for_those_before(monkeypatch):
    replays_wait_for_those_before(stood_in(monkeypatch), monkeypatch)


def test_layers_that_drop_otherwise_have_graphs_of_their_own(new_driver):
    q = torch.zeros(1, 4, 2, 8)
    plan = RingPlan.make(q, q, q, kernel="eager", dropout=0.5, dropout_seed=1)
    plan = on(plan, GPU).in_graphs()
    layer = plan.for_layer(1)
    assert has_graphs(layer)
    assert layer.recordings is not plan.recordings
    assert plan.for_layer(2).recordings is not layer.recordings
    assert plan.for_layer(1) is layer  # or it would never be replayed


def test_layers_that_drop_nothing_share_theirs(new_driver):
    q = torch.zeros(1, 4, 2, 8)
    plan = on(RingPlan.make(q, q, q, kernel="eager"), GPU).in_graphs()
    assert plan.for_layer(1).recordings is plan.recordings
    assert explain_plan(plan).splitlines()[0].endswith("kernel eager, in CUDA graphs")


def test_what_a_graph_holds_overlaps(new_driver):
    """Whatever fewer calls would spare the host; but of a kernel that merges by itself."""
    q = torch.zeros(1, 4, 2, 8)
    plan = on(RingPlan.make(q, q, q, kernel="eager"), GPU)
    other = replace(plan.transport)
    plan.calls(back=False)  # which may be others there
    two = replaced(plan, chosen=plan.chosen._replace(overlapping_transport=other))
    assert two.in_graphs().transport is two.in_graphs().in_graphs().transport is other
    assert not two.in_graphs()._shared.calls
    merging = replaced(two, kernel=plan.kernel._replace(traits=Traits(fuses_merge=True)))
    assert merging.in_graphs().transport is plan.in_graphs().transport is plan.transport


def test_what_travels_in_messages_is_refused():
    def main(ring: threads.ThreadRing) -> None:
        q = torch.zeros(1, 4, 2, 8)
        for transport in ("ring", "gather"):
            plan = RingPlan.make(q, q, q, kernel="eager", transport=transport, group=ring)
            for device in (CPU, GPU):
                with pytest.raises(ValueError, match="memory that GPUs share"):
                    on(plan, device).in_graphs()

    threads.run(2, main)


def older_drivers_are_refused(patch: pytest.MonkeyPatch) -> None:
    """As soon as graphs are asked for, which nobody is advised to do; modules go as ever."""
    q = torch.zeros(1, 4, 2, 8)
    plan = on(RingPlan.make(q, q, q, kernel="eager"), GPU)
    slow = explain.Prediction(Cost(1e-6, 1e-6, 1e-6, received=0, calls=1), swaps=0.0, host=1.0)
    patch.setattr(graphs, "can_be_set", lambda: True)
    assert has_graphs(plan.in_graphs())
    assert explain._of_host(plan, slow)[0].endswith("; in_graphs() spares that")
    patch.setattr(graphs, "can_be_set", lambda: False)
    assert "in_graphs" not in explain._of_host(plan, slow)[0]
    with pytest.raises(ValueError, match=r"need a driver of CUDA 12\.4"):
        plan.in_graphs()
    kept = GraphCache()
    assert all(kept.in_place_of(plan) is plan for _ in range(3))
    assert plan.replay.graph  # as a whole, by whoever does


def test_older_drivers_are_refused(monkeypatch):
    older_drivers_are_refused(monkeypatch)


def test_what_a_cpu_does_is_refused():
    q = torch.zeros(1, 4, 2, 8)
    with pytest.raises(ValueError, match="need tensors on CUDA"):
        RingPlan.make(q, q, q).in_graphs()
