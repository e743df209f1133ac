"""The scan over runs, against a loop over the runs of each document."""

import pytest
import torch

from ring_attention_pytorch.recurrent import ring_scan, scan
from tests.support import threads
from tests.support.recurrent_cases import Spread
from tests.support.reference import relative_error

H, D_K, D_V = 2, 3, 4


def maps(runs, kind: str):
    """A map of each run, the same on every rank."""
    shape = {"full": (H, D_K, D_K), "heads": (H,), "channels": (H, D_K)}[kind]
    draw = torch.Generator().manual_seed(0)
    every = [run for held in runs.held for run in held]
    m = torch.randn(len(every), *shape, generator=draw, dtype=torch.float64) / 2
    u = torch.randn(len(every), H, D_K, D_V, generator=draw, dtype=torch.float64)
    return every, m, u


def by_hand(runs, every, m, u, initial):
    place = {run: number for number, run in enumerate(every)}
    found, last = {}, list(initial)
    for chain in runs.chains:
        state = torch.zeros_like(initial[0])
        if runs.begins(chain[0]) is not None:
            state = initial[chain[0].sample]
        for run in chain:
            found[run], number = state, place[run]
            if m.ndim == 4:
                state = torch.einsum("hij,hjv->hiv", m[number], state) + u[number]
            else:
                factor = m[number] if m.ndim == 3 else m[number][:, None]
                state = factor[..., None] * state + u[number]
        if chain[0].document == runs.last[chain[0].sample]:
            last[chain[0].sample] = state
    return found, torch.stack(last)


@pytest.mark.parametrize("kind", ["full", "heads", "channels"])
@pytest.mark.parametrize("seed", range(8))
def test_states_before_runs_and_their_gradients(kind, seed) -> None:
    spread = Spread.drawn(seed)
    draw = torch.Generator().manual_seed(1)
    begin = torch.randn(spread.batch, H, D_K, D_V, generator=draw, dtype=torch.float64)

    def main(ring):
        plan = spread.plan(ring)
        every, m, u = maps(plan.runs, kind)
        mine = [every.index(run) for run in plan.mine]
        own = [t.clone().requires_grad_() for t in (m[mine], u[mine], begin)]
        state, last = ring_scan(own[0], own[1], plan=plan, initial=own[2], final=True)
        leaves = [t.clone().requires_grad_() for t in (m, u, begin)]
        found, ends = by_hand(plan.runs, every, *leaves)
        want = torch.stack([found[run] for run in plan.mine]) if mine else state.detach()
        assert relative_error(state, want) < 1e-12
        assert relative_error(last, ends) < 1e-12
        got = torch.autograd.grad(state.square().sum() + last.sum() / ring.size, own)
        total = sum(t.square().sum() for t in found.values()) + ends.sum()
        grads = torch.autograd.grad(total, leaves, materialize_grads=True)
        for t, expected in zip(got[:2], grads):
            assert relative_error(t, expected[mine]) < 1e-12
        return got[2], grads[2]

    of_ranks, _ = threads.run(spread.size, main)
    assert relative_error(sum(got for got, _ in of_ranks), of_ranks[0][1]) < 1e-12


@pytest.mark.parametrize("kind", ["full", "heads", "channels"])
@pytest.mark.parametrize("seed", range(8))
def test_by_doubling(monkeypatch, kind, seed) -> None:
    """Which is for more ranks."""
    monkeypatch.setattr(scan, "gathers", lambda ranks: False)
    test_states_before_runs_and_their_gradients(kind, seed)


@pytest.mark.parametrize("gathers", [True, False])
def test_second_derivatives_exchange_on_all_ranks_alike(monkeypatch, gathers) -> None:
    monkeypatch.setattr(scan, "gathers", lambda ranks: gathers)
    spread = Spread(3, 12, 1, "zigzag", None)

    def main(ring):
        plan = spread.plan(ring)
        every, m, u = maps(plan.runs, "full")
        mine = [every.index(run) for run in plan.mine]
        results = []
        for ours in (True, False):
            leaves = [t.clone().requires_grad_() for t in ((m[mine], u[mine]) if ours else (m, u))]
            if ours:
                state, _ = ring_scan(*leaves, plan=plan)
                loss = state.square().sum()
            else:
                found, _ = by_hand(plan.runs, every, *leaves, torch.zeros(1, H, D_K, D_V).double())
                loss = sum(t.square().sum() for t in found.values())
            first = torch.autograd.grad(loss, leaves, create_graph=True, materialize_grads=True)
            total = sum(t.square().sum() for t in first)
            second = torch.autograd.grad(total, leaves, materialize_grads=True)
            results.append(second if ours else [t[mine] for t in second])
        for got, want in zip(*results):
            assert relative_error(got, want) < 1e-12

    threads.run(3, main)


@pytest.mark.parametrize("gathers", [True, False])
def test_ranks_whose_losses_need_different_states(monkeypatch, gathers) -> None:
    """One the states before runs, one the last ones, one both: none waits for another."""
    monkeypatch.setattr(scan, "gathers", lambda ranks: gathers)
    monkeypatch.setattr(threads, "PATIENCE", 20.0)
    spread = Spread(3, 12, 1, "zigzag", None)

    def chosen(rank, before, last):
        parts = [before.square().sum()] * (rank < 2) + [last.square().sum()] * (rank > 0)
        return sum(parts)

    def main(ring):
        plan = spread.plan(ring)
        every, m, u = maps(plan.runs, "full")
        mine = [every.index(run) for run in plan.mine]
        own = [t[mine].clone().requires_grad_() for t in (m, u)]
        got = torch.autograd.grad(chosen(ring.rank, *ring_scan(*own, plan=plan, final=True)), own)
        leaves = [t.clone().requires_grad_() for t in (m, u)]
        found, last = by_hand(plan.runs, every, *leaves, torch.zeros(1, H, D_K, D_V).double())
        total = sum(
            chosen(rank, torch.stack([found[run] for run in plan.runs.held[rank]]), last)
            for rank in range(3)
        )
        for t, expected in zip(got, torch.autograd.grad(total, leaves)):
            assert relative_error(t, expected[mine]) < 1e-12

    threads.run(3, main)


@pytest.mark.parametrize("shapes", [((2, 2, 3, 4), (2, 2, 3, 4)), ((2, 3), (2, 2, 3, 4)),
                                    ((1, 2), (1, 2, 3, 4)), ((2, 2), (2, 2))])  # fmt: skip
def test_wrong_maps(shapes) -> None:
    plan = Spread(1, 4, 1, "contiguous", [[0, 2, 4]])
    with pytest.raises(ValueError, match="m must be"):
        threads.run(1, lambda ring: ring_scan(*map(torch.zeros, shapes), plan=plan.plan(ring)))


def test_shapes_that_differ_between_ranks() -> None:
    spread = Spread(2, 4, 1, "contiguous", None)

    def main(ring):
        u = torch.zeros(1, 2, 3, 4 + ring.rank)
        with pytest.raises(ValueError, match="shapes must be the same on every rank"):
            ring_scan(torch.zeros(1, 2), u, plan=spread.plan(ring))

    threads.run(2, main)


@pytest.mark.parametrize("borders", [None, [[0, 2, 4]]], ids=["one", "whole documents"])
@pytest.mark.parametrize("name", ["final", "initial", "requires_grad"])
def test_calls_that_differ_between_ranks(borders, name) -> None:
    spread = Spread(2, 4, 1, "contiguous", borders)

    def main(ring):
        m, u = torch.zeros(1, 2), torch.zeros(1, 2, 3, 4)
        given = {"final": True} if name == "final" and ring.rank else {}
        given |= {"initial": u} if name == "initial" and ring.rank else {}
        m.requires_grad_(name == "requires_grad" and ring.rank == 1)
        with pytest.raises(ValueError, match=f"{name} must be the same on every rank"):
            ring_scan(m, u, plan=spread.plan(ring), **given)

    threads.run(2, main)


@pytest.mark.parametrize("name", ["m", "u", "initial"])
@pytest.mark.parametrize("dtype", [torch.long, torch.complex64, torch.float64])
def test_no_map_is_cast_to_what_holds_less(name, dtype) -> None:
    given = dict(m=torch.zeros(1, 2), u=torch.zeros(1, 2, 3, 4), initial=torch.zeros(1, 2, 3, 4))
    if dtype == torch.float64 and name == "u":  # the others are cast to it
        return
    given[name] = given[name].to(dtype)
    plan = Spread(1, 4, 1, "contiguous", None)
    with pytest.raises(ValueError, match=f"{name} must be floating, at most torch.float32"):
        threads.run(1, lambda ring: ring_scan(**given, plan=plan.plan(ring)))
