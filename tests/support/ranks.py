"""A pool of processes that stays up between cases: launching is dear, a case is not."""

import faulthandler
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.lib.machines import take_gpu
from ring_attention_pytorch.plan import placement
from tests.support.forks import context

_START = 600.0  # seconds until all processes of a pool run, however busy the machine is
_GRACE = 60.0  # seconds that others are waited for once a rank has failed


def unhurried(seconds: float) -> float:
    """Return a time in which ranks do what takes far less: longer on a machine that is busy.

    It is as given where at most three processes want each core.
    """
    wanting = os.getloadavg()[0]  # of the last minute, and now
    if (now := Path("/proc/loadavg")).exists():
        wanting = max(wanting, int(now.read_text().split()[3].partition("/")[0]))
    return round(seconds * min(10.0, max(1.0, wanting / (3 * (os.cpu_count() or 1)))), 1)


def gpu_ranks(gpus: int | None = None) -> int:
    """How many ranks tests of GPUs use: a power of two, from two to eight, by the GPUs there are.

    A power of two, so that degrees of Ulysses divide it.

    >>> [gpu_ranks(gpus) for gpus in (0, 1, 2, 3, 4, 7, 8, 16)]
    [2, 2, 2, 2, 4, 4, 8, 8]
    """
    found = torch.cuda.device_count() if gpus is None else gpus
    return next(ranks for ranks in (8, 4, 2) if ranks <= max(2, found))


class RankFailed(AssertionError):
    """A rank raised, died or hung."""


def _serve(
    pipe: Connection, rank: int, size: int, folder: str, timeout: float, backend: str
) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", size)
    store.set(f"rank {rank} has started", "yes")
    everyone = [f"rank {r} has started" for r in range(size)]
    store.wait(everyone, timedelta(seconds=_START))  # a short timeout is not for that
    hung = 0.9 * timeout  # seconds, after which it tells where it is
    faulthandler.dump_traceback_later(hung)
    dist.init_process_group(
        backend, rank=rank, world_size=size, store=store, timeout=timedelta(seconds=timeout),
        device_id=take_gpu(rank, size) if backend == "nccl" else None,
    )  # fmt: skip
    faulthandler.cancel_dump_traceback_later()
    while (task := pipe.recv()) is not None:
        case, args = task
        placement._unseen.clear()  # as in `conftest.seed`: what another test did is no matter
        faulthandler.dump_traceback_later(hung)
        try:
            answer = ("ok", case(*args))
        except BaseException as error:
            answer = ("error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        faulthandler.cancel_dump_traceback_later()
        pipe.send(answer)
    dist.destroy_process_group()


class Pool:
    """`size` ranks of one default group. `run` gives every rank's result, in order.

    `timeout` is how long to wait for an answer, `group_timeout` how long ranks wait for another.
    """

    def __init__(
        self,
        size: int,
        timeout: float = 300.0,
        group_timeout: float | None = None,
        backend: str = "gloo",
    ):
        self.size, self.timeout, self.backend, self.members = size, timeout, backend, []
        self.group_timeout = timeout if group_timeout is None else group_timeout

    def run(self, case: Callable[..., Any], *args: Any) -> list[Any]:
        """`case(*args)` on every rank. It must be a function of a module, for it is pickled."""
        answers = self.answers(case, *args)
        failed = [f"rank {r}: {text}" for r, (kind, text) in enumerate(answers) if kind == "error"]
        if failed:
            self.stop()
            raise RankFailed("\n".join(failed))
        return [value for _, value in answers]

    def answers(self, case: Callable[..., Any], *args: Any) -> list[tuple[str, Any]]:
        """Return each rank's answer in any case: ("ok", result) or ("error", what happened)."""
        if not self.members:
            self._start()
        try:
            return self._answers(case, args)
        except BaseException:  # pytest-timeout's among them: a later answer is not to the next case
            self.stop()
            raise

    def _answers(self, case: Callable[..., Any], args: tuple[Any, ...]) -> list[tuple[str, Any]]:
        for pipe, _ in self.members:
            pipe.send((case, args))
        answers: dict[int, tuple[str, Any]] = {}
        while len(answers) < self.size:
            waiting = {p: r for r, (p, _) in enumerate(self.members) if r not in answers}
            # where one has failed others may wait for it in vain
            failed = any(kind == "error" for kind, _ in answers.values())
            patience = min(self.timeout, _GRACE) if failed else self.timeout
            if not (ready := wait(list(waiting), patience)):
                late = ("error", f"gave no answer in {patience} s")
                answers |= dict.fromkeys(waiting.values(), late)
            for pipe in ready:
                try:
                    answers[waiting[pipe]] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    answers[waiting[pipe]] = ("error", "the process died")
        return [answers[r] for r in range(self.size)]

    def _start(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(
                    theirs,
                    rank,
                    self.size,
                    self.folder.name,
                    self.group_timeout,
                    self.backend,
                ),
                daemon=True,
            )
            process.start()
            theirs.close()
            self.members.append((ours, process))

    def stop(self) -> None:
        """End the processes, however they are; the next `run` starts new ones."""
        for pipe, process in self.members:
            process.kill()
            process.join()
            pipe.close()
        self.members = []


def alone(main: Callable[..., Any], size: int, *args: Any, timeout: float = _START) -> list[Any]:
    """`main(rank, *args)` in `size` new processes without a group; every rank's result."""
    members = []
    for rank in range(size):
        ours, theirs = context.Pipe()
        process = context.Process(target=_tell, args=(theirs, main, rank, *args), daemon=True)
        process.start()
        theirs.close()
        members.append((ours, process))
    try:
        told = [pipe.recv() if pipe.poll(timeout) else "no answer" for pipe, _ in members]
    finally:
        for _, process in members:
            process.kill()
    if failed := [t for t in told if isinstance(t, str)]:
        raise RankFailed("\n".join(failed))
    return told


def _tell(pipe: Connection, main: Callable[..., Any], rank: int, *args: Any) -> None:
    torch.set_num_threads(1)
    try:
        pipe.send(main(rank, *args))
    except BaseException:
        pipe.send(traceback.format_exc())
