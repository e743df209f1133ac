"""Modules and scripts run as `python -m` and torchrun run them, in processes that are forked.

What imports PyTorch and the package anew for each process takes seconds of a CPU; a fork of the
process in which tests' ranks begin takes none. A few tests start torchrun itself.
"""

import os
import runpy
import sys
import tempfile
import time
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.support.forks import context
from tests.support.scripts import ROOT, WAIT

_GRACE = 5.0  # seconds from SIGTERM to SIGKILL, once a rank has failed


class Done(NamedTuple):
    """How it ended, as `subprocess.CompletedProcess` has it, all ranks' lines together."""

    returncode: int
    stdout: str
    stderr: str


def launched(name: str, *options: str, ranks: int, **environment: str) -> Done:
    """Run a module, or a file that ends with .py, by so many ranks.

    The first rank that fails ends the others.

    Raises:
        TimeoutError: they have not ended after `WAIT` seconds.
    """
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    everyone = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    everyone |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}
    everyone |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "tests"}
    everyone |= {"TORCHELASTIC_RESTART_COUNT": "0"}
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder, stream) for stream in ("stdout", "stderr")]
        members = []
        for rank in range(ranks):
            own = everyone | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | environment
            given = name, options, own, *map(str, said)
            members.append(context.Process(target=_run, args=given, daemon=False))
            members[-1].start()
        try:
            code = _ended(members)
        finally:
            for process in members:
                process.kill()
                process.join()
        return Done(code, *(file.read_text() if file.exists() else "" for file in said))


def _ended(members: list[ForkServerProcess]) -> int:
    """Return the exit code of the first that fails, or 0."""
    end, waiting = time.monotonic() + WAIT, {process.sentinel: process for process in members}
    while waiting:
        ready = wait(list(waiting), max(0.0, end - time.monotonic()))
        if not ready:
            raise TimeoutError(f"not done in {WAIT} s")
        for sentinel in ready:
            process = waiting.pop(sentinel)
            process.join()
            if process.exitcode:
                for other in waiting.values():
                    other.terminate()
                wait(list(waiting), _GRACE)
                return process.exitcode
    return 0


def _run(name: str, options: tuple[str, ...], environment: dict[str, str], *said: str) -> None:
    for number, file in enumerate(said, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    os.environ |= environment
    os.chdir(ROOT)
    torch.set_num_threads(1)
    sys.argv = [name, *options]
    how: dict[str, Any] = dict(run_name="__main__")
    if name.endswith(".py"):
        sys.path.insert(0, str(Path(name).resolve().parent))
        runpy.run_path(name, **how)
    else:
        runpy.run_module(name, **how, alter_sys=True)
