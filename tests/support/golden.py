"""Compare two revisions to the bit: what they compute, send, call and say.

    python -m tests.support.golden                       # this tree with the last commit
    python -m tests.support.golden v1.0.0 --cases 5000   # with another revision
    python -m tests.support.golden --write record.json   # the record alone

For changes that must change nothing. A record belongs to one machine and one PyTorch, for another
one rounds otherwise; so both revisions run here, each with its own tests. Its cases are the random
ones, over rings of threads, whose sums have a fixed order. This tree draws them, and tells them to
the other revision as text: what a number stands for changes with the values that are drawn from.
"""

import argparse
import hashlib
import json
import multiprocessing
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ring_attention_pytorch.kernels import KERNELS
from tests.support import random_cases, threads
from tests.support.mistakes import ALTERATIONS, SIZE, told
from tests.support.random_draw import Case, draw

ROOT = Path(__file__).parents[2]
Record = dict[str, dict[str, Any]]  # by case


def digest(results: list[dict[str, Tensor]]) -> str:
    """A hash of every bit of every rank's results."""
    found = hashlib.sha256()
    for rank, mine in enumerate(results):
        for name, t in sorted(mine.items()):
            found.update(f"{rank} {name} {t.dtype} {list(t.shape)}".encode())
            found.update(t.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


class Counts:
    """Counts what the ranks of a ring of threads send, and what they call."""

    def __init__(self) -> None:
        self.hubs: list[threads.Hub] = []
        self.calls: Counter[str] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Count in this block."""
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(threads, "run", self._run(threads.run)))
            for name, kernel in KERNELS.items():
                for direction in ("forward", "backward"):
                    stack.enter_context(self._of_kernel(name, kernel, direction))
            yield

    def _run(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*given: Any) -> Any:
            found, hub = run(*given)
            self.hubs.append(hub)
            return found, hub

        return counting

    def _of_kernel(self, name: str, kernel: ModuleType, direction: str) -> Any:
        run = getattr(kernel, direction)

        def counting(*given: Any) -> None:
            with self._lock:
                self.calls[f"{name} {direction}"] += 1
                self.calls[f"{name} {direction}, tiles"] += len(given[2])
            run(*given)

        return mock.patch.object(kernel, direction, counting)

    def all(self) -> dict[str, Any]:
        return {
            "messages": [hub.exchanges for hub in self.hubs],
            "bytes": [hub.sent_bytes for hub in self.hubs],
            "notes": [hub.gathers for hub in self.hubs],
            "calls": dict(sorted(self.calls.items())),
        }


def computed(case: str) -> tuple[str, dict[str, Any]]:
    """The record of a case, as `str` writes it."""
    counts = Counts()
    try:
        with counts.taken():
            results = random_cases.computed(eval(case, {"Case": Case}))
    except Exception as error:  # also where a revision has no such cases
        return case, {"error": f"{type(error).__name__}: {error}"}
    return case, {"bits": digest(results), **counts.all()}


def drawn(cases: int) -> list[str]:
    """So many random cases."""
    return [str(draw(seed)) for seed in range(cases)]


def refusals() -> Record:
    """Return the error that all ranks get for each mistake of one of them."""

    def main(ring: threads.ThreadRing) -> dict[str, str | None]:
        return {name: told(ring, name)[0] for name in ALTERATIONS}

    texts, _ = threads.run(SIZE, main)
    return {name: {"texts": [each[name] for each in texts]} for name in ALTERATIONS}


def record(cases: list[str], processes: int) -> Record:
    """The record of this tree."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, spawn, initializer=random_cases.by_itself) as pool:
        found = dict(pool.map(computed, cases, chunksize=20))
    return found | refusals()


def differences(before: Record, now: Record) -> list[str]:
    """A line for each case whose records differ, and in what."""
    lines = []
    for name in sorted({*before, *now}):
        was, is_now = before.get(name, {}), now.get(name, {})
        fields = [f for f in {**was, **is_now} if was.get(f) != is_now.get(f)]
        if fields:
            lines.append(f"{name}: {', '.join(fields)}")
    return lines


def record_of(folder: Path, cases: list[str], processes: int) -> Record:
    """The record of the tree in a folder, by that tree's own tests."""
    with tempfile.TemporaryDirectory() as parent:
        told, found = Path(parent) / "cases.json", Path(parent) / "record.json"
        told.write_text(json.dumps(cases))
        options = [f"--told={told}", f"--write={found}", f"--processes={processes}"]
        module = "tests.support.golden"
        subprocess.run([sys.executable, "-m", module, *options], cwd=folder, check=True)
        return json.loads(found.read_text())


@contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """A folder with the files of a revision."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(folder), revision], check=True)
        try:
            yield folder
        finally:
            subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("revision", nargs="?", default="HEAD", help="of git")
    parser.add_argument("--cases", type=int, default=600, help="a minute for each thousand")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--without",
        nargs="+",
        default=[],
        metavar="FIELD",
        help="of a case: leave out those that have it, for a revision that lacks the feature",
    )
    parser.add_argument("--told", type=Path, help="a file of cases, not to be drawn")
    parser.add_argument("--write", type=Path, help="write this tree's record, and compare nothing")
    args = parser.parse_args()
    cases = drawn(args.cases) if args.told is None else json.loads(args.told.read_text())
    cases = [each for each in cases if not any(f"{name}=" in each for name in args.without)]
    if args.write:
        args.write.write_text(json.dumps(record(cases, args.processes)))
        return 0
    with checked_out(args.revision) as folder:
        before = record_of(folder, cases, args.processes)
    found = differences(before, record_of(ROOT, cases, args.processes))
    print("\n".join(found[:50]))
    print(f"{len(found)} of {len(before)} cases differ from {args.revision}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
