"""Random cases in which every feature appears; `python -m tests.support.random_cases` runs more."""

from dataclasses import dataclass, fields, replace

import pytest
import torch

from tests.support.case import axis, drawn
from tests.support.cases import dense
from tests.support.random_cases import off, oracle, problem
from tests.support.random_draw import LEARNED, Case, draw, features, refused


def covering(seeds: range) -> list[int]:
    """Each seed whose case has something that no earlier one has."""
    known, found = set(), []
    for seed in seeds:
        if not known.issuperset(new := {*features(draw(seed))}):
            known |= new
            found.append(seed)
    return found


@pytest.mark.parametrize("seed", covering(range(400)))
def test_a_random_case(seed):
    assert not problem(draw(seed)), draw(seed)


@dataclass(frozen=True, kw_only=True)
class More(Case):
    """With an option that is drawn before all others."""

    batch: int = axis(1, (5, 6, 7))
    another: int = axis(0, (1, 2, 3))


def test_one_more_option_changes_no_other():
    for seed in range(50):
        with_more, without = drawn(More, seed, batch=2), drawn(Case, seed, batch=2)
        assert with_more.another > 0
        assert all(getattr(with_more, f.name) == getattr(without, f.name) for f in fields(Case))


def test_a_case_is_what_its_text_says():
    assert all(eval(str(draw(seed)), {"Case": Case}) == draw(seed) for seed in range(100))


def test_two_oracles_agree():
    """Dense attention of most tests, and that of random cases."""
    for seed in range(80):
        case = replace(draw(seed), dtype="float64", lse="differentiated", learned=LEARNED)
        case = replace(case, shared=0, shared_masked=False)  # dense attention has none
        if refused(case) is None and not case.decode:
            want, largest = oracle(case)
            found = dense(case)
            for name, t in found.items():
                assert off(t, want[name], largest[name], torch.float64) < 16.0, (name, case)
