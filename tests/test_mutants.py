"""Every planted fault is found. What a suite can't see, it does not test."""

import json
import subprocess
import sys
from collections import Counter
from functools import cache

import pytest

from tests import mutants, routing_mutants, second_order_mutants
from tests.cases import FIGURES
from tests.mutants import PACKAGE

MODULES = mutants, routing_mutants, second_order_mutants
BATTERIES = {module.__name__: module.MUTANTS for module in MODULES}
PLANTED = [(battery, mutant) for battery, planted in BATTERIES.items() for mutant in planted]


@cache
def verdicts(battery: str) -> dict[str, str | None]:
    ran = subprocess.run(
        [sys.executable, "-m", battery],
        cwd=PACKAGE.parent, capture_output=True, text=True, timeout=580,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    FIGURES.planted += len(BATTERIES[battery])
    FIGURES.killed += sum(found[m.name] is not None for m in BATTERIES[battery])
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("battery", BATTERIES)
def test_the_battery_finds_nothing_wrong_with_the_package_itself(battery):
    assert verdicts(battery)[""] is None


@pytest.mark.parametrize(("battery", "mutant"), PLANTED, ids=lambda x: getattr(x, "name", x))
def test_a_planted_fault_is_found(battery, mutant):
    source = (PACKAGE / mutant.file).read_text()
    assert source.count(mutant.old) == 1, "the source has changed: plant it anew"
    assert verdicts(battery)[mutant.name] is not None


@pytest.mark.parametrize("planted", BATTERIES.values(), ids=BATTERIES)
def test_names_are_unique_and_every_fault_changes_something(planted):
    assert max(Counter(m.name for m in planted).values()) == 1
    assert all(m.old != m.new for m in planted)
