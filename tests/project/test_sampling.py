"""Which tests run: of a long grid some always, and some that a seed draws; none of GPUs without."""

import doctest
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import sampling
from tests.support.sampling import grid, leave_out


def test_examples_are_as_shown() -> None:
    assert doctest.testmod(sampling).failed == 0


def items(marker: pytest.MarkDecorator) -> list[Any]:
    """A test, the cases of a function with this marker, and six thorough tests."""
    _, values = marker.args
    found = [SimpleNamespace(nodeid="a.py::other", get_closest_marker=lambda name: None)]
    for number, value in enumerate(values):
        marks = {mark.name: mark for mark in value.marks}
        found += [SimpleNamespace(nodeid=f"a.py::f[{number}]", get_closest_marker=marks.get)]
    marks = {"thorough": pytest.mark.thorough.mark}
    for name in "abcdef":
        found += [SimpleNamespace(nodeid=f"a.py::{name}", get_closest_marker=marks.get)]
    return found


def test_a_seed_draws_of_what_does_not_run_always() -> None:
    cases = items(grid("n", range(30), always=6, drawn=4))
    always = [case.nodeid for case in cases if case.get_closest_marker("thorough") is None]
    assert len(always) == 1 + 6
    found = []
    for seed in ("a", "b", "a", None):
        left = list(cases)
        gone = leave_out(left, seed)
        assert {*always} < {case.nodeid for case in left}
        assert len(left) + len(gone) == len(cases)
        found.append([case.nodeid for case in left])
    assert [len(names) for names in found] == [13, 13, 13, 37]
    assert found[0] == found[2] != found[1]


def test_without_a_gpu_one_test_says_so_for_all() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-rs", "tests/gpu/test_steps_gpu.py"],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTEST_ADDOPTS": ""},
    )  # fmt: skip
    assert found.returncode == 0, found.stdout
    assert "SKIPPED [1]" in found.stdout
    assert found.stdout.count("there is no CUDA device") == 1
