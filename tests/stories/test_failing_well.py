"""What one rank gets wrong all ranks are told, at once and in the same words; nobody hangs."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from itertools import product
from typing import Any
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
from tests.support.ranks import Pool

SIZE, ALTERED = 4, 2  # how many ranks, and which of them is different
OTHERS = "ranks 0, 1, 3"

Call = dict[str, Any]


def good() -> Call:
    """What all ranks but one call, each with six tokens."""
    q, k, v = torch.randn(2, 6, 4, 8), torch.randn(2, 6, 2, 8), torch.randn(2, 6, 2, 8)
    return {"q": q, "k": k, "v": v, "layout": "zigzag", "causal": True, "window": 9}


def resized(**sizes: int) -> Callable[[Call], None]:
    """Tensors of other sizes, by the names of the dimensions."""

    def change(call: Call) -> None:
        s = {"b": 2, "n": 6, "m": 6, "h": 4, "g": 2, "d": 8, "d_v": 8, **sizes}
        call["q"] = torch.randn(s["b"], s["n"], s["h"], s["d"])
        call["k"] = torch.randn(s["b"], s["m"], s["g"], s["d"])
        call["v"] = torch.randn(s["b"], s["m"], s["g"], s["d_v"])

    return change


def each(change: Callable[[torch.Tensor], Any]) -> Callable[[Call], None]:
    return lambda call: call.update({name: change(call[name]) for name in "qkv"})


def given(**options: Any) -> Callable[[Call], None]:
    return lambda call: call.update(options)


def first(change: Callable[[torch.Tensor], Any]) -> Callable[[Call], None]:
    return lambda call: call.update(q=change(call["q"]))


# what is altered, how, and what must be said
ALTERATIONS: dict[str, tuple[Callable[[Call], None], list[str]]] = {
    "batch": (resized(b=3), ["batch size", f"2 on {OTHERS}", "3 on rank 2"]),
    "heads": (resized(h=6), ["heads of q", f"4 on {OTHERS}", "6 on rank 2"]),
    "no heads": (resized(h=0), ["there must be heads", "[2, 6, 0, 8]", "(on rank 2)"]),
    "key heads": (resized(g=4), ["heads of k", f"2 on {OTHERS}", "4 on rank 2"]),
    "d": (resized(d=4), ["head size of q and k", f"8 on {OTHERS}", "4 on rank 2"]),
    "d_v": (resized(d_v=4), ["head size of v", f"8 on {OTHERS}", "4 on rank 2"]),
    "dtype": (
        each(torch.Tensor.double),
        ["dtype", f'"torch.float32" on {OTHERS}', '"torch.float64" on rank 2'],
    ),
    "causal": (given(causal=False), ["causal", f"true on {OTHERS}", "false on rank 2"]),
    "window": (given(window=8), ["window", f"9 on {OTHERS}", "8 on rank 2"]),
    "no window": (given(window=None), ["window", f"9 on {OTHERS}", "null on rank 2"]),
    "scale": (given(scale=0.5), ["scale", f"null on {OTHERS}", "0.5 on rank 2"]),
    "softclamp": (given(softclamp=5.0), ["softclamp", f"null on {OTHERS}", "5.0 on rank 2"]),
    "layout": (
        given(layout="striped"),
        ["layout", f'"zigzag" on {OTHERS}', '"striped" on rank 2'],
    ),
    "kernel": (given(kernel="eager"), ["kernel", f"null on {OTHERS}", '"eager" on rank 2']),
    "key mask": (
        given(key_mask=torch.ones(2, 6, dtype=torch.bool)),
        ["key_mask", f"null on {OTHERS}", '"given" on rank 2'],
    ),
    "cross": (given(cross=False), ["cross", f"null on {OTHERS}", "false on rank 2"]),
    "grad mode": (given(no_grad=True), ["grad mode", f"true on {OTHERS}", "false on rank 2"]),
    "requires_grad": (
        first(torch.Tensor.requires_grad_),
        ["requires_grad of q, k, v", "[true, false, false] on rank 2"],
    ),
    "one token less": (
        resized(n=5, m=5),
        ["layout='zigzag' puts [5, 6, 6, 6] of 23 tokens", "got [6, 6, 5, 6]", "shard_sequence"],
    ),
    "one query less": (
        resized(n=5),
        ["query lengths [6, 6, 5, 6]", "key lengths [6, 6, 6, 6]", "causal and window"],
    ),
    "dimensions": (first(lambda q: q[0]), ["got q [6, 4, 8]", "on rank 2", "[batch, tokens"]),
    "heads that do not divide": (resized(h=3), ["multiple", "q [2, 6, 3, 8]", "on rank 2"]),
    "k unlike v": (
        lambda call: call.update(v=call["v"][:, :4]),
        ["v [2, 4, 2, 8]", "must agree", "on rank 2"],
    ),
    "mixed dtypes": (
        first(torch.Tensor.double),
        ["one floating dtype", "torch.float64, torch.float32", "on rank 2"],
    ),
    "integers": (each(torch.Tensor.int), ["floating dtype", "torch.int32", "on rank 2"]),
    "mask dtype": (
        given(key_mask=torch.ones(2, 6)),
        ["key_mask must be bool [2, 6]", "got torch.float32 [2, 6]", "on rank 2"],
    ),
    "mask shape": (
        given(key_mask=torch.ones(2, 24, dtype=torch.bool)),
        ["key_mask must be bool [2, 6]", "got torch.bool [2, 24]", "on rank 2"],
    ),
    "unknown layout": (given(layout="spiral"), ["'zigzag', got 'spiral'", "on rank 2"]),
    "long unknown layout": (given(layout="🦙" * 3000), ["layout must be one of", "on rank 2"]),
    "unknown kernel": (given(kernel="fast"), ["'eager', got 'fast'", "on rank 2"]),
    "kernel that can't": (
        given(kernel="sdpa", softclamp=2.0),
        ["kernel='sdpa' has no softclamp", "on rank 2"],
    ),
    "negative window": (given(window=-1), ["window", "got -1", "on rank 2"]),
    "infinite scale": (given(scale=float("inf")), ["scale must be finite, got inf", "on rank 2"]),
    "NaN scale": (given(scale=float("nan")), ["scale must be finite, got nan", "on rank 2"]),
    "softclamp of zero": (given(softclamp=0.0), ["softclamp", "got 0.0", "on rank 2"]),
    "bucket size": (given(bucket_size=0), ["bucket_size", "got 0", "on rank 2"]),
    "masked cross attention": (
        given(cross=True),
        ["cross attention has no causal", "on rank 2"],
    ),
}


def told(ring: Ring, name: str | None) -> tuple[str | None, float]:
    """What one rank is told, and after how many seconds."""
    torch.manual_seed(0)
    call = good()
    if ring.rank == ALTERED and name is not None:
        ALTERATIONS[name][0](call)
    mode = torch.no_grad() if call.pop("no_grad", False) else nullcontext()
    start = time.monotonic()
    try:
        with mode:
            ring_attn(call.pop("q"), call.pop("k"), call.pop("v"), group=ring, **call)
        text = None
    except ValueError as error:
        text = str(error)
    return text, time.monotonic() - start


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
    assert max(seconds) < 1


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
    pool = Pool(3, timeout=30, group_timeout=20)
    try:
        answers = pool.answers(struck, message)
    finally:
        pool.stop()
    assert "the process died" in str(answers[1])
    assert [kind for kind, _ in (answers[0], answers[2])] == ["ok"] * 2
    (text, seconds), (other_text, other_seconds) = answers[0][1], answers[2][1]
    assert "waited for" in text
    assert "waited for" in other_text
    assert min(seconds, other_seconds) < 10
    # a rank whose message had left before the other died waits for the first one to raise, which
    # has not sent yet: seldom, and at most for the timeout
    assert max(seconds, other_seconds) < 21


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
    pool = Pool(2, timeout=20, group_timeout=3)
    try:
        (waited, seconds), (refused, _) = pool.run(planned_for_other_lengths)
    finally:
        pool.stop()
    assert "the plan was made for batch=1, n=5" in refused
    assert waited != "nothing"
    assert seconds < 5


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
    absent: ("waited for rank 1, in vain for 4 s. rank 1: no word: failed, late, or in no", ""),
    of_a_wrong_type: ("rank 1 raised ValueError: ring_attn() parameter q=", "parameter q="),
    by_a_stale_plan: ("by plan 1, hop 1 at test_failing", "Ranks must be given the same plan"),
    without_a_plan: ("rank 1 waits in comparing notes", "rank 0 waits in ring attention, forward"),
    backward_alone: ("", "Each rank must call backward()"),
    backward_against_forward: ("rank 1 waits in ring attention, backward", "comparing notes"),
}  # fmt: skip


def otherwise(act: Callable[[bool, RingPlan, torch.Tensor], None]) -> str:
    """For a pool of two: what this rank is told where rank 1 does otherwise."""
    q = torch.randn(1, 5, 2, 8, requires_grad=True)
    group = dist.new_group(timeout=timedelta(seconds=4))  # to be made, too, on a busy machine
    plan = RingPlan.make(q, q, q, group=group)
    try:
        act(dist.get_rank() == 1, plan, q)
    except (ValueError, RingError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("act", WORDS)
def test_last_words_of_a_rank_reach_those_who_wait_for_it(act, pools):
    told = pools(2).run(otherwise, act)
    for words, text in zip(WORDS[act], told):
        assert words in text
        assert "/gloo/" not in text
