"""The idea in one file: exact in every layout."""

from collections.abc import Callable
from pathlib import Path

import pytest

from examples import idea

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_it_is_dense_attention(pools: Callable, size: int) -> None:
    for layout in ("contiguous", "striped", "zigzag"):
        for found in pools(size).run(idea.errors, layout):
            assert len(found) == 4
            assert max(found) < 1e-13


def test_it_stays_short() -> None:
    """The page promises that it is 150 lines."""
    assert len((ROOT / "examples/idea.py").read_text().splitlines()) <= 150
