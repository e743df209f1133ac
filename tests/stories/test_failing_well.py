"""All ranks hear of one rank's mistake, at once and in the same words; nobody hangs."""

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ring_attention_pytorch.functional import ring_attn
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.ranks.failures import RingError
from ring_attention_pytorch.ranks.ring import Ring
from tests.support import threads
from tests.support.cases import FIGURES, Attention, check_in_processes
from tests.support.mistakes import ALTERATIONS, SIZE, told
from tests.support.ranks import Pool, unhurried
from tests.support.sampling import grid


def all_told() -> dict[str | None, tuple[str | None, float]]:
    """For a pool: every alteration, one after the other: after each the ring is as good as new."""
    ring = Ring()
    told(ring, None)
    return {name: told(ring, name) for name in (*ALTERATIONS, None)}


def assert_well_told(name: str, answers: list[tuple[str | None, float]]) -> None:
    texts, seconds = zip(*answers)
    FIGURES.seconds_to_error = max(FIGURES.seconds_to_error, *seconds)
    assert len(set(texts)) == 1, f"not the same on all ranks: {texts}"
    assert texts[0] is not None, "no error"
    for part in ("ring attention: ", *ALTERATIONS[name][1]):
        assert part in texts[0]
    assert max(seconds) < 60  # nobody waits for a timeout


@pytest.mark.parametrize("name", ALTERATIONS)
def test_a_rank_that_differs_is_told_to_all_threads(name):
    answers, hub = threads.run(SIZE, lambda ring: told(ring, name))
    assert_well_told(name, answers)
    assert hub.exchanges == [0] * SIZE, "tensors were sent"


@pytest.fixture(scope="module")
def told_processes(pools) -> list[dict[str | None, tuple[str | None, float]]]:
    return pools(SIZE).run(all_told)


@pytest.mark.parametrize("name", ALTERATIONS)
def test_a_rank_that_differs_is_told_to_all_processes(name, told_processes):
    assert_well_told(name, [answers[name] for answers in told_processes])


def test_after_errors_the_same_processes_go_on(told_processes):
    assert [answers[None][0] for answers in told_processes] == [None] * SIZE


def test_all_ranks_wrong_alike_is_told_without_ranks():
    q = torch.randn(1, 4, 2, 8)

    def main(ring: Ring) -> str:
        with pytest.raises(ValueError, match="got -3") as error:
            ring_attn(q, q, q, window=-3, group=ring)
        return str(error.value)

    texts, _ = threads.run(3, main)
    assert set(texts) == {"ring attention: window must be None or at least 0, got -3"}


def test_lengths_of_which_one_rank_sees_no_change_neither_hang_nor_err(pools):
    """Ten and nine tokens over two ranks: shards of 5 and 5, and of 5 and 4."""
    lengths = (10, 9, 10, 9, 9, 10)
    cases = [Attention(n, causal=True, seed=n) for n in lengths]
    check_in_processes(cases, pools(2))


def test_options_that_change_from_call_to_call_do_not_stick(pools):
    cases = [
        Attention(12, layout, causal=causal, window=window)
        for layout, causal, window in product(("striped", "zigzag"), (False, True), (None, 1))
    ]
    check_in_processes(cases * 2, pools(2))


# --- violence: nobody waits longer than must be ---


def struck(message: int) -> tuple[str, float]:
    """For a pool: rank 1 is killed at its so-and-so-many-th message. What a survivor sees."""
    send, sent = dist.batch_isend_irecv, 0

    def strike(ops: list[dist.P2POp]) -> list[dist.Work]:
        nonlocal sent
        sent += 1
        if dist.get_rank() == 1 and sent == message:
            os.kill(os.getpid(), signal.SIGKILL)
        return send(ops)

    q = torch.randn(1, 4, 2, 8, requires_grad=True)
    dist.barrier()
    start = time.monotonic()
    try:
        with mock.patch.object(dist, "batch_isend_irecv", strike):
            ring_attn(q, q, q, causal=True).sum().backward()
    except RingError as error:
        return str(error), time.monotonic() - start
    return "nothing", time.monotonic() - start


@pytest.mark.parametrize("message", [1, 2, 3, 5])
def test_a_survivor_of_a_rank_raises_at_once_and_the_other_in_time(message):
    pool = Pool(3, group_timeout=(patience := unhurried(40.0)))
    try:
        answers = pool.answers(struck, message)
    finally:
        pool.stop()
    assert "the process died" in str(answers[1])
    assert [kind for kind, _ in (answers[0], answers[2])] == ["ok"] * 2
    (text, seconds), (other_text, other_seconds) = answers[0][1], answers[2][1]
    assert "waited for" in text
    assert "waited for" in other_text
    assert min(seconds, other_seconds) < 0.75 * patience
    # a rank whose message had left before the other died waits for the first one to raise, which
    # has not sent yet: seldom, and at most for the timeout
    assert max(seconds, other_seconds) < 1.5 * patience


def planned_for_other_lengths() -> tuple[str, float]:
    """For a pool of two: a plan for 10 tokens; then rank 1 brings its shard of 9."""
    q = torch.randn(1, 5, 2, 8)
    plan = RingPlan.make(q, q, q, causal=True)
    if dist.get_rank() == 1:
        q = q[:, :4]
    start = time.monotonic()
    try:
        ring_attn(q, q, q, plan=plan)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "nothing", 0.0


def test_a_plan_for_other_lengths_is_refused_and_nobody_waits_beyond_the_timeout():
    pool = Pool(2, group_timeout=unhurried(3.0))
    try:
        (waited, seconds), (refused, _) = pool.run(planned_for_other_lengths)
    finally:
        pool.stop()
    assert "the plan was made for batch=1, n=5" in refused
    assert waited != "nothing"
    assert seconds < 100  # not the pool's


# --- one rank does otherwise while the others have a plan: its last words reach those who wait ---


def absent(one: bool, plan: RingPlan, q: torch.Tensor) -> None:
    if not one:
        ring_attn(q, q, q, plan=plan)


def of_a_wrong_type(one: bool, plan: RingPlan, q: torch.Tensor) -> None:
    ring_attn(q.tolist() if one else q, q, q, plan=plan)


def by_a_stale_plan(one: bool, plan: RingPlan, q: torch.Tensor) -> None:
    newer = RingPlan.make(q, q, q, causal=True, group=plan.ring.group)
    ring_attn(q, q, q, plan=plan if one else newer)


def without_a_plan(one: bool, plan: RingPlan, q: torch.Tensor) -> None:
    how = {"group": plan.ring.group} if one else {"plan": plan}
    ring_attn(q, q, q, **how)


def backward_alone(one: bool, plan: RingPlan, q: torch.Tensor) -> None:
    out = ring_attn(q, q, q, plan=plan)
    if one:
        out.sum().backward()


def backward_against_forward(one: bool, plan: RingPlan, q: torch.Tensor) -> None:
    backward_alone(one, plan, q)
    ring_attn(q, q, q, group=plan.ring.group)


# what rank 1 does otherwise, and what ranks 0 and 1 are told
WORDS: dict[Callable[[bool, RingPlan, torch.Tensor], None], tuple[str, str]] = {
    absent: ("waited for rank 1, in vain for {} s. rank 1: no word: failed, late, or in no", ""),
    of_a_wrong_type: ("rank 1 raised ValueError: ring_attn() parameter q=", "parameter q="),
    by_a_stale_plan: ("by plan 1, hop 1 at test_failing", "Ranks must be given the same plan"),
    without_a_plan: ("rank 1 waits in comparing notes", "rank 0 waits in ring attention, forward"),
    backward_alone: ("", "Each rank must call backward()"),
    backward_against_forward: ("rank 1 waits in ring attention, backward", "comparing notes"),
}  # fmt: skip


def otherwise(act: Callable[[bool, RingPlan, torch.Tensor], None], seconds: float) -> str:
    """For a pool of two: what this rank is told where rank 1 does otherwise."""
    q = torch.randn(1, 5, 2, 8, requires_grad=True)
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    plan = RingPlan.make(q, q, q, group=group)
    try:
        act(dist.get_rank() == 1, plan, q)
    except (ValueError, RingError) as error:
        return str(error)
    return ""


@grid("act", WORDS, always=3, drawn=2)
def test_last_words_of_a_rank_reach_those_who_wait_for_it(act, pools):
    told = pools(2).run(otherwise, act, seconds := unhurried(4.0))
    for words, text in zip(WORDS[act], told):
        assert words.format(f"{seconds:g}") in text
        assert "/gloo/" not in text
