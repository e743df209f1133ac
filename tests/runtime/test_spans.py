"""Stretches of tokens, against sets of tokens."""

from hypothesis import given
from hypothesis import strategies as st

from ring_attention_pytorch.runtime.spans import deepest, disjoint_spans, is_free
from tests.support.positions import quickly

spans = st.lists(
    st.tuples(st.integers(0, 12), st.integers(1, 6)).map(lambda at: slice(at[0], sum(at))),
    max_size=5,
)


def tokens(at: slice) -> set[int]:
    return {*range(at.start, at.stop)}


@quickly
@given(spans)
def test_stretches_are_what_spans_cover_with_who_covers_it(some):
    covered: dict[int, list[int]] = {}
    for i, at in enumerate(some):
        for token in tokens(at):
            covered.setdefault(token, []).append(i)
    found = [(token, which) for at, which in disjoint_spans(some) for token in sorted(tokens(at))]
    assert found == sorted(covered.items())
    assert deepest(some) == max(map(len, covered.values()), default=0)


@quickly
@given(spans, spans.filter(bool))
def test_free_is_what_overlaps_nothing(taken, some):
    assert is_free(some[0], taken) == all(tokens(some[0]).isdisjoint(tokens(t)) for t in taken)
