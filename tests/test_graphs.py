"""Calls that are captured and replayed: with graphs that do again what a CPU was told."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ring_attention_pytorch import RingPlan, explain_plan, graphs, ring_attn
from ring_attention_pytorch.graphs import Graphs
from tests import threads
from tests.cases import Attention, over_shared_memory
from tests.test_lanes import Machine, Stream, stood_in

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


@pytest.fixture
def on_cpu(monkeypatch):
    stand_in(monkeypatch)


def more(plan: None, x: Tensor) -> tuple[Tensor]:
    return (x + 1,)


def in_graphs(plan: RingPlan) -> RingPlan:
    return replace(plan, graphs=Graphs(CPU, plan.transport.follow_stream))


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
        plan = over_shared_memory(plan, [q, k, v], ring, 9, overtaken)
        want = [plain(plan, *layer) for layer in layers]
        captured = in_graphs(plan)
        got = [t for i in (0, 3, 6) for t in interleaved(captured, layers[i : i + 3])]
        for layer, (mine, expected) in enumerate(zip(got, want)):
            for a, b in zip(mine, expected):
                assert torch.equal(a, b), f"layer {layer}"
        assert all(captured.graphs._kept.values())  # both ways backward, too

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
        "run", "followed", "captured", "run", "run", "followed", "run", "followed", "run",
    ]  # fmt: skip


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
    patch.setattr(graphs, "capturing", lambda device: False)
    here, there = machine.stream, Stream(GPU)
    kept = Graphs(GPU, lambda: None)
    for stream, name in ((here, "a"), (here, "b"), (there, "c"), (here, "d")):
        machine.set_stream(stream)
        kept.run(more, None, torch.ones(1))
        machine.does(name)
    assert there.before == {"a", "b", "c"}
    assert here.before == {"a", "b", "c", "d"}


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


def test_layers_that_drop_nothing_share_theirs():
    q = torch.zeros(1, 4, 2, 8)
    plan = replace(RingPlan.make(q, q, q, kernel="eager"), device=GPU).in_graphs()
    assert plan.for_layer(1).graphs is plan.graphs
    assert explain_plan(plan).splitlines()[0].endswith("kernel eager, in CUDA graphs")


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
