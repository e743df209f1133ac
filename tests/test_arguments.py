"""Arguments are checked in one place, by type."""

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
