"""Calls in two passes over rings of threads, with loops in the place of fla's kernels."""

import random

import pytest
import torch

from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.recurrent import (
    cuts,
    fla_passes,
    layers,
    ring_gated_delta_rule,
    ring_kda,
    scan,
)
from tests.support import fla_loops, threads
from tests.support.recurrent_cases import D_K, D_V, HEADS, Spread, check, data, delta


@pytest.mark.parametrize("rule", [ring_gated_delta_rule, ring_kda])
@pytest.mark.parametrize("seed", range(8))
def test_two_passes_equal_one_process(monkeypatch, rule, seed) -> None:
    """Outputs, last states and all gradients, also of initial states."""
    fla_loops.stand_in(monkeypatch)
    spread = Spread.drawn(seed)
    sharded, normal = data(spread, rule is ring_kda, seed)
    same = {"initial": normal(spread.batch, HEADS, D_K, D_V)} if seed % 2 else {}
    ours, reference = delta(rule, normalize=True)
    check(spread, sharded, same, lambda **given: ours(**given, kernel="fla"), reference, 1e-10)


@pytest.mark.parametrize(("size", "doubling"), [(2, False), (3, False), (3, True), (8, True)])
def test_without_final_states(monkeypatch, size, doubling) -> None:
    fla_loops.stand_in(monkeypatch)
    for module in (scan, fla_passes):
        monkeypatch.setattr(module, "gathers", lambda ranks: not doubling)
    spread = Spread(size, 41, 1, "zigzag", [[0, 11, 13, 41]] if size == 3 else None)
    sharded, _ = data(spread, False, 1)

    def ours(*, plan, **given):
        out, _ = ring_gated_delta_rule(**given, plan=plan, normalize=True, kernel="fla")
        return {"out": out}

    def reference(**given):
        return {"out": delta(None, True)[1](**given)["out"]}

    check(spread, sharded, {}, ours, reference, 1e-10)


@pytest.mark.parametrize("pieces", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 17])
def test_runs_in_pieces_equal_one_process(monkeypatch, size, pieces) -> None:
    """Rings of 17 compose maps by doubling."""
    fla_loops.stand_in(monkeypatch)
    monkeypatch.setattr(cuts, "CHUNK", 1)
    monkeypatch.setattr(cuts, "longest_of", lambda tokens: -(-10 // pieces))
    layout = "contiguous" if size % 2 else "zigzag"
    length, draw = 10 * size * (1 + (layout == "zigzag")), random.Random(pieces)
    borders = [[0, *sorted(draw.sample(range(1, length), 3)), length]] if pieces % 2 else None
    spread = Spread(size, length, 1, layout, borders)
    rule = ring_kda if pieces == 2 else ring_gated_delta_rule
    sharded, normal = data(spread, rule is ring_kda, size)
    same = {"initial": normal(1, HEADS, D_K, D_V)} if pieces < 4 else {}
    ours, reference = delta(rule, normalize=True)
    check(spread, sharded, same, lambda **given: ours(**given, kernel="fla"), reference, 1e-10)


def bytes_of_a_call(spread: Spread, ring: Ring, final: bool) -> list[int]:
    """Count the bytes a rank sends forward and backward, in a second call of the same kind."""
    sharded, _ = data(spread, False, 0)
    at, plan, found = spread.held(ring.rank), spread.plan(ring), []
    mine = {name: t[:, at].requires_grad_() for name, t in sharded.items()}
    for _ in range(2):
        begin = ring.hub.sent_bytes[ring.rank]
        out, _ = ring_gated_delta_rule(**mine, plan=plan, final=final, kernel="fla")
        forward = ring.hub.sent_bytes[ring.rank]
        torch.autograd.grad(out.square().sum(), [*mine.values()])
        found = [forward - begin, ring.hub.sent_bytes[ring.rank] - forward]
    return found


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_only_maps_of_runs_travel(monkeypatch, size, layout, final) -> None:
    fla_loops.stand_in(monkeypatch)  # which cuts runs at 4 tokens or more
    spread = Spread(size, 96, 1, layout, None)

    def main(ring):
        plan = spread.plan(ring)
        counts = [len(plan.runs.sent(rank, final)) for rank in range(size)]
        u, own = HEADS * D_K * D_V * 8, counts[ring.rank]
        forward, backward = bytes_of_a_call(spread, ring, final)
        if not final:
            assert f"{own} of {sum(counts)} are sent" in plan.explain(HEADS, D_K, D_V)
        assert forward == (size - 1) * own * HEADS * D_K * (D_V + D_K) * 8
        assert backward == (sum(counts) - own) * u

    threads.run(size, main)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_doubling_composes_maps_of_runs(monkeypatch, layout) -> None:
    fla_loops.stand_in(monkeypatch)
    spread, found = Spread(17, 17 * 12, 1, layout, None), []
    for longest in (4, 12):
        monkeypatch.setattr(cuts, "_SHORTEST", longest)
        of_ranks, _ = threads.run(17, lambda ring: bytes_of_a_call(spread, ring, False))
        found.append(of_ranks)
    assert found[0] == found[1]


def test_backward_twice(monkeypatch) -> None:
    fla_loops.stand_in(monkeypatch)
    spread = Spread(2, 24, 1, "zigzag", None)
    sharded, _ = data(spread, False, 0)

    def main(ring):
        at, plan = spread.held(ring.rank), spread.plan(ring)
        mine = {name: t[:, at].requires_grad_() for name, t in sharded.items()}
        out, _ = ring_gated_delta_rule(**mine, plan=plan, kernel="fla")
        loss, leaves = out.square().sum(), [*mine.values()]
        one, two = (torch.autograd.grad(loss, leaves, retain_graph=True) for _ in range(2))
        assert all(map(torch.equal, one, two))

    threads.run(2, main)


@pytest.mark.parametrize("doubling", [False, True])
def test_autocast_reaches_no_gradient(monkeypatch, doubling) -> None:
    fla_loops.stand_in(monkeypatch)
    for module in (scan, fla_passes):
        monkeypatch.setattr(module, "gathers", lambda ranks: not doubling)
    spread = Spread(2, 12, 1, "zigzag", None)
    sharded, _ = data(spread, False, 0)

    def main(ring):
        at, plan, found = spread.held(ring.rank), spread.plan(ring), []
        for on in (False, True):
            mine = {name: t[:, at].float().requires_grad_() for name, t in sharded.items()}
            with torch.autocast("cpu", torch.bfloat16, enabled=on):
                out, last = ring_gated_delta_rule(**mine, plan=plan, final=True, kernel="fla")
                loss = out.square().sum() + last.square().sum()
                found.append(torch.autograd.grad(loss, [*mine.values()]))
        assert all(map(torch.equal, *found))

    threads.run(2, main)


@pytest.mark.parametrize("batch", [1, 2])
def test_outputs_may_be_changed_in_place(monkeypatch, batch) -> None:
    fla_loops.stand_in(monkeypatch)
    spread = Spread(2, 12, batch, "zigzag", None)
    sharded, _ = data(spread, False, 0)

    def main(ring):
        at, plan, found = spread.held(ring.rank), spread.plan(ring), []
        for change in (torch.Tensor.mul, torch.Tensor.mul_):
            mine = {name: t[:, at].requires_grad_() for name, t in sharded.items()}
            out, _ = ring_gated_delta_rule(**mine, plan=plan, kernel="fla")
            loss = change(out, 2.0).square().sum()
            found.append(torch.autograd.grad(loss, [*mine.values()]))
        assert all(map(torch.equal, *found))

    threads.run(2, main)


def test_torch_compile_traces_no_kernel_of_fla(monkeypatch) -> None:
    fla_loops.stand_in(monkeypatch)
    traced = []

    def passes(*given):
        traced.append(torch.compiler.is_compiling())
        return two_passes(*given)

    two_passes = layers.two_passes
    monkeypatch.setattr(layers, "two_passes", passes)
    spread = Spread(1, 12, 1, "contiguous", [[0, 5, 12]])
    sharded, _ = data(spread, False, 0)

    def main(ring):
        plan = spread.plan(ring)

        def layer(**given):
            return ring_gated_delta_rule(**given, plan=plan, kernel="fla")[0]

        assert torch.equal(torch.compile(layer, backend="eager")(**sharded), layer(**sharded))

    threads.run(1, main)
    assert traced == [False, False]


def test_second_derivatives_are_an_error(monkeypatch) -> None:
    """Also those of a linear loss: its cotangent needs no gradient, the gradients would."""
    fla_loops.stand_in(monkeypatch)
    spread = Spread(2, 12, 1, "zigzag", None)
    sharded, _ = data(spread, False, 0)

    def main(ring):
        at = spread.held(ring.rank)
        mine = {name: t[:, at].requires_grad_() for name, t in sharded.items()}
        out, _ = ring_gated_delta_rule(**mine, plan=spread.plan(ring), kernel="fla")
        for loss in (out.square().sum(), out.sum()):
            with pytest.raises(NotImplementedError, match="by kernels of fla can't be different"):
                torch.autograd.grad(loss, [*mine.values()], create_graph=True, retain_graph=True)

    threads.run(2, main)


def test_a_phase_repeats_what_it_did_with_other_tensors() -> None:
    """And gives back the arguments themselves where they are results."""

    def phase(call: object, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        calls.append(call)
        return y, x + y, None

    calls: list[object] = []
    repeated = fla_passes._Phase(phase)
    for number in range(6):
        x, y = torch.full((2,), float(number)), torch.ones(2)
        same, total, nothing = repeated("call", x, y)
        assert same is y
        assert torch.equal(total, x + y)
        assert nothing is None
    assert len(calls) == 3  # the first, and two that are recorded
