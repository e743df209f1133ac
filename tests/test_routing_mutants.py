"""Every fault planted into conditional routing is found."""

import json
import subprocess
import sys
from collections import Counter

import pytest

from tests.mutants import PACKAGE
from tests.routing_mutants import MUTANTS


@pytest.fixture(scope="module")
def verdicts() -> dict[str, str | None]:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.routing_mutants"],
        cwd=PACKAGE.parent, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def test_the_battery_finds_nothing_wrong_with_the_package_itself(verdicts):
    assert verdicts[""] is None


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_a_planted_fault_is_found(mutant, verdicts):
    source = (PACKAGE / mutant.file).read_text()
    assert source.count(mutant.old) == 1, "the source has changed: plant it anew"
    assert verdicts[mutant.name] is not None


def test_names_are_unique_and_every_fault_changes_something():
    assert max(Counter(m.name for m in MUTANTS).values()) == 1
    assert all(m.old != m.new for m in MUTANTS)
