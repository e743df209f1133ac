"""Tiles and distances: arithmetic, checked against the mask of each pair."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ring_attention_pytorch.geometry.documents import of_ids
from ring_attention_pytorch.geometry.layouts import Segments, all_segments, count, segment_positions
from ring_attention_pytorch.geometry.tiles import (
    Mask,
    Tile,
    band,
    buckets,
    needed_distances,
    tiles,
    unseen,
    visible_pairs,
)
from tests.support.positions import layouts, lengths, quickly, ring_sizes

# ids of tokens, of which there are more than any sequence has
packed = st.lists(st.integers(0, 5), min_size=70, max_size=70).flatmap(
    lambda ids: st.sampled_from([ids, sorted(ids), [0, *range(69)]])
)
documents = st.none() | packed.map(lambda ids: of_ids(torch.tensor(ids)))
windows = st.none() | st.integers(0, 80)
visibles = st.builds(Mask, st.booleans(), windows, documents, st.none()) | st.builds(
    Mask, st.booleans(), windows, st.none(), st.integers(0, 75)
)


def seen(queries: Segments, keys: Segments, visible: Mask) -> Tensor:
    """Return the visible pairs, by the definition."""
    i, j = segment_positions(queries)[:, None], segment_positions(keys)
    shown = torch.ones(len(i), len(j), dtype=torch.bool)
    if visible.documents is not None:
        ids = torch.empty(70, dtype=torch.long)
        for document, start, stop in visible.documents.runs:
            ids[start:stop] = document
        shown = ids[i] == ids[j]
        before = (ids[:, None] == ids).tril(-1).sum(-1)
        i, j = before[i], before[j]
    if visible.causal:
        prefix = -1 if visible.prefix is None else visible.prefix
        shown &= (j <= i) | ((i < prefix) & (j < prefix))
    if visible.window is not None:
        shown &= (i - j).abs() <= visible.window
    return shown


def drawn(found: list[Tile], shape: tuple[int, int]) -> Tensor:
    """Return how many times the tiles show each pair."""
    times = torch.zeros(shape, dtype=torch.long)
    for tile in found:
        times[tile.rows, tile.cols] += band(tile, torch.device("cpu"))
    return times


def assert_tight(tile: Tile) -> None:
    assert 0 <= tile.rows.start < tile.rows.stop
    assert 0 <= tile.cols.start < tile.cols.stop
    assert tile.left is None or tile.left >= 0
    assert tile.right is None or tile.right >= 0
    shown = band(tile, torch.device("cpu"))
    assert shown.any(0).all()
    assert shown.any(1).all()


@settings(deadline=None, max_examples=200)
@given(layouts, ring_sizes, lengths, visibles, st.integers(1, 9))
def test_tiles_show_each_visible_pair_once_and_nothing_else(layout, size, length, visible, bucket):
    everyone = all_segments(layout, size, length)
    for queries, keys in product(everyone, repeat=2):
        found = tiles(queries, keys, visible)
        want = seen(queries, keys, visible)
        assert torch.equal(drawn(found, want.shape), want.long())
        assert visible_pairs(found) == want.sum()
        for tile in found:
            assert_tight(tile)
            parts = list(buckets(tile, bucket))
            assert all(p.rows.stop - p.rows.start <= bucket for p in parts)
            assert torch.equal(drawn(parts, want.shape), drawn([tile], want.shape))
            for part in parts:
                assert_tight(part)


@quickly
@given(layouts, ring_sizes, st.lists(lengths, min_size=2, max_size=2))
def test_two_sequences_without_a_mask_show_everything(layout, size, two):
    queries, keys = (all_segments(layout, size, n) for n in two)
    for mine, theirs in product(queries, keys):
        times = drawn(tiles(mine, theirs, Mask()), (count(mine), count(theirs)))
        assert torch.equal(times, torch.ones_like(times))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 16])
def test_causal_zigzag_is_one_tile_a_block_where_the_length_divides(size):
    for length in (4 * size, 6 * size, 64 * size):
        everyone = all_segments("zigzag", size, length)
        for queries, keys in product(everyone, repeat=2):
            assert len(tiles(queries, keys, Mask(causal=True))) == 1


@quickly
@given(ring_sizes, lengths)
def test_causal_zigzag_is_at_most_two_tiles_a_block(size, length):
    everyone = all_segments("zigzag", size, length)
    for queries, keys in product(everyone, repeat=2):
        assert len(tiles(queries, keys, Mask(causal=True))) <= 2


@pytest.mark.parametrize("layout", ["contiguous", "striped"])
@pytest.mark.parametrize("length", [1, 7, 24, 61])
def test_contiguous_and_striped_are_at_most_one_tile_a_block(layout, length):
    everyone = all_segments(layout, 4, length)
    for visible in (Mask(), Mask(True), Mask(True, 5), Mask(False, 5)):
        for queries, keys in product(everyone, repeat=2):
            assert len(tiles(queries, keys, visible)) <= 1


@quickly
@given(layouts, ring_sizes, lengths, visibles)
def test_needed_distances_are_those_at_which_somebody_sees_something(layout, size, length, visible):
    everyone = all_segments(layout, size, length)
    needed = needed_distances(everyone, everyone, visible)
    useful = {
        (r - owner) % size
        for r, owner in product(range(size), repeat=2)
        if seen(everyone[r], everyone[owner], visible).any()
    }
    assert needed[0] == 0
    assert len(set(needed)) == len(needed)
    if visible[1:3] != (None, None) or length >= 2 * size:
        assert set(needed) == useful | {0}
    else:  # without a window nobody looks at lengths: too many is slow, too few is wrong
        assert set(needed) >= useful | {0}


@pytest.mark.parametrize("size", [3, 4, 8])
def test_zigzag_with_a_short_window_needs_the_neighbours_on_both_sides(size):
    everyone = all_segments("zigzag", size, 16 * size)
    assert needed_distances(everyone, everyone, Mask(True, 3)) == (0, 1, size - 1)


@pytest.mark.parametrize("window", [0, 1, 7, 8, 9, 16, 17, 40])
def test_contiguous_with_a_window_needs_only_as_many_ranks_as_it_reaches(window):
    n, size = 8, 8
    everyone = all_segments("contiguous", size, n * size)
    reach = min(size, 1 + -(-window // n))
    assert len(needed_distances(everyone, everyone, Mask(True, window))) == reach


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_zigzag_and_striped_balance_causal_work_and_contiguous_does_not(size):
    def spread(layout: str, length: int) -> float:
        everyone = all_segments(layout, size, length)
        work = [sum(visible_pairs(tiles(q, k, Mask(True))) for k in everyone) for q in everyone]
        assert sum(work) == length * (length + 1) // 2
        mean = sum(work) / size
        return max(abs(w - mean) for w in work) / mean

    for length in (64 * size, 64 * size + 1, 100 * size - 1, 997 * size):
        assert spread("zigzag", length) < 0.05
        assert spread("striped", length) < 0.05
        assert spread("contiguous", length) > 0.3


@quickly
@given(layouts, st.integers(1, 5), lengths, visibles)
def test_keys_that_no_query_sees_are_found(layout, size, length, visible):
    everyone = all_segments(layout, size, length)
    for some in (everyone[:1], everyone[:2]):
        for keys in everyone:
            shown = torch.stack([seen(mine, keys, visible).any(0) for mine in some]).any(0)
            found = torch.ones(count(keys), dtype=torch.bool)
            for span in unseen(some, keys, visible):
                assert found[span].all()
                assert span.start < span.stop
                found[span] = False
            assert torch.equal(found, shown)


@quickly
@given(packed, layouts, st.integers(1, 4), st.integers(1, 70))
def test_documents_count_their_own_tokens(ids, layout, size, length):
    whole, head = of_ids(torch.tensor(ids)), of_ids(torch.tensor(ids[:length]))
    assert whole.head(length).runs == head.runs
    assert sorted(head.lengths) == sorted(ids[:length].count(each) for each in {*ids[:length]})
    before = torch.tensor([ids[:at].count(ids[at]) for at in range(length)])
    for mine in all_segments(layout, size, length):
        assert torch.equal(head.positions(mine), before[segment_positions(mine)])
