"""Every planted fault is found. What a suite can't see, it does not test."""

import json
import subprocess
import sys
from collections import Counter
from functools import cache
from importlib import import_module

import pytest

from tests.faults import BATTERIES
from tests.faults.mutant import PACKAGE, Sources
from tests.support.cases import FIGURES
from tests.support.sampling import in_ci

MODULES = [f"tests.faults.{name}" for name in BATTERIES]
PLANTED_BY = {name: import_module(name).MUTANTS for name in MODULES}
PLANTED = [(battery, mutant) for battery, planted in PLANTED_BY.items() for mutant in planted]


@cache
def hunt() -> subprocess.CompletedProcess[str]:
    """Run all batteries, once even if that fails."""
    return subprocess.run(
        [sys.executable, "-m", "tests.faults.hunt", *MODULES],
        cwd=PACKAGE.parent, capture_output=True, text=True, timeout=2300,
    )  # fmt: skip


@cache
def verdicts() -> dict[str, dict[str, tuple[bool, str]]]:
    ran = hunt()
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    FIGURES.planted += len(PLANTED)
    FIGURES.killed += sum(found[battery][mutant.name][0] for battery, mutant in PLANTED)
    return found


@cache
def sources() -> Sources:
    return Sources()


@pytest.mark.parametrize("battery", MODULES)
def test_a_battery_has_cases(battery):
    """Or it names tests that are gone, without a run."""
    assert list(import_module(battery).battery())


@in_ci
@pytest.mark.parametrize("battery", MODULES)
def test_the_battery_finds_nothing_wrong_with_the_package_itself(battery):
    found, said = verdicts()[battery][""]
    assert not found, said


@pytest.mark.parametrize("battery", MODULES)
def test_faults_have_a_place(battery):
    """Or it says why they can't be planted, without a run."""
    for mutant in PLANTED_BY[battery]:
        sources().changed(mutant)


@in_ci
@pytest.mark.parametrize(("battery", "mutant"), PLANTED, ids=lambda x: getattr(x, "name", x))
def test_a_planted_fault_is_found(battery, mutant):
    found, said = verdicts()[battery][mutant.name]
    assert found, said


@pytest.mark.parametrize("planted", PLANTED_BY.values(), ids=MODULES)
def test_names_are_unique_and_every_fault_changes_something(planted):
    assert max(Counter(m.name for m in planted).values()) == 1
    assert all(m.old != m.new for m in planted)


SAMPLED = "geometry/layouts.py", "schedule/steps.py", "ranks/agreement.py", "runtime/accumulate.py"


@in_ci
def test_generated_faults_are_found_or_listed():
    """A sample that stays the same but for functions that change; it says what to do."""
    how = ["--quick", "--sample", "20", "--folder", *SAMPLED]
    ran = subprocess.run(
        [sys.executable, "-m", "tests.faults.generated", *how],
        cwd=PACKAGE.parent, capture_output=True, text=True, timeout=2300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
