"""mypy and pyright take what users write right, and find what they write wrong."""

import json
import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest

from ring_attention_pytorch.functional import CallOptions
from ring_attention_pytorch.kernels import KERNELS
from ring_attention_pytorch.plan import option_types
from ring_attention_pytorch.plan.options import ROWS

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
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=280,
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


def names() -> dict[str, Any]:
    """Return the names that type checkers know, by executing what only they do."""
    source = Path(option_types.__file__).read_text()
    known: dict[str, Any] = {}
    exec(source.replace("if TYPE_CHECKING:", "if True:"), known)
    return known


def test_types_name_all_kernels_and_options():
    known = names()
    kernels = {*get_args(known["KernelName"])}
    assert kernels == {*KERNELS, "flash-attn"}
    pairs = {f"{a}+{b}" for a, b in product(kernels, repeat=2) if a != b}
    assert {*get_args(known["KernelPair"])} == pairs
    assert {*known["PlanOptions"].__annotations__} == {*ROWS}
    of_calls = {*CallOptions.__annotations__} - {*ROWS}
    assert of_calls == {"heads_first", "group", "plan"}
