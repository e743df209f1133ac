"""Comparing notes: all ranks go on, or all of them say the same."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ring_attention_pytorch.agreement import agree
from ring_attention_pytorch.ring import Ring
from tests import threads

values = (
    st.none() | st.booleans() | st.integers(0, 3) | st.text(max_size=3) | st.lists(st.booleans())
)


def said(size: int, call) -> list[str | None]:
    """What each rank was told, None if nothing."""

    def main(ring: Ring) -> str | None:
        try:
            call(ring)
        except ValueError as error:
            return str(error)
        return None

    return threads.run(size, main)[0]


def test_numbers_of_all_ranks_come_back_in_order():
    got, _ = threads.run(4, lambda r: agree(r, "here", {"x": 1}, {"n": 10 + r.rank}))
    assert got == [[{"n": 10}, {"n": 11}, {"n": 12}, {"n": 13}]] * 4


@settings(deadline=None, max_examples=60)
@given(st.lists(values, min_size=1, max_size=5))
def test_ranks_go_on_if_and_only_if_they_have_the_same(found):
    texts = said(len(found), lambda ring: agree(ring, "here", {"x": found[ring.rank]}))
    assert len(set(texts)) == 1
    # True is not 1 and None is not absent: compare as what is written
    assert (texts[0] is None) == (len({repr(v) for v in found}) == 1)


def test_the_error_names_the_argument_the_ranks_and_the_values():
    texts = said(4, lambda ring: agree(ring, "here", {"a": 0, "window": 8 - (ring.rank == 2)}))
    got = "got 8 on ranks 0, 1, 3, 7 on rank 2"
    told = f"here: window must be the same on every rank, {got}; pass the same on all"
    assert texts == [told] * 4


def test_a_thing_that_only_some_ranks_have_differs():
    texts = said(3, lambda ring: agree(ring, "here", {"extra": 1} if ring.rank == 2 else {}))
    assert len(set(texts)) == 1
    assert "extra must be the same" in texts[0]
    assert "null on ranks 0, 1, 1 on rank 2" in texts[0]


def test_a_problem_of_one_rank_is_raised_on_all_and_names_it():
    def call(ring: Ring) -> None:
        agree(ring, "here", {}, problem="a bad thing" if ring.rank == 1 else None)

    assert said(3, call) == ["here: a bad thing (on rank 1)"] * 3


def test_problems_that_all_ranks_have_are_told_once_and_others_with_their_ranks():
    assert said(3, lambda ring: agree(ring, "here", {}, problem="bad")) == ["here: bad"] * 3
    texts = said(3, lambda ring: agree(ring, "here", {}, problem=f"bad {ring.rank > 0}"))
    assert texts == ["here: bad False (on rank 0); bad True (on ranks 1, 2)"] * 3


def test_a_problem_comes_before_a_difference():
    def call(ring: Ring) -> None:
        agree(ring, "here", {"x": ring.rank}, problem="bad" if ring.rank == 1 else None)

    assert said(2, call) == ["here: bad (on rank 1)"] * 2


@pytest.mark.parametrize("character", ["x", "é", "漢", "🦙", '"', "\\"])
def test_a_problem_of_any_length_in_any_script_fits_into_the_message(character):
    (found,) = {len(said(1, lambda ring: agree(ring, "here", {}, problem=character * 9999))[0])}
    assert found > 100

    class Short(Ring):
        def gather_bytes(self, message: bytes) -> list[bytes]:
            assert len(message) <= 4096
            return [message]

    ring = Short.alone()
    with pytest.raises(ValueError, match="here"):
        agree(ring, "here", {"layout": character * 9999}, problem=character * 9999)


def test_things_that_json_does_not_know_are_compared_as_text():
    assert said(2, lambda ring: agree(ring, "here", {"dtype": torch.float32})) == [None] * 2
    texts = said(2, lambda r: agree(r, "here", {"dtype": (torch.half, torch.double)[r.rank]}))
    assert "torch.float16" in texts[0]
    assert "torch.float64" in texts[0]


def test_a_ring_of_one_agrees_with_itself():
    assert agree(Ring.alone(), "here", {"x": 1}, {"n": 3}) == [{"n": 3}]
    with pytest.raises(ValueError, match=r"^here: bad$"):
        agree(Ring.alone(), "here", {}, problem="bad")
