"""Positions, tiles and distances: arithmetic, checked against brute force."""

import doctest
import importlib
import pkgutil
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ring_attention_pytorch
from ring_attention_pytorch.geometry.balance import balanced
from ring_attention_pytorch.geometry.documents import of_ids
from ring_attention_pytorch.geometry.layouts import (
    LAYOUTS,
    Segments,
    all_segments,
    count,
    positions,
    resolve_layout,
    segment_positions,
)
from ring_attention_pytorch.geometry.segments import slice_segments
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

quickly = settings(deadline=None, max_examples=60)
layouts = st.sampled_from(sorted(LAYOUTS))
lengths = st.integers(0, 70)
ring_sizes = st.integers(1, 9)
# ids of tokens, of which there are more than any sequence has
packed = st.lists(st.integers(0, 5), min_size=70, max_size=70).flatmap(
    lambda ids: st.sampled_from([ids, sorted(ids), [0, *range(69)]])
)
documents = st.none() | packed.map(lambda ids: of_ids(torch.tensor(ids)))
windows = st.none() | st.integers(0, 80)
visibles = st.builds(Mask, st.booleans(), windows, documents, st.none()) | st.builds(
    Mask, st.booleans(), windows, st.none(), st.integers(0, 75)
)


def held(layout: str, size: int, length: int) -> list[Tensor]:
    return [positions(layout, rank=r, ring_size=size, length=length) for r in range(size)]


def seen(queries: Segments, keys: Segments, visible: Mask) -> Tensor:
    """What is visible, by the definition."""
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
    """How many times the tiles show each pair."""
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


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"layout": "spiral"}, "'contiguous', 'striped', 'zigzag', got 'spiral'"),
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


def modules() -> list[str]:
    package = ring_attention_pytorch
    return [
        m.name
        for m in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        if not m.name.endswith("__main__") and ".compat." not in m.name  # there by old paths
    ]


@pytest.mark.parametrize("name", modules())
def test_the_examples_in_docstrings_are_true(name):
    if ".integrations." in name:
        pytest.importorskip("transformers")
        pytest.importorskip("accelerate")
    module = importlib.import_module(name)
    assert doctest.testmod(module, extraglobs={"torch": torch}).failed == 0


def test_examples_are_found_behind_decorators():
    module = importlib.import_module("ring_attention_pytorch.geometry.layouts")
    found = {t.name.rpartition(".")[2] for t in doctest.DocTestFinder().find(module) if t.examples}
    assert "positions" in found


@quickly
@given(layouts, st.integers(1, 4), lengths, st.integers(0, 40), st.integers(0, 40))
def test_a_slice_holds_the_positions_that_stand_there(layout, size, length, start, more):
    span = slice(start, start + more)
    for mine in all_segments(layout, size, length):
        assert torch.equal(
            segment_positions(slice_segments(mine, span)), segment_positions(mine)[span]
        )


@quickly
@given(packed, layouts, st.integers(1, 4), st.integers(1, 70))
def test_documents_count_their_own_tokens(ids, layout, size, length):
    whole, head = of_ids(torch.tensor(ids)), of_ids(torch.tensor(ids[:length]))
    assert whole.head(length).runs == head.runs
    assert sorted(head.lengths) == sorted(ids[:length].count(each) for each in {*ids[:length]})
    before = torch.tensor([ids[:at].count(ids[at]) for at in range(length)])
    for mine in all_segments(layout, size, length):
        assert torch.equal(head.positions(mine), before[segment_positions(mine)])


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
