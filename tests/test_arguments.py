"""Arguments are checked in one place, by type."""

import re
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ring_attention_pytorch import ring_attn, tied_ring_attn
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


@pytest.mark.parametrize(
    ("given", "said"),
    [({"is_causal": True}, "'is_causal' (did you mean causal?)"),
     ({"attn_mask": None}, "'attn_mask' (did you mean key_mask?)"),
     ({"windw": 3}, "'windw' (did you mean window?)"),
     ({"window": (16, 0)}, "of flash-attn's (left, 0) it is left, with causal=True")],
)  # fmt: skip
def test_names_and_values_of_other_libraries_are_corrected(given, said) -> None:
    q = torch.zeros(1, 4, 2, 8)
    with pytest.raises(ValueError, match=re.escape(said)):
        ring_attn(q, q, q, **given)


def told_of_another_kind() -> list[str]:
    """Errors where rank 1 alone has a bias, or tied keys."""
    q, odd, told = torch.zeros(1, 4, 2, 8), dist.get_rank() == 1, []
    for call in (
        lambda: ring_attn(q, q, q, key_bias=torch.zeros(1, 4) if odd else None),
        lambda: tied_ring_attn(q, q) if odd else ring_attn(q, q, q),
    ):
        with pytest.raises(ValueError, match="must be the same on every rank") as error:
            call()
        told.append(str(error.value))
    return told


def test_what_differs_is_told_by_the_name_that_was_given(pools) -> None:
    first, second = pools(2).run(told_of_another_kind)
    assert first == second
    assert 'key_bias must be the same on every rank, got null on rank 0, "for' in first[0]
    assert 'codec must be the same on every rank, got "none, keys as they are"' in first[1]
