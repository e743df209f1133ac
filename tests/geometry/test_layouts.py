"""Who holds which positions, against brute force."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ring_attention_pytorch.geometry.balance import balanced
from ring_attention_pytorch.geometry.layouts import (
    all_segments,
    count,
    positions,
    resolve_layout,
    segment_positions,
)
from ring_attention_pytorch.geometry.segments import slice_segments
from tests.support.positions import layouts, lengths, quickly, ring_sizes


def held(layout: str, size: int, length: int) -> list[Tensor]:
    return [positions(layout, rank=r, ring_size=size, length=length) for r in range(size)]


@quickly
@given(layouts, ring_sizes, lengths)
def test_every_position_is_held_once_and_shards_differ_by_at_most_two(layout, size, length):
    shards = held(layout, size, length)
    assert torch.cat(shards).sort().values.tolist() == list(range(length))
    sizes = [len(s) for s in shards]
    assert sizes == [count(s) for s in all_segments(layout, size, length)]
    # one for each chunk, and zigzag has two of them
    assert max(sizes) - min(sizes) <= (2 if layout == "zigzag" else 1)


@quickly
@given(layouts, ring_sizes, lengths)
def test_no_segment_is_empty_and_chunks_differ_by_at_most_one(layout, size, length):
    segments = [s for mine in all_segments(layout, size, length) for s in mine]
    assert all(s.length > 0 for s in segments)
    if length >= 2 * size and segments:
        assert max(s.length for s in segments) - min(s.length for s in segments) <= 1


@quickly
@given(ring_sizes, lengths)
def test_contiguous_is_what_tensor_split_cuts(size, length):
    for mine, chunk in zip(
        held("contiguous", size, length), torch.arange(length).tensor_split(size)
    ):
        assert mine.tolist() == chunk.tolist()


@quickly
@given(ring_sizes, lengths)
def test_zigzag_is_a_chunk_of_tensor_split_and_its_mirror_image(size, length):
    chunks = torch.arange(length).tensor_split(2 * size)
    for rank, mine in enumerate(held("zigzag", size, length)):
        assert mine.tolist() == torch.cat((chunks[rank], chunks[-1 - rank])).tolist()


@quickly
@given(ring_sizes, lengths)
def test_striped_deals_tokens_round_robin(size, length):
    for rank, mine in enumerate(held("striped", size, length)):
        assert mine.tolist() == list(range(rank, length, size))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"layout": "spiral"}, "'zigzag', .* got 'spiral'"),
        ({"rank": 2}, "rank=2, ring_size=2"),
        ({"rank": -1}, "rank=-1"),
        ({"ring_size": 0}, "ring_size=0"),
        ({"length": -1}, "length=-1"),
    ],
)
def test_positions_says_what_can_not_be(wrong, said):
    given = {"layout": "zigzag", "rank": 0, "ring_size": 2, "length": 4, **wrong}
    with pytest.raises(ValueError, match=said):
        positions(given.pop("layout"), **given)


@quickly
@given(layouts, st.integers(1, 4), lengths, st.integers(0, 40), st.integers(0, 40))
def test_a_slice_holds_the_positions_that_stand_there(layout, size, length, start, more):
    span = slice(start, start + more)
    for mine in all_segments(layout, size, length):
        assert torch.equal(
            segment_positions(slice_segments(mine, span)), segment_positions(mine)[span]
        )


def test_a_layout_has_two_names():
    assert resolve_layout(None, striped=False) is None
    assert resolve_layout("zigzag", striped=False) == "zigzag"
    assert (
        resolve_layout(None, striped=True) == resolve_layout("striped", striped=True) == "striped"
    )
    with pytest.raises(ValueError, match="got layout='zigzag' too"):
        resolve_layout("zigzag", striped=True)
    with pytest.raises(ValueError, match="got 'spiral'"):
        resolve_layout("spiral", striped=False)


@pytest.mark.parametrize(("ring_size", "length"), [(3, 8), (2, 9)])
def test_a_dealt_layout_is_for_its_ranks_and_tokens(ring_size, length):
    dealt = balanced([0, 8], 2)
    assert all_segments(dealt, 2, 8) == dealt.segments
    with pytest.raises(ValueError, match=f"8 tokens over 2 ranks, got {length} over {ring_size}"):
        all_segments(dealt, ring_size, length)
