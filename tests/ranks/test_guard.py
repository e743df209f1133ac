"""Checks that devices make of other ranks: by Triton's interpreter, in shared memory."""

import math
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest import mock
from zlib import crc32

import pytest
import torch.multiprocessing
from torch import Tensor

from ring_attention_pytorch.ranks import guard
from ring_attention_pytorch.ranks.failures import RingError, fail_together
from ring_attention_pytorch.ranks.guard import Board, Guard, Stamps
from ring_attention_pytorch.ranks.ring import Steps
from tests.support import threads
from tests.support.boards import CPU, without_clock
from tests.support.interpreter import interpreters, needs_triton
from tests.support.ranks import unhurried

pytestmark = needs_triton
RANKS = 3
SIZES = dict(RANKS=2, LANES=32, BLOCK=4096)
Purposes = tuple[str, ...]


@pytest.fixture(scope="module")
def ranks():
    """Three processes that have Triton's interpreter."""
    with interpreters(RANKS) as pool:
        yield pool


def meet(rank: int, boards: list[Tensor], purposes: Purposes, patience: float) -> dict[str, Any]:
    """Come to these meetings, and read others' memory after each; what was found, on this rank.

    "keys@3" is by plan 3, and "keys@3/5" differentiates call 5. After one that is "slow" this takes
    a second, but not on the last rank.
    """
    without_clock()
    board, read = Board(CPU, rank, boards, patience), []
    for purpose in purposes:
        if purpose == "fail":
            board.fail()
            continue
        if purpose == "sleep":
            time.sleep(1.0)
            continue
        kind, _, plan = purpose.partition("@")
        plan, _, call = plan.partition("/")
        back_of = int(call) if call else None
        board.barrier(kind, int(plan or 0), lambda back_of=back_of: back_of)()
        time.sleep(purpose == "slow" and rank < RANKS - 1)
        read.append(torch.ones(5, dtype=torch.bfloat16))
        board.fill_nan(read[-1], torch.ones(0))
    begin = time.monotonic()
    trouble = board.trouble()
    seconds = time.monotonic() - begin
    board.reset()
    assert board.trouble() is None
    assert board.state[:3].tolist() == [0, 0, 0]
    return dict(trouble=trouble, read=[t[-1].item() for t in read], seconds=seconds)


def met(
    pool: ProcessPoolExecutor, *each: Purposes, patience: float | list[float] = 300.0
) -> list[dict[str, Any]]:
    boards = [torch.zeros(2, len(each), dtype=torch.int64).share_memory_() for _ in each]
    seconds = patience if isinstance(patience, list) else [patience] * len(each)
    futures = [
        pool.submit(meet, rank, boards, mine, seconds[rank]) for rank, mine in enumerate(each)
    ]
    return [future.result(timeout=900.0) for future in futures]


def test_ranks_in_step_wait_for_one_another(ranks):
    everyone = ("keys", "keys", "gradients", "keys", "gradients")
    late = ("sleep", *everyone)
    for found in met(ranks, everyone, late, everyone):
        assert found["trouble"] is None
        assert found["read"] == [1.0] * 5


def meet_late(rank: int, boards: list[Tensor]) -> str | None:
    """Meet four times, after more meetings than a number with a sign counts in 32 bits."""
    without_clock()
    board = Board(CPU, rank, boards, patience=60.0)
    board.state[1] = 2**31 - 3
    for _ in range(4):
        board.wait_for_all("keys")
    return board.trouble()


def test_ranks_that_met_very_often_wait_no_longer(ranks):
    boards = [torch.zeros(2, RANKS, dtype=torch.int64).share_memory_() for _ in range(RANKS)]
    for future in [ranks.submit(meet_late, rank, boards) for rank in range(RANKS)]:
        assert future.result(timeout=900.0) is None


@pytest.mark.parametrize(
    "other",
    [
        ("keys", "keys"),
        ("keys@3", "keys"),
        pytest.param(("gradients", "keys"), marks=pytest.mark.thorough),
    ],
)
def test_a_rank_that_comes_for_something_else_is_found_by_all(other, ranks):
    """All that is read from there on is NaN, though later meetings may be of one mind again."""
    found = met(
        ranks, ("keys", "gradients", "keys"), (*other, "keys"), ("keys", "gradients", "keys")
    )
    right = other[0] == "keys"
    for rank, mine in enumerate(found):
        assert [math.isnan(x) for x in mine["read"]] == [not right, True, True]
        whose = "rank 0" if rank == 1 else "rank 1"
        assert whose in mine["trouble"] or "has failed" in mine["trouble"], mine
    assert any("has come for" in mine["trouble"] for mine in found), found


def test_a_backward_of_another_call_is_found_by_all(ranks):
    """Of calls that are equal but for their number, in one order on some ranks."""
    first, second = "gradients@3/7", "gradients@3/8"
    found = met(ranks, ("keys@3", first, second), ("keys@3", second, first), ("keys@3", first))
    for mine in found:
        assert [math.isnan(x) for x in mine["read"]][:2] == [False, True]
        assert "of another call" in mine["trouble"] or "has failed" in mine["trouble"], mine
    assert any(
        "gradients by plan 3, as this one, but of another call" in f["trouble"] for f in found
    )


def test_a_backward_of_an_unknown_call_matches_any(ranks):
    """As of compiled code on one rank; its kind and its plan must still be the others'."""
    known, unknown = "gradients@3/7", "gradients@3/0"
    for found in met(ranks, (known, known), (unknown, unknown), (known, unknown)):
        assert found["trouble"] is None
        assert found["read"] == [1.0] * 2
    for found in met(ranks, (known,), ("gradients@4/0",), (known,)):
        assert math.isnan(found["read"][0])


def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_the_timeout(ranks):
    seconds = unhurried(2.0)
    found = met(ranks, ("keys", "keys"), ("keys",), ("keys", "keys"), patience=seconds)
    for rank in (0, 2):
        assert [math.isnan(x) for x in found[rank]["read"]] == [False, True]
    told = [found[rank]["trouble"] for rank in (0, 2)]
    assert any(f"rank 1 did not come within {seconds:g} s: keys" in each for each in told), told
    assert all("rank 1 did not come" in each or "has failed" in each for each in told), told


@pytest.mark.thorough
def test_a_rank_that_comes_too_late_gets_nothing(ranks):
    """The others have given up, and may write what it would read."""
    found = met(
        ranks, ("keys",), (*["sleep"] * int(unhurried(2.0)), "keys"), ("keys",), patience=0.5
    )
    for mine in found:
        assert [math.isnan(x) for x in mine["read"]] == [True]
        assert mine["trouble"] is not None


@pytest.mark.parametrize("before", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_rank_that_gives_up_is_waited_for_by_nobody(before, ranks):
    """However often ranks have met before."""
    begin, common, seconds = time.monotonic(), ("keys",) * before, unhurried(0.5)
    patience = [seconds, 600.0, 600.0]
    found = met(ranks, (*common, "keys"), common, (*common, "keys"), patience=patience)
    assert time.monotonic() - begin < 500.0
    assert all(math.isnan(found[rank]["read"][-1]) for rank in (0, 2))
    assert f"rank 1 did not come within {seconds:g} s" in found[0]["trouble"]
    assert "rank 0 has failed" in found[2]["trouble"]


def test_what_is_read_of_a_rank_that_fails_meanwhile_is_nan(ranks):
    """It may have been overwritten."""
    found = met(ranks, ("slow",), ("slow",), ("slow", "fail"))
    assert [math.isnan(each["read"][0]) for each in found] == [True, True, False]


@pytest.mark.thorough
def test_a_rank_that_fails_is_waited_for_by_nobody(ranks):
    begin = time.monotonic()
    found = met(ranks, ("keys", "keys"), ("keys", "fail"), ("keys", "keys"), patience=600.0)
    assert time.monotonic() - begin < 500.0
    for rank in (0, 2):
        assert math.isnan(found[rank]["read"][1])
        assert "rank 1 has failed" in found[rank]["trouble"] or rank, found


SIGNATURES = {
    "barrier_kernel": dict(state="*i64", purpose="i32", rank="i32", patience="i64"),
    "fail_kernel": dict(state="*i64", rank="i32"),
    "fill_nan_kernel": dict(state="*i64", rank="i32", address="i64", nbytes="i64"),
    "compare_kernel": dict(
        state="*i64",
        number="i64",
        stamp="i64",
        peer="i32",
        expected="i32",
        address="i64",
        nbytes="i64",
    ),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_kernels_are_code_for_a_gpu(name):
    """Down to what the GPU's assembler takes, which no interpreter knows."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ring_attention_pytorch.ranks import _triton_guard

    kernel, types = getattr(_triton_guard, name), SIGNATURES[name]
    sizes = {n: s for n, s in SIZES.items() if n in kernel.arg_names}
    assert [*types, *sizes] == kernel.arg_names
    source = ASTSource(kernel, {**types, **dict.fromkeys(sizes, "constexpr")}, sizes)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=1))
    assert ".entry" in made.asm["ptx"]


def stamped(tags: list[int], sent: list[int]) -> tuple[str | None, list[bool]]:
    """Messages that come with these stamps where others were expected; which of them are NaN."""
    without_clock()
    stamps, messages = Stamps(CPU, timeout=100.0), []
    for tag, came in zip(tags, sent):
        messages.append(torch.ones(9000))
        here = stamps.empty()
        here.copy_(stamps.of(came))
        stamps.compare([here], tag, [(1, messages[-1])])
    trouble = stamps.trouble()
    stamps.reset()
    assert stamps.trouble() is None
    return trouble, [bool(message.isnan().all()) for message in messages]


def test_messages_of_other_calls_are_nan_and_so_are_all_after_them(ranks):
    tags = [5, 2**31 - 1, 7, 8]
    assert ranks.submit(stamped, tags, tags).result() == (None, [False] * 4)
    trouble, spoiled = ranks.submit(stamped, tags, [5, 6, 7, 8]).result()
    assert spoiled == [False, True, True, True]
    assert "what rank 1 sent was for another call" in trouble


def in_a_graph() -> list[int]:
    """The number of the last exchange that came, after one by itself and one that is captured."""
    without_clock()
    stamps, numbers = Stamps(CPU, timeout=100.0), []
    for captured in (False, True, False):
        stamps.device = torch.device("cuda" if captured else "cpu")
        with mock.patch.object(guard, "capturing", return_value=True):
            stamps.compare([stamps.of(1)], 1, [(1, torch.ones(1))])
        numbers.append(int(stamps._flags[4]))
    stamps._overdue._drop_those_that_came()
    return [*numbers, len(stamps._overdue._waiting)]


def test_replays_of_a_captured_message_are_not_waited_for(ranks):
    """Its number would be lower than that of messages that came since."""
    assert ranks.submit(in_a_graph).result() == [1, 1, 3, 0]


def test_what_inference_made_can_be_forgotten_in_training():
    with torch.inference_mode():
        made = Guard(CPU)
    made.reset()
    assert made.trouble() is None


def of_many_plans(plans: int) -> tuple[int, str]:
    """Return how many kinds of meetings a board remembers, and what it says of the last."""
    without_clock()
    board = Board(CPU, 0, [torch.zeros(2, 1, dtype=torch.int64)], patience=5.0)
    for plan in range(plans):
        board.wait_for_all("keys", plan)
    board.fail()
    board.wait_for_all("gradients", plans)
    return len(board._kinds), board._purpose((plans << 12) + (crc32(b"keys") & 0xFFF))


def test_a_board_remembers_no_plan(ranks):
    """One is made for each batch, perhaps for weeks."""
    assert ranks.submit(of_many_plans, 9).result() == (2, "keys by plan 9")


def of_many_ranks(rank: int, time: int, names: range = range(0)) -> tuple[bool, str]:
    """Whether what was read is NaN after that rank of twenty has failed, and what is said of it."""
    without_clock()
    boards = [torch.zeros(2, 20, dtype=torch.int64) for _ in range(20)]
    board, read = Board(CPU, 0, boards, patience=5.0, names=names), torch.ones(5)
    boards[0][time, rank] = -1
    board.fill_nan(read)
    return read.isnan().all().item(), board.trouble() or ""


@pytest.mark.parametrize("time", [0, 1])
@pytest.mark.parametrize("rank", [1, 19])
def test_any_of_many_ranks_may_fail_at_any_time(rank, time, ranks):
    """There may be more words on a board than ranks have threads that wait."""
    assert ranks.submit(of_many_ranks, rank, time).result() == (True, f"rank {rank} has failed")


def test_ranks_of_a_machine_have_the_names_of_their_ring(ranks):
    said = ranks.submit(of_many_ranks, 3, 0, range(40, 60)).result()[1]
    assert said == "rank 43 has failed"


class Found:
    """A guard whose device has found something; `done` is what it was asked to do."""

    def __init__(self, trouble: str | None) -> None:
        self.told, self.done = trouble, []

    def trouble(self) -> str | None:
        return self.told

    def wait(self) -> None:
        self.done.append("wait")

    def reset(self) -> None:
        self.told = None
        self.done.append("reset")

    def fail(self) -> None:
        self.done.append("fail")


def of_ring(trouble: dict[int, str], run: Callable[[threads.ThreadRing], Any]) -> list[Any]:
    """Return the result of each rank of a ring whose devices have found this."""

    def main(ring: threads.ThreadRing) -> Any:
        guard = Found(trouble.get(ring.rank))
        ring.steps.watch(guard)
        return run(ring), guard.done, guard.told

    return threads.run(RANKS, main)[0]


def test_the_next_call_says_what_a_device_found():
    steps = Steps()
    steps.watch(Found("rank 1 did not come"))
    for _ in range(2):
        with pytest.raises(RingError, match="rank 1 did not come"), steps.begin("forward", 0, None):
            pass
    with pytest.raises(RingError, match="rank 1 did not come"):
        steps.tag()


def test_a_plan_says_on_all_ranks_what_one_device_found_and_mends_the_ring():
    def run(ring: threads.ThreadRing) -> None:
        with pytest.raises(RingError, match="rank 2: rank 0 did not come; the ring is whole again"):
            ring.gather_notes("a plan", b"first")
        assert ring.gather_notes("a plan", b"a\0b") == [b"a\0b"] * RANKS
        with ring.call("forward", 0, None):
            pass

    assert of_ring({2: "rank 0 did not come"}, run) == [(None, ["wait", "reset"], None)] * RANKS


def test_what_a_call_has_said_a_plan_does_not_say_again():
    """Though all devices forget it, for ranks' numbers may differ by now."""

    def run(ring: threads.ThreadRing) -> None:
        if ring.rank == 0:
            with pytest.raises(MemoryError), ring.call("forward", 0, None):
                raise MemoryError
        if ring.rank == 2:
            with pytest.raises(RingError), ring.call("forward", 0, None):
                pass
        assert ring.gather_notes("a plan", b"note") == [b"note"] * RANKS

    found = of_ring({2: "rank 0 did not come"}, run)
    assert found[1:] == [(None, ["wait", "reset"], None)] * 2
    assert found[0] == (None, ["fail", "wait", "reset"], None)


def test_devices_tell_of_a_failure_in_a_call_and_elsewhere_in_fail_together():
    steps, guard = Steps(), Found(None)
    steps.watch(guard)
    with pytest.raises(ZeroDivisionError), fail_together():
        raise ZeroDivisionError
    assert guard.done == ["fail"]
    with (
        pytest.raises(MemoryError),
        steps.begin("forward", 0, None),
        steps.begin("a part of it", 0, None),
    ):
        raise MemoryError
    assert guard.done == ["fail", "fail"]


def test_a_device_that_fails_hides_no_error():
    steps, guard = Steps(), Found(None)
    guard.fail = mock.Mock(side_effect=RuntimeError)
    steps.watch(guard)
    with pytest.raises(MemoryError), fail_together(), steps.begin("forward", 0, None):
        raise MemoryError
    assert guard.fail.called
