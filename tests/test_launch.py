"""Launchers whose waits end: workers fail together, and none outlives what has started it."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from ring_attention_pytorch import RingPlan, launch, ring_attn
from ring_attention_pytorch.launch import spawn
from tests.support import ranks
from tests.support.ranks import unhurried
from tests.support.sampling import in_ci
from tests.support.scripts import SOON, WAIT, Script, linux

assert ranks


def command_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


# --- a worker fails ---


def work(rank: int, how: str, *rest: Any) -> Any:
    """Do a worker's part: rank 1 something of its own, while others wait for it."""
    torch.set_num_threads(1)
    shared = torch.ones(2)
    dist.all_reduce(shared)
    if how == "fine":
        return rank, shared, *rest
    if rank == 1:
        {
            "raise": lambda: [][rank],
            "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "exit": lambda: sys.exit(3),
            "sleep": lambda: time.sleep(1000),
        }[how]()
    dist.all_reduce(shared)
    return None


def test_spawn_returns_what_each_rank_returns():
    results = spawn(work, 3, "fine", "more", start_method="forkserver")
    assert [(rank, shared.tolist(), more) for rank, shared, more in results] == [
        (rank, [3.0, 3.0], "more") for rank in range(3)
    ]


FAILURES = {
    "raise": (ProcessRaisedException, r"(?s)rank 1 of 3 failed:\n.*IndexError: list index out"),
    "kill": (ProcessExitedException, "rank 1 of 3 was ended by SIGKILL"),
    "exit": (ProcessExitedException, "rank 1 of 3 exited with code 3"),
}


@pytest.mark.parametrize("how", FAILURES)
def test_a_failure_of_one_rank_ends_all_and_names_it(how):
    error, text = FAILURES[how]
    start = time.monotonic()
    with pytest.raises(error, match=text) as raised:
        spawn(work, 3, how, start_method="forkserver")
    assert raised.value.error_index == 1
    assert time.monotonic() - start < 3 * SOON  # not the group's timeout


def first_in_a_ring(rank: int, caught: bool) -> None:
    """Rank 1 has no memory left for a kernel; the others wait for its keys."""
    q, k, v = (torch.randn(1, 8, 2, 8, requires_grad=True) for _ in range(3))
    plan = RingPlan.make(q, k, v, group=dist.group.WORLD, transport="ring")
    if rank == 1:
        forward = mock.Mock(side_effect=MemoryError("none left"))
        object.__setattr__(plan, "kernel", plan.kernel._replace(forward=forward))
    try:
        ring_attn(q, k, v, plan=plan)
    except MemoryError:
        if not caught:
            time.sleep(0.1)  # the others speak first
            raise
        time.sleep(1000)


@pytest.mark.parametrize("caught", [False, True])
def test_who_failed_first_is_named_and_nobody_waits_for_the_timeout(caught):
    start = time.monotonic()
    text = "waited for rank" if caught else r"rank 1 of 3 failed:(?s:.*)MemoryError: none left"
    with pytest.raises(ProcessRaisedException, match=text):
        spawn(first_in_a_ring, 3, caught, start_method="forkserver")
    assert time.monotonic() - start < 3 * SOON


def under_way(rank: int) -> None:
    if rank == 1:
        time.sleep(1000)
    pending = dist.all_reduce(torch.ones(2), async_op=True)
    assert not pending.is_completed()
    sys.exit(3)


def test_who_exits_does_not_wait_for_what_it_has_begun():
    start = time.monotonic()
    with pytest.raises(ProcessExitedException, match="rank 0 of 2 exited with code 3"):
        spawn(under_way, 2, start_method="forkserver")
    assert time.monotonic() - start < 3 * SOON


def test_ranks_wait_as_long_as_the_timeout_says():
    start = time.monotonic()
    with pytest.raises(ProcessRaisedException, match="rank 0 of 2 failed") as raised:
        spawn(work, 2, "sleep", timeout=(seconds := unhurried(1.5)), start_method="forkserver")
    assert seconds < time.monotonic() - start < WAIT
    assert f"{1000 * seconds:.0f}ms" in str(raised.value)


def late(rank: int, seconds: float) -> int:
    if rank == 1:
        time.sleep(seconds)
    return rank


@pytest.mark.thorough
def test_who_is_done_waits_for_the_others_without_a_timeout():
    seconds = unhurried(1.0)
    found = spawn(late, 2, 3 * seconds, timeout=seconds, start_method="forkserver")
    assert found == [0, 1]


def unpicklable(rank: int) -> Any:
    return lambda: rank


def test_a_result_that_cant_be_sent_is_an_error_of_its_rank():
    with pytest.raises(ProcessRaisedException, match=r"(?s)rank \d of 2 failed.*local object"):
        spawn(unpicklable, 2, start_method="forkserver")


def endless() -> Iterator[int]:
    yield os.getpid()
    time.sleep(1000)


@linux
@pytest.mark.thorough
def test_the_demo_s_processes_end_with_its_generator():
    from examples import demo

    with closing(demo.on_ranks(endless)) as values:
        pid = next(values)
        assert Path(f"/proc/{pid}").exists()
    assert not Path(f"/proc/{pid}").exists()


# --- what has started the workers is gone ---


WAITING = """
import sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from ring_attention_pytorch.launch import spawn

def work(rank):
    Path(sys.argv[1], f"waits{rank}").touch()
    if rank == 1:
        time.sleep(1000)
    dist.all_reduce(torch.ones(2))

if __name__ == "__main__":
    spawn(work, 2)
"""
STRIKES = {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 143, signal.SIGINT: -signal.SIGINT}


@linux
@in_ci
@pytest.mark.parametrize(
    ("strike", "stopped"),
    [
        (signal.SIGKILL, True),
        *(pytest.param(s, False, marks=pytest.mark.thorough) for s in (9, 15, 2)),
    ],
)
def test_no_worker_outlives_a_script_that_spawned_it(tmp_path, strike, stopped):
    (file := tmp_path / "script.py").write_text(WAITING)
    (folder := tmp_path / "temporary").mkdir()
    with Script(str(file), str(tmp_path), folder=folder) as script:
        script.until(lambda: len(list(tmp_path.glob("waits*"))) == 2)
        time.sleep(0.5)  # till they wait
        assert len(script.others()) >= 2
        ranks = [pid for pid in script.others() if b"spawn_main" in command_of(pid)]
        assert len(ranks) == 2
        for pid in ranks if stopped else []:
            os.kill(pid, signal.SIGSTOP)
        script.process.send_signal(strike)
        assert script.ends() == STRIKES[strike], script.text()
        assert [file.name for file in folder.iterdir()] == ["output"]


@linux
@pytest.mark.thorough
@pytest.mark.parametrize("command", [["assert.py", "--seq-len=5000", "--world-size=3"]])
@pytest.mark.parametrize("strike", [signal.SIGTERM, signal.SIGINT])
def test_no_worker_outlives_assert(tmp_path, strike, command):
    with Script(*command, folder=tmp_path) as script:
        script.until(lambda: list(tmp_path.glob("*/store")))
        time.sleep(3.0)  # till they compute and wait for one another
        assert len(script.others()) >= 3
        script.process.send_signal(strike)
        code = 130 if strike == signal.SIGINT else STRIKES[strike]
        assert script.ends() == code, script.text()


SUSPENDED = """
from examples import demo
from tests.test_launch import endless

if __name__ == "__main__":
    values = demo.on_ranks(endless)
    print(next(values), flush=True)
    raise SystemExit(5)
"""


@linux
@pytest.mark.thorough
def test_a_generator_that_nobody_closes_does_not_keep_a_script_alive(tmp_path):
    (file := tmp_path / "script.py").write_text(SUSPENDED)
    with Script(str(file), folder=tmp_path) as script:
        assert script.ends(WAIT) == 5, script.text()


# --- under torchrun ---


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl", "gloo"])
def test_with_nccl_each_process_takes_a_gpu_before_there_is_a_group(monkeypatch, backend):
    """By its number on its machine: with one for all, NCCL's first message would wait for ever."""
    told = []
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(launch, "Thread", mock.Mock())
    monkeypatch.setattr(launch, "fail_together", nullcontext)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", told.append)
    monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: True)
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(None, 7, 8)]))
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **how: told.append(how["rank"]))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: told.append("gone"))
    with launch.torchrun_group(backend):
        told.append("block")
    assert told == [*[3] * ("nccl" in backend), 7, "block", "gone"]


@pytest.mark.parametrize("gpus", [0, 2])
def test_fewer_gpus_than_processes_are_refused(gpus):
    with pytest.raises(ValueError, match=f"process 2 of those that see {gpus} GPUs"):
        launch._gpu_of(2, gpus)
    assert launch._gpu_of(2, gpus=1) == 0  # where each process is shown one


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
GROUP = """
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from ring_attention_pytorch.launch import torchrun_group

with torchrun_group(timeout=900.0):
    assert dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.seconds == 900
    dist.barrier()
    Path(sys.argv[1], "waits" + os.environ["RANK"]).touch()
    if dist.get_rank() == 1:
        time.sleep(1000)
    pending = dist.all_reduce(torch.ones(2), async_op=True)
    if sys.argv[2] == "raise":
        raise ArithmeticError("struck")
    pending.wait()
"""


@linux
@pytest.mark.thorough
def test_an_error_under_torchrun_ends_all_at_once_and_names_its_rank(tmp_path):
    (file := tmp_path / "script.py").write_text(GROUP)
    with Script(*TORCHRUN, str(file), str(tmp_path), "raise", folder=tmp_path) as script:
        script.until(lambda: (tmp_path / "waits0").exists())
        assert script.ends(WAIT) == 1, script.text()
        assert "[rank0]: ArithmeticError: struck" in script.text()


@linux
@pytest.mark.thorough
def test_workers_end_with_torchrun(tmp_path):
    (file := tmp_path / "script.py").write_text(GROUP)
    with Script(*TORCHRUN, str(file), str(tmp_path), "wait", folder=tmp_path) as script:
        script.until(lambda: len(list(tmp_path.glob("waits*"))) == 2)
        script.process.kill()
        assert script.ends() == -signal.SIGKILL
