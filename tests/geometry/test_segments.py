"""Segments and the pieces that documents cut of them, token by token."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from ring_attention_pytorch.geometry.segments import (
    Documents,
    Run,
    Segment,
    count,
    pieces_at,
    segment_positions,
    slice_segments,
)
from tests.support.positions import quickly

segments = st.lists(
    st.builds(Segment, st.integers(0, 30), st.integers(1, 5), st.integers(0, 8)), max_size=4
).map(tuple)
ids = st.lists(st.integers(0, 3), min_size=1, max_size=70)


def held(some: tuple[Segment, ...]) -> list[int]:
    return [s.start + i * s.stride for s in some for i in range(s.length)]


def in_runs(of_tokens: list[int]) -> Documents:
    cuts = [i for i, one in enumerate(of_tokens) if i == 0 or one != of_tokens[i - 1]]
    ends = [*cuts[1:], len(of_tokens)]
    return Documents(tuple(Run(of_tokens[a], a, b) for a, b in zip(cuts, ends)))


@quickly
@given(segments, st.integers(0, 40), st.integers(0, 40))
def test_a_slice_is_of_the_tokens_held_in_their_order(some, start, stop):
    assert segment_positions(some).tolist() == held(some)
    assert count(some) == len(held(some))
    assert held(slice_segments(some, slice(start, stop))) == held(some)[start:stop]
    assert all(s.length for s in slice_segments(some, slice(start, stop)))


@quickly
@given(segments, st.integers(0, 60))
def test_pieces_lie_on_one_side_of_a_border(some, border):
    found = dict.fromkeys(range(count(some)))
    for start, segment in pieces_at(some, border):
        positions = held((segment,))
        assert len({at < border for at in positions}) <= 1
        found |= dict(zip(range(start, start + segment.length), positions))
    assert [*found.values()] == held(some)


@quickly
@given(ids, st.integers(1, 4), st.data())
def test_a_token_counts_those_of_its_document_before_it(of_tokens, stride, data):
    start = data.draw(st.integers(0, len(of_tokens) - 1))
    some = (Segment(start, stride, len(range(start, len(of_tokens), stride))),)
    documents = in_runs(of_tokens)
    want = [of_tokens[:at].count(of_tokens[at]) for at in held(some)]
    assert documents.positions(some).tolist() == want
    for document, pieces in documents.pieces(some).items():
        own = [at for first, s in pieces for at in range(first, first + s.length)]
        assert {of_tokens[held(some)[at]] for at in own} == {document}


@quickly
@given(ids, st.integers(0, 80))
def test_the_head_of_documents_is_that_of_their_tokens(of_tokens, length):
    first = of_tokens[:length]
    assert in_runs(of_tokens).head(length).runs == (in_runs(first).runs if first else ())
    assert in_runs(of_tokens).lengths == [of_tokens.count(one) for one in dict.fromkeys(of_tokens)]


def test_no_segments_are_no_tokens():
    assert segment_positions(()).dtype == torch.long
    assert count(()) == 0
    assert slice_segments((), slice(0, 9)) == ()
