"""mypy and pyright take what users write right, and find what they write wrong."""

import json
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
RIGHT, WRONG = HERE / "right.py", HERE / "wrong.py"


def meant() -> set[int]:
    """Return the lines of the wrong file that say so."""
    lines = WRONG.read_text().splitlines()
    return {number for number, line in enumerate(lines, 1) if line.endswith("# wrong")}


def ran(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command, str(RIGHT), str(WRONG)], cwd=HERE.parents[1],
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert not done.stderr.strip(), done.stderr
    return done.stdout


def by_file(found: list[tuple[str, int]]) -> dict[str, set[int]]:
    return {
        file.name: {line for name, line in found if Path(name).name == file.name}
        for file in (RIGHT, WRONG)
    }


@pytest.mark.thorough
def test_mypy_finds_what_is_wrong_and_nothing_else(tmp_path):
    told = ran("mypy", "--follow-imports=silent", f"--cache-dir={tmp_path}")
    found = re.findall(r"^(.+?):(\d+): error", told, re.MULTILINE)
    assert by_file([(name, int(line)) for name, line in found]) == {
        RIGHT.name: set(), WRONG.name: meant(),
    }  # fmt: skip


def test_pyright_finds_what_is_wrong_and_nothing_else():
    told = json.loads(ran("basedpyright", "--outputjson", "--pythonpath", sys.executable))
    found = [
        (each["file"], each["range"]["start"]["line"] + 1)
        for each in told["generalDiagnostics"]
        if each["severity"] == "error"
    ]
    assert by_file(found) == {RIGHT.name: set(), WRONG.name: meant()}


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
