"""Scripts that are run, and ended, in processes of their own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

ROOT = Path(__file__).parents[2]
WAIT = 900.0  # seconds for what takes few on a machine that is not busy
SOON = 120.0  # seconds for what takes less than one; far less than what must not be waited for

linux = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")


def fails_late() -> Iterator[int]:
    """Yield once, then raise RuntimeError."""
    yield 1
    raise RuntimeError("in a rank")


class Script:
    """A script and all processes that come from it, which are gone after `with`."""

    def __init__(self, *command: str, folder: Path):
        self.mark = f"SCRIPT={uuid4()}"
        name, value = self.mark.split("=")
        env = os.environ | {name: value, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
        self.folder, self.output = folder, folder / "output"
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, *command], cwd=ROOT, env=env | {"PYTHONPATH": str(ROOT)},
                stdout=output, stderr=output,
                # a shell may have started us with SIGINT ignored
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )  # fmt: skip

    def __enter__(self) -> "Script":
        return self

    def __exit__(self, *_: object) -> None:
        for pid in [self.process.pid, *self.others()]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(SOON)

    def others(self, having: str = "") -> list[int]:
        """The living processes that come from it, with this in their environment too."""
        wanted, found = {self.mark, having or self.mark}, []
        for file in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                there = file.read_bytes().decode(errors="replace").split("\0")
                found += [int(file.parent.name)] * (wanted <= set(there))
        return [pid for pid in found if pid != self.process.pid]

    def text(self) -> str:
        return self.output.read_text()

    def until(self, done: Callable[[], Any], seconds: float = WAIT) -> None:
        end = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < end, self.text()
            time.sleep(0.05)

    def ends(self, seconds: float = SOON) -> int:
        """Its exit code, once it and all that come from it have ended, which must be soon."""
        code = self.process.wait(seconds)
        self.until(lambda: not self.others(), seconds)
        return code
