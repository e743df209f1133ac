"""When a rank fails: what the others see, and what can be gone on with."""

import gc
import os
import re
import runpy
import select
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from ring_attention_pytorch import RingAttention, RingError, RingPlan, fail_together, ring_attn
from ring_attention_pytorch.ranks import failures
from ring_attention_pytorch.ranks import ring as rings
from ring_attention_pytorch.ranks.notes import _host_group
from ring_attention_pytorch.ranks.ring import Ring
from tests.support import threads
from tests.support.out_of_step import EVENTS, OTHER, SIZE, plans_of
from tests.support.ranks import Pool, unhurried
from tests.support.reference import dense_attention, relative_error
from tests.support.sampling import in_ci
from tests.support.strikes import STRIKES, Strike, outcomes

ROOT = Path(__file__).parents[2]


# --- each event, phase and transport ---


@pytest.mark.parametrize(
    "strike",
    [
        Strike("raises", "forward", "ring", True),
        Strike("has no memory left", "backward", "gather", True),
        Strike("is killed", "forward", "Ulysses", True),
    ],
    ids=lambda strike: "-".join(strike[:3]),
)
def test_in_fail_together_all_hear_of_it_at_once(strike):
    (seen,) = outcomes([strike]).values()
    assert {(each.error, each.when) for each in seen} == {("RingError", "at once")}
    assert max(each.afterwards for each in seen) < 1e-12
    assert any("waited for rank" in each.text and each.waited_for for each in seen)


@pytest.mark.thorough
def test_the_page_says_what_the_others_see_of_each_strike(sample):
    script = runpy.run_path(str(ROOT / "docs" / "write_reliability.py"))
    page = (ROOT / "docs" / "reliability.md").read_text()
    alike = sample([strike for strike in STRIKES if not strike.together], 12)
    strikes = [each._replace(together=which) for each in alike for which in (False, True)]
    for _ in range(2):  # a machine that is busy may need a second one to be in time
        found = outcomes(strikes)
        untrue = script["untrue"](page, script["table"](found))
        late = [each for each, seen in found.items() if any(one.is_late for one in seen)]
        assert max(one.afterwards for seen in found.values() for one in seen) < 1e-12
        if not (untrue or late):
            break
    assert (untrue, late) == ([], [])


def test_the_page_may_promise_later_than_what_is_seen_but_not_sooner():
    script = runpy.run_path(str(ROOT / "docs" / "write_reliability.py"))
    page = (ROOT / "docs" / "reliability.md").read_text()
    rows = page.split(script["BEGIN"])[1].split(script["END"])[0]
    assert len(script["apart"](rows)) == 2 + sum(not strike.together for strike in STRIKES)
    assert script["untrue"](page, rows.replace("within the timeout", "at once")) == []
    assert len(script["untrue"](page, rows.replace("at once", "within the timeout"))) > 10
    assert script["untrue"](page, rows.replace("is killed", "is well")) != []
    assert script["untrue"](page, rows[: rows.rindex("| ")]) != []


# --- a broken ring, and how it is mended ---


def shards(ring: Ring, seed: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(100 * seed + ring.rank)
    return [
        torch.randn(1, 4, 2, 8, generator=draw, dtype=torch.float64).requires_grad_()
        for _ in range(3)
    ]


def right(ring: Ring, seed: int, **options: object) -> bool:
    """True if a call over the ring is right, forward and backward."""
    mine = shards(ring, seed)
    out = ring_attn(*mine, group=ring, **options)
    got = [out, *torch.autograd.grad(out.square().sum(), mine)]
    drawn = [shards(_at(ring, rank), seed) for rank in range(ring.size)]
    whole = [torch.cat(t, dim=1) for t in zip(*drawn)]
    want, _ = dense_attention(*whole)
    exact = [want, *torch.autograd.grad(want.square().sum(), whole)]
    return all(
        relative_error(t, e.chunk(ring.size, dim=1)[ring.rank]) < 1e-12 for t, e in zip(got, exact)
    )


def _at(ring: Ring, rank: int) -> Ring:
    found = Ring.alone()
    found.rank, found.size = rank, ring.size
    return found


def caught_by_all(ring: Ring, transport: str, places: list[int]) -> tuple[str, bool]:
    """All ranks fail in a call, each at another call of its kernel, and catch it; then go on."""
    mine = shards(ring, 1)
    plan = RingPlan.make(*mine, group=ring, transport=transport, kernel="eager")
    forward, calls = plan.kernel.forward, [0]

    def failing(*given: object) -> None:
        if calls[0] == places[ring.rank]:
            raise MemoryError("none left")
        calls[0] += 1
        forward(*given)

    object.__setattr__(plan, "kernel", plan.kernel._replace(forward=failing))
    with pytest.raises(MemoryError):
        ring_attn(*mine, plan=plan)
    with pytest.raises(RingError) as told:
        ring_attn(*mine, plan=plan)
    return str(told.value), all([right(ring, seed, transport=transport) for seed in (2, 3)])


def caught_over_gloo(transport: str, places: list[int]) -> tuple[str, bool]:
    """For a pool."""
    return caught_by_all(Ring(), transport, places)


@contextmanager
def failing_once() -> Iterator[None]:
    """A block in which each rank's first call has no memory, before anything is sent."""
    tiles, failed = RingPlan.tiles, set()

    def once(plan: RingPlan, *given: object) -> object:
        if plan.ring.rank not in failed:
            failed.add(plan.ring.rank)
            raise MemoryError("none left")
        return tiles(plan, *given)

    with mock.patch.object(RingPlan, "tiles", once):
        yield


def test_a_broken_ring_says_so_until_the_next_plan():
    def main(ring: threads.ThreadRing) -> None:
        mine = shards(ring, 1)
        plan = RingPlan.make(*mine, group=ring)
        with pytest.raises(MemoryError):
            ring_attn(*mine, plan=plan)
        with pytest.raises(RingError, match="MemoryError: none left"):
            ring_attn(*mine, plan=plan)
        assert right(ring, 2)
        assert ring_attn(*mine, plan=plan).shape == mine[0].shape

    with failing_once():
        threads.run(2, main)


@pytest.mark.parametrize("transport", ["ring", "gather"])
@pytest.mark.parametrize("places", [[0] * 4, [0, 1, 1, 0]], ids=["alike", "in other hops"])
def test_what_all_ranks_caught_is_mended_by_their_next_plan(transport, places, pools):
    if transport == "gather":
        places = [min(place, 1) for place in places]
    for told, good in pools(4).run(caught_over_gloo, transport, places):
        assert "broken on this rank since a call failed (ring attention, forward: call" in told
        assert "MemoryError: none left" in told
        assert "all ranks make a plan" in told
        assert good


def fails_alone(transport: str, seconds: float) -> tuple[list[str], bool]:
    """For a pool: rank 1 has no memory left, all catch it; what plans say, and of a new group."""
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    ring, told = Ring(group), []
    mine = shards(ring, 1)
    plan = RingPlan.make(*mine, group=ring, transport=transport)
    another = partial(RingPlan.make, *mine, group=ring)
    for call in (partial(ring_attn, *mine, plan=plan), another, another):
        start = time.monotonic()
        try:
            with failing_once() if ring.rank == 1 and not told else nullcontext():
                call()
            told.append("nothing")
        except (MemoryError, RingError) as error:
            soon = time.monotonic() - start < seconds / 2
            told.append(f"{error}, {'at once' if soon else 'late'}")
    return told, right(Ring(dist.new_group()), 2, transport=transport)


@pytest.mark.parametrize("transport", [pytest.param("ring", marks=pytest.mark.thorough), "gather"])
def test_where_others_waited_in_vain_plans_say_at_once_that_a_new_group_is_needed(transport, pools):
    seconds = unhurried(6.0)
    (waited, *plans), good = (found := pools(2).run(fails_alone, transport, seconds))[0]
    (failed, *others), also_good = found[1]
    assert f"waited for rank 1, in vain for {seconds:g} s" in waited
    assert failures.NEW_GROUP in waited
    assert "none left" in failed
    for text in plans:
        assert failures.NEW_GROUP in text
        assert text.endswith("at once")
    assert all(failures.NEW_GROUP in text for text in others)
    assert others[1].endswith("at once")
    assert good
    assert also_good


def words_after_mending(seconds: float) -> list[str]:
    """For a pool of two: rank 1 fails, what it said is told; a plan mends it; then it is absent."""
    told = []
    for mended in (False, True):
        group = dist.new_group(timeout=timedelta(seconds=seconds))
        ring = Ring(group)
        mine = shards(ring, 1)
        plan = RingPlan.make(*mine, group=ring)
        if ring.rank == 1:
            with pytest.raises(MemoryError), ring.call("a call", 0, None):
                raise MemoryError("none left")
        if mended:
            plan = RingPlan.make(*mine, group=ring)
        try:
            if ring.rank == 0:
                ring_attn(*mine, plan=plan)
        except RingError as error:
            told.append(str(error))
    return told


@in_ci
def test_words_of_a_failure_that_was_mended_are_told_no_more(pools):
    (before, after), _ = pools(2).run(words_after_mending, unhurried(2.0))
    assert "rank 1 raised MemoryError in a call: call 2, hop 0: none left" in before
    assert "rank 1: no word" in after


def test_modules_mend_the_ring_by_their_next_call():
    def main(ring: threads.ThreadRing) -> None:
        attention = RingAttention(8, dim_head=4, heads=2, ring_attn=True, group=ring)
        x = torch.randn(1, 3, 8)
        with pytest.raises(MemoryError):
            attention(x)
        assert attention(x).shape == x.shape

    with failing_once():
        threads.run(2, main)


def test_alone_nothing_breaks():
    q = torch.randn(1, 4, 2, 8)
    plan = RingPlan.make(q, q, q)
    with mock.patch.object(RingPlan, "tiles", side_effect=MemoryError), pytest.raises(MemoryError):
        ring_attn(q, q, q, plan=plan)
    assert ring_attn(q, q, q, plan=plan).shape == q.shape


def test_what_ranks_disagree_about_breaks_nothing():
    def main(ring: threads.ThreadRing) -> None:
        q = torch.randn(1, 4, 2, 8)
        plan = RingPlan.make(q, q, q, group=ring)
        with pytest.raises(ValueError, match="causal must be the same"):
            ring_attn(q, q, q, group=ring, causal=ring.rank == 0)
        assert ring_attn(q, q, q, plan=plan).shape == q.shape

    threads.run(2, main)


# --- who waits for whom, while it waits ---


def waits_for_long(seconds: float) -> list[str]:
    """For a pool: what is logged while rank 1 is late twice: for notes, and for keys."""
    told: list[str] = []
    rings.logger.addFilter(lambda record: told.append(record.getMessage()))
    mine, look = shards(ring := Ring(), 1), partial(mock.patch.object, rings.waits, "_seconds")
    plan = RingPlan.make(*mine, transport="ring")
    try:
        with look(0.2):
            for call in (
                lambda: RingPlan.make(*mine, causal=True),
                lambda: ring_attn(*mine, plan=plan),
            ):
                time.sleep(seconds * ring.rank)  # the thread may have slept for one before
                call()
    finally:
        rings.logger.filters.clear()
    return told


def test_who_waits_for_whom_is_told_while_it_waits(pools):
    told, nothing = pools(2).run(waits_for_long, unhurried(1.6))
    assert nothing == []
    notes = [text for text in told if "comparing notes on ring attention" in text]
    keys = [text for text in told if "ring attention, forward: call 2 by plan" in text]
    assert notes, told
    assert keys, told
    for text in told:
        where = r"at test_failing_ranks.py:\d+"
        assert re.search(rf"waits for rank 1, for \d+ s by now, {where}", text), text


# --- notes in each call ---


@pytest.mark.parametrize("transport", ["ring", "gather"])
@pytest.mark.parametrize("event", [name for name in EVENTS if not name.startswith("fails")])
def test_notes_in_each_call_tell_all_ranks_at_once_who_is_where(event, transport):
    def main(ring: threads.ThreadRing) -> str:
        def all_that_is_done() -> None:
            EVENTS[event](ring, plans_of(ring, transport))
            ring_attn(*shards(ring, 1), group=ring)  # where the others' last one has no partner

        with pytest.raises(ValueError, match="ranks are in different calls") as told:
            all_that_is_done()
        return str(told.value)

    with mock.patch.dict(os.environ, RING_ATTENTION_CHECK="always"):
        (told,) = {*threads.run(SIZE, main)[0]}
    others = ", ".join(str(rank) for rank in range(SIZE) if rank != OTHER)
    assert re.search(rf"ranks {others}: ring attention.* at out_of_step\.py:\d+", told)
    assert re.search(rf"rank {OTHER}: ring attention.* at out_of_step\.py:\d+", told)


def test_with_notes_in_each_call_all_is_right_and_none_goes_without():
    def main(ring: threads.ThreadRing) -> int:
        assert right(ring, 1, check="always")
        return ring.hub.gathers[ring.rank]

    assert threads.run(3, main)[0] == [threads.run(3, lambda r: right(r, 1))[1].gathers[0] + 2] * 3


def test_how_often_notes_are_compared_must_be_known_and_alike(monkeypatch):
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(
        ValueError, match="RING_ATTENTION_CHECK, must be None or 'always', got 'so'"
    ):
        ring_attn(q, q, q, check="so")
    monkeypatch.setenv("RING_ATTENTION_CHECK", "often")
    with pytest.raises(ValueError, match="got 'often'"):
        ring_attn(q, q, q)
    monkeypatch.delenv("RING_ATTENTION_CHECK")

    def main(ring: threads.ThreadRing) -> None:
        check = "always" if ring.rank == 1 else None
        with pytest.raises(ValueError, match="check must be the same on every rank"):
            ring_attn(q, q, q, group=ring, check=check)

    threads.run(2, main)


# --- processes ---


def in_a_fork(call: Callable[[], object]) -> str:
    try:
        call()
    except RingError as error:
        return str(error)
    return "nothing"


def forks() -> str:
    """For a pool: what a forked child of this rank is told, of a call and of one by an old plan."""
    q = torch.randn(1, 4, 2, 8)
    plan = RingPlan.make(q, q, q)
    end, other_end = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of forking beside threads
        child = os.fork()
    if child == 0:
        told = [
            in_a_fork(lambda: ring_attn(q, q, q)),
            in_a_fork(lambda: ring_attn(q, q, q, plan=plan)),
        ]
        os.write(other_end, "\n".join(told).encode())
        os._exit(0)
    try:
        ready, _, _ = select.select([end], [], [], 20)
        return os.read(end, 10_000).decode() if ready else "it hangs"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_forked_child_with_its_parent_s_group_is_refused(pools):
    for told in pools(2).run(forks):
        assert told.count("forked from one that had a process group") == 2, told


def without_group(rank: int, folder: str) -> None:
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(ValueError, match="there is no process group") as found:
        ring_attn(q, q, q)
    Path(folder, str(rank)).write_text(str(found.value))


@pytest.mark.thorough
def test_spawned_processes_without_a_group_are_refused(tmp_path):
    mp.spawn(without_group, (str(tmp_path),), nprocs=2)
    for rank in range(2):
        assert "torch.multiprocessing started this process" in (tmp_path / str(rank)).read_text()


def test_fail_together_lets_errors_pass_and_says_nothing_outside():
    with pytest.raises(ZeroDivisionError), fail_together():
        raise ZeroDivisionError
    with fail_together():
        assert right(Ring(), 1)


# --- nothing grows ---


def companions() -> list[int]:
    """For a pool: groups before, with, and after one that moves no CPU tensors."""

    def groups() -> int:
        gc.collect()
        return len(dist.distributed_c10d._world.pg_map)

    found = [groups()]
    group = dist.new_group(backend="cuda:gloo")
    assert Ring(group).gather_notes("nothing", b"") == [b""] * dist.get_world_size()
    assert _host_group(group) is not group
    found.append(groups())
    dist.destroy_process_group(group)
    del group
    found.append(groups())
    return found


def test_the_companion_of_a_group_ends_with_it(pools):
    for before, between, after in pools(2).run(companions):
        assert (between, after) == (before + 2, before)


def alive() -> tuple[int, int, int]:
    """Return how many tensors, threads and file descriptors there are."""
    gc.collect()
    tensors = sum(isinstance(found, Tensor) for found in gc.get_objects())
    return tensors, len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def step_by_step(steps: int) -> list[tuple[int, int, int]]:
    """For a pool: what is alive after some steps of training, and after ten times as many."""
    ring, found = Ring(), []
    attention = RingAttention(8, dim_head=4, heads=2, causal=True, ring_attn=True).double()
    optimizer = torch.optim.SGD(attention.parameters(), lr=0.1)
    for step in range(steps):
        x = torch.randn(1, 4 + step % 3, 8, dtype=torch.float64)
        optimizer.zero_grad()
        attention(x).square().sum().backward()
        assert right(ring, step)
        optimizer.step()
        if step in (steps // 10, steps - 1):
            found.append(alive())
    return found


def group_by_group(groups: int) -> list[tuple[int, int, int]]:
    """For a pool: what is alive after a tenth of so many groups, and after all of them."""
    found = []
    for number in range(groups):
        group = dist.new_group(timeout=timedelta(seconds=30))
        assert right(Ring(group), number)
        dist.destroy_process_group(group)
        del group
        if number in (groups // 10, groups - 1):
            found.append(alive())
    return found


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts what Linux shows")
@pytest.mark.thorough
@pytest.mark.parametrize(("run", "times"), [(step_by_step, 200), (group_by_group, 50)])
def test_nothing_grows(run: Callable[[int], list], times: int):
    pool = Pool(2)
    try:
        for early, late in pool.run(run, times):
            assert all(after <= before + 2 for before, after in zip(early, late)), (early, late)
    finally:
        pool.stop()


def test_processes_of_torchrun_without_a_group_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: True)
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(ValueError, match="torchrun started this process as one of several"):
        ring_attn(q, q, q)
