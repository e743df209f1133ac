"""Arguments are checked in one place, by type."""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import pytest

from ring_attention_pytorch.arguments import checked


def test_a_bool_is_no_number() -> None:
    @checked
    def twice(x: int, y: float | int | None = None) -> int:
        return 2 * x

    assert twice(2, 1.5) == 4
    for wrong in ({"x": True}, {"x": 1, "y": False}):
        with pytest.raises(ValueError, match=r"twice\(\) parameter .* a bool is no number"):
            twice(**wrong)


def test_a_generator_is_no_checked_function() -> None:
    with pytest.raises(TypeError, match="return one instead"):

        @checked
        def numbers(n: int) -> Any:
            yield from range(n)


@pytest.mark.parametrize("wrong", [[1.5, 2], [2, 1.5], [True, 2], [2, "2"], [2, [2]], "22"])
def test_each_item_of_a_sequence_is_looked_at(wrong: Any) -> None:
    @checked
    def total(x: int | Sequence[int], y: Sequence[int | None] | None = None) -> int:
        return 0

    assert total([1, 2], [1, None]) == total(range(2), ()) == total([IntEnum("N", "one").one]) == 0
    why = "iolates it: each item must be an int, and a bool is none"
    for given in ({"x": wrong}, {"x": 1, "y": wrong}):
        for _ in range(20):  # one drawn at random would be right now and then
            with pytest.raises(ValueError, match=why):
                total(**given)
