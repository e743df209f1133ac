"""Run commands, each within its own time, so that none takes the others along.

One after the other, or some side by side. A line on the screen tells when each begins, and one how
it ended; what they say goes to a file each.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from subprocess import Popen
from threading import Lock
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
GRACE = 45.0  # seconds to end its processes, for which torchrun takes 30
SHOWN = 12  # lines of one that failed
TELLING = re.compile(r"^(\[\S+\]: *)?(E  |FAILED|[\w.]*(Error|Errors|Exception)\b)")


class Job(NamedTuple):
    """A command of Python: its name, its arguments, its limit in seconds, what it adds to env."""

    name: str
    argv: tuple[str, ...]
    seconds: float
    environment: Mapping[str, str] = {}

    @property
    def command(self) -> str:
        """Return what to type for it.

        >>> Job("ring", ("-m", "pytest", "-k", "a b"), 60, {"N": "1"}).command
        "N=1 python -m pytest -k 'a b'"
        """
        settings = [f"{name}={value}" for name, value in self.environment.items()]
        return " ".join([*settings, "python", shlex.join(self.argv)])

    @property
    def file(self) -> str:
        """Return the name of the file for what it says.

        >>> Job("training, causal 2k", (), 60).file
        'training-causal-2k.txt'
        """
        return re.sub(r"\W+", "-", self.name).strip("-") + ".txt"


def by_torchrun(ranks: int, module: str, *options: str) -> tuple[str, ...]:
    """Return the arguments of Python that start a module in so many processes.

    >>> " ".join(by_torchrun(4, "benchmarks", "ring"))
    '-m torch.distributed.run --standalone --nproc-per-node 4 -m benchmarks ring'
    """
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
    return (*launcher, str(ranks), "-m", module, *options)


def run(
    job: Job, file: Path, seconds: float | None = None, running: set[Popen] | None = None
) -> str | None:
    """Run a job, in a session of its own; return what is wrong with it, None if nothing.

    Args:
        job: what to run, from the root of the project.
        file: what it says, below its command.
        seconds: its limit, if not its own.
        running: has its process, while it runs.
    """
    limit = job.seconds if seconds is None else seconds
    running = set() if running is None else running
    with file.open("w") as said:
        print(job.command, file=said, flush=True)
        process = Popen(
            [sys.executable, *job.argv], cwd=ROOT, stdout=said, stderr=subprocess.STDOUT,
            env={**os.environ, **job.environment}, start_new_session=True,
        )  # fmt: skip
        running.add(process)
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            return f"not done after {limit:.0f} s"
        finally:
            end(process)
            running.discard(process)
    return None if status == 0 else f"exit status {status}"


def end(process: Popen) -> None:
    """End a process, if it still runs, and what it has left of its session.

    It is asked first: torchrun's processes are in sessions of their own, and only it ends them.
    """
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    with suppress(ProcessLookupError):  # nothing is left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_all(
    jobs: Sequence[Job],
    folder: Path,
    within: float = float("inf"),
    at_once: int = 1,
    archive: Path | None = None,
    more: Sequence[Path] = (),
) -> int:
    """Run jobs; return the exit status, 1 if any failed or there was no time for it.

    Args:
        jobs: what to run.
        folder: where a file of each tells what it said.
        within: seconds for all of them.
        at_once: how many run side by side.
        archive: is packed anew after each, with that folder.
        more: other folders that it has.
    """
    folder.mkdir(parents=True, exist_ok=True)
    began, running, packing = time.monotonic(), set[Popen](), Lock()

    def one(number: int, job: Job) -> bool:
        start = time.monotonic()
        limit = min(job.seconds, began + within - start)
        print(f"{number:2}/{len(jobs)}  {job.name}: at most {limit:.0f} s", flush=True)
        file = folder / job.file
        problem = run(job, file, limit, running) if limit > 0 else "no time left"
        said = file.read_text(errors="replace").splitlines() if limit > 0 else []
        took = time.monotonic() - start
        ended = [f"       {job.name}: {took:.1f} s, {problem or f'ok: {said[-1][:80]}'}"]
        if problem is not None:
            ended += [f"         {line[:160]}" for line in telling(said)]
        print("\n".join(ended), flush=True)
        if archive is not None:
            with packing:
                pack([folder, *more], archive)
        return problem is None

    with ThreadPoolExecutor(at_once) as pool:
        try:
            fine = [*pool.map(one, range(1, len(jobs) + 1), jobs)]
        except BaseException:  # Ctrl-C, say, which only this thread hears of
            pool.shutdown(wait=False, cancel_futures=True)
            for process in [*running]:
                end(process)
            raise
    bad = [job.name for job, done in zip(jobs, fine) if not done]
    total = time.monotonic() - began
    print(f"{sum(fine)} of {len(jobs)} are done, in {total:.0f} s; output in {folder}")
    if bad:
        print(f"not done: {', '.join(bad)}")
    return int(bool(bad))


def pack(folders: Sequence[Path], archive: Path) -> None:
    """Write folders to a tar.gz file, each by its name; one in another is there already."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    half = archive.with_name(f"{archive.name}.tmp")
    whole = [folder.absolute() for folder in folders]
    with tarfile.open(half, "w:gz") as packed:
        for folder in whole:
            if not {*folder.parents} & {*whole}:
                packed.add(folder, folder.name, filter=lambda each: _unless(each, archive.name))
    half.replace(archive)  # whole, whenever this process ends


def _unless(each: tarfile.TarInfo, name: str) -> tarfile.TarInfo | None:
    """Return a member, unless it is the archive of a run before."""
    return None if Path(each.name).name == name else each


def telling(said: Sequence[str]) -> Sequence[str]:
    """Return the lines that name an error, else the last ones.

    >>> telling(["Traceback:", "ValueError: no", "[rank0]: MemoryError", "good bye"])
    ['ValueError: no', '[rank0]: MemoryError']
    """
    return ([line for line in said if TELLING.match(line)] or said)[-SHOWN:]
