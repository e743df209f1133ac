"""mypy and pyright take what users write right, and find what they write wrong."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.sampling import in_ci

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RIGHT, WRONG = HERE / "right.py", HERE / "wrong.py"
COMPLETE = 0.95  # of the types that users can see; of some attributes they are only inferred


def meant() -> set[tuple[str, int]]:
    """Return the lines of the wrong file that say so."""
    lines = WRONG.read_text().splitlines()
    return {(WRONG.name, at) for at, line in enumerate(lines, 1) if line.endswith("# wrong")}


def ran(*command: str) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=900,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert not done.stderr.strip(), done.stderr
    return done.stdout


def checked(*command: str) -> str:
    """Check the package, and what users write."""
    return ran(*command, "ring_attention_pytorch", str(RIGHT), str(WRONG))


@pytest.mark.thorough
def test_mypy_finds_what_is_wrong_and_nothing_else():
    told = checked("mypy")
    found = re.findall(r"^(.+?):(\d+): error", told, re.MULTILINE)
    assert {(Path(name).name, int(line)) for name, line in found} == meant(), told


@in_ci
def test_pyright_finds_what_is_wrong_and_nothing_else():
    told = json.loads(checked("basedpyright", "--outputjson", "--pythonpath", sys.executable))
    assert told["summary"]["filesAnalyzed"] > 100
    found = [each for each in told["generalDiagnostics"] if each["severity"] == "error"]
    lines = {(Path(each["file"]).name, each["range"]["start"]["line"] + 1) for each in found}
    assert lines == meant(), found


@pytest.mark.thorough
def test_pyright_knows_nearly_all_types_that_users_see():
    told = ran(
        "basedpyright", "--outputjson", "--ignoreexternal", "--verifytypes",
        "ring_attention_pytorch",
    )  # fmt: skip
    complete = json.loads(told)["typeCompleteness"]
    assert Path(complete["moduleRootDirectory"]) == ROOT / "ring_attention_pytorch"
    assert complete["completenessScore"] > COMPLETE
