"""Plans that are warmed up: their first real call makes nothing anew, and is right."""

import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ring_attention_pytorch import RingPlan, ring_attn, warm_up
from ring_attention_pytorch.plan import plan_cache
from ring_attention_pytorch.runtime import launches
from tests.support import threads
from tests.support.cases import over_shared_memory

HOW: dict[str, Any] = dict(causal=True, layout="zigzag")


@pytest.fixture(autouse=True)
def _new_plans() -> None:
    plan_cache.forget()


def shards(transposed: bool = False) -> list[Tensor]:
    given = [torch.randn(2, 20, h, 8, dtype=torch.float64) for h in (4, 2, 2)]
    if transposed:
        given = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in given]
    return [t.requires_grad_() for t in given]


def step(plan: RingPlan, given: list[Tensor], *shared: Tensor, **more: Tensor) -> list[Tensor]:
    out = ring_attn(*given, plan=plan, shared_keys=shared or None, **more)
    wanted = [*given, *shared, *more.values()]
    return [out, *torch.autograd.grad(out, wanted, torch.cos(out).detach())]


def replays(plan: RingPlan, given: list[Tensor], *shared: Tensor, **more: Tensor) -> list[Tensor]:
    """Do a step, by the tapes that there are."""
    known = [tape.replay for tape in plan.tapes.by_kind.values()]
    assert all(known)
    found = step(plan, given, *shared, **more)
    assert [
        tape.replay for tape in plan.tapes.by_kind.values()
    ] == known  # what is recorded comes in the place of another
    return found


@pytest.mark.parametrize("transposed", [False, True])
def test_the_first_step_after_it_replays(transposed: bool) -> None:
    given, sinks = shards(transposed), torch.randn(4, dtype=torch.float64, requires_grad=True)
    before = [t.clone() for t in given]
    options = dict(causal=True, sinks=sinks)
    fresh = RingPlan.make(*given, **options)
    plan_cache.forget()
    plan = RingPlan.make(*given, **options)
    plan.warm_up(*(given if transposed else ()), sinks=sinks)
    found, wanted = replays(plan, given, sinks=sinks), step(fresh, given, sinks=sinks)
    assert all(torch.equal(*pair) for pair in zip(found, wanted))
    assert all(torch.equal(*pair) for pair in zip(given, before))
    assert all(t.grad is None for t in (*given, sinks))


def test_shared_keys_are_warmed_up_too() -> None:
    given, shared = shards(), [torch.randn(2, 5, 2, 8, dtype=torch.float64) for _ in "kv"]
    shared = [t.requires_grad_() for t in shared]
    options = dict(causal=True, shared_keys=tuple(shared))
    fresh = RingPlan.make(*given, **options)
    plan_cache.forget()
    plan = RingPlan.make(*given, **options)
    plan.warm_up()
    found, wanted = replays(plan, given, *shared), step(fresh, given, *shared)
    assert all(torch.equal(*pair) for pair in zip(found, wanted))


def test_shared_keys_are_warmed_up_beside_a_swap_of_heads() -> None:
    def main(ring: threads.ThreadRing) -> None:
        given = shards()
        plan = RingPlan.make(*given, group=ring, ulysses=2, shared_keys=(*given[1:],), **HOW)
        plan.warm_up()
        tapes = plan.shared.tapes.by_kind.values()
        assert [tape.replay is not None for tape in tapes] == [True, True]

    threads.run(2, main)


def test_without_gradients_only_forward_is_warm() -> None:
    with torch.no_grad():
        plan = RingPlan.make(*shards(), causal=True)
        plan.warm_up()
    assert [kind[0].__name__ for kind in plan.tapes.by_kind] == ["forward"]


def test_ranks_warm_up_together_and_are_told_what_is_wrong_with_one() -> None:
    def main(ring: threads.ThreadRing) -> str:
        given = shards()
        made = RingPlan.make(*given, group=ring, **HOW)
        plan, fresh = (over_shared_memory(made, given, ring, 9, together=True) for _ in range(2))
        plan.warm_up()
        pairs = zip(replays(plan, given), step(fresh, given))
        assert all(torch.equal(*pair) for pair in pairs)
        with pytest.raises(ValueError, match="warming up a plan") as told:
            plan.warm_up(*(t[:, ring.rank :] for t in given))
        step(plan, given)
        return str(told.value)

    (told,) = {*threads.run(2, main)[0]}
    assert "n=19" in told
    assert told.endswith("(on rank 1)")


def one_rank_of_each_host_compiles_first(patch: pytest.MonkeyPatch) -> None:
    """Others find what it has left on the disk; all are told if it can't."""
    order, fails, here = [], [False], threading.local()

    def compiles(calls: list[str]) -> None:
        order.extend(calls)
        if calls and fails[0]:
            raise MemoryError("no room")

    def dry(*_: object) -> None:
        launches._thread.held["kernel"] = f"rank {here.rank}"

    patch.setattr(warm_up, "compile_together", compiles)
    patch.setattr(warm_up, "_dry_run", dry)

    def main(ring: threads.ThreadRing) -> str:
        here.rank = ring.rank
        given = SimpleNamespace(ring=ring), [torch.zeros(1)], None
        warm_up._compile(*given)
        fails[0] = True
        with pytest.raises(ValueError, match="no room") as told:
            warm_up._compile(*given)
        return str(told.value)

    told, _ = threads.run(4, main, machines=(0, 1, 0, 1))
    assert len({*told}) == 1
    assert sorted(order[:2]) == ["rank 0", "rank 1"]
    assert sorted(order[2:4]) == ["rank 2", "rank 3"]
    assert sorted(order[4:]) == ["rank 0", "rank 1"]


def test_one_rank_of_each_host_compiles_first(monkeypatch: pytest.MonkeyPatch) -> None:
    one_rank_of_each_host_compiles_first(monkeypatch)


def what_is_compiled_ahead_is_no_first_call(patch: pytest.MonkeyPatch) -> None:
    """Kernels are held back in a call, forward and backward, that a plan knows nothing of."""
    calls, run = [], RingPlan.run
    patch.setattr(warm_up, "_launches_ours", lambda plan: True)
    patch.setattr(
        RingPlan, "run",
        lambda plan, direction, *given, back_of: calls.append(
            (direction, plan, launches._thread.held, torch._C._is_multithreading_enabled())
        ) or run(plan, direction, *given, back_of=back_of),
    )  # fmt: skip
    plan = RingPlan.make(*shards(), causal=True)
    plan.warm_up()
    first, back, *others = calls
    assert [first[0], back[0]] == ["forward", "backward"]
    assert first[2] is back[2] is not None
    assert all(each is not plan and not threads for _, each, _, threads in (first, back))
    assert all(each is plan and kept is None for _, each, kept, _ in others)
    assert len(others) == 8


def test_what_is_compiled_ahead_is_no_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    what_is_compiled_ahead_is_no_first_call(monkeypatch)


def what_is_anything_is_no_anomaly(patch: pytest.MonkeyPatch) -> None:
    """Results of kernels that are held back may well be NaN."""
    patch.setattr(warm_up, "_launches_ours", lambda plan: True)
    attend, given = warm_up.attention, shards()

    def spoiled(plan: RingPlan, *of: Any) -> tuple[Tensor, Any]:
        out, lse = attend(plan, *of)
        return out * (torch.nan if launches._thread.held is not None else 1.0), lse

    patch.setattr(warm_up, "attention", spoiled)
    with torch.autograd.set_detect_anomaly(True):
        RingPlan.make(*given, causal=True).warm_up()


def test_what_is_anything_is_no_anomaly(monkeypatch: pytest.MonkeyPatch) -> None:
    what_is_anything_is_no_anomaly(monkeypatch)


def test_what_fails_in_one_rank_s_dry_run_is_told_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def dry(plan: Any, *_: object) -> None:
        if plan.ring.rank == 1:
            raise MemoryError("too little")

    monkeypatch.setattr(warm_up, "_dry_run", dry)

    def main(ring: threads.ThreadRing) -> str:
        with pytest.raises(ValueError, match="too little") as told:
            warm_up._compile(SimpleNamespace(ring=ring), [torch.zeros(1)], None)
        return str(told.value)

    told, _ = threads.run(2, main)
    assert told[0] == told[1]


def test_it_imports_nothing_that_takes_a_second() -> None:
    """PyTorch imports sympy where a gradient is given; attention needs none of it."""
    code = (
        "import sys, torch; from ring_attention_pytorch import RingPlan;"
        "q = torch.zeros(1, 4, 2, 8);"
        "RingPlan.make(q, q, q).warm_up(); assert 'sympy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=900)
