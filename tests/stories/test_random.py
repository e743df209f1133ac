"""Random cases in which every feature appears; `python -m tests.support.random_cases` runs more."""

import pytest

from tests.support.random_cases import problem
from tests.support.random_draw import draw, features


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
