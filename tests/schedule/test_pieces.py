"""Pieces of a schedule: each needed key comes once, in as few tiles as can be."""

from itertools import chain
from weakref import ref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ring_attention_pytorch.geometry.documents import of_borders
from ring_attention_pytorch.geometry.layouts import LAYOUTS, all_segments, count, segment_positions
from ring_attention_pytorch.geometry.segments import slice_segments
from ring_attention_pytorch.geometry.tiles import Mask, tiles
from ring_attention_pytorch.schedule.pieces import (
    Workload,
    in_two_stages,
    joined,
    rounds_of,
    tokens,
)
from tests.support.cases import Attention
from tests.support.counted import needed


@settings(deadline=None)
@given(
    st.sampled_from(sorted(LAYOUTS)),
    st.integers(1, 6),
    st.integers(0, 40),
    st.builds(Mask, st.booleans(), st.none() | st.integers(0, 20), st.none(), st.none()),
    st.integers(1, 6),
    st.booleans(),
)
def test_a_schedule_brings_each_needed_key_once(layout, size, length, visible, at_once, staged):
    everyone = all_segments(layout, size, length)
    blocks = Workload(everyone, everyone, visible)
    groups = (in_two_stages(blocks),) if staged else rounds_of(blocks, at_once)
    assert staged or all(len(group.distances) <= at_once for group in groups)
    for rank, mine in enumerate(everyone):
        pieces = [p for group in groups for p in group.pieces[rank]]
        brought = [(p.owner, j) for p in pieces for j in range(p.cols.start, p.cols.stop)]
        assert len(set(brought)) == len(brought) == sum(tokens((p,)) for p in pieces)
        for owner, theirs in enumerate(everyone):
            if owner == rank:
                continue
            shown = {
                j for t in tiles(mine, theirs, visible) for j in range(t.cols.start, t.cols.stop)
            }
            assert shown <= {j for whose, j in brought if whose == owner}
        for group in groups:
            at = [p.segment.start for p in group.pieces[rank]]
            assert staged or at == sorted(at)
            whole = joined(group.pieces[rank])
            assert count(whole) == tokens(group.pieces[rank])
            ends = [0, *(part.stop for part in group.parts[rank])]
            assert group.parts[rank] == tuple(map(slice, ends[:-1], ends[1:]))
            assert ends[-1] == count(whole)
            for stage, part in zip(group.stages, group.parts[rank], strict=True):
                owners = {(rank - t) % size for t in chain.from_iterable(stage)}
                theirs = tuple(p for p in group.pieces[rank] if p.owner in owners)
                some = segment_positions(slice_segments(whole, part))
                assert torch.equal(some, segment_positions(joined(theirs)))


@pytest.mark.parametrize("size", [3, 4, 8])
def test_stages_are_as_few_tiles(size):
    """Backward, all together; forward, each stage."""
    everyone, visible = all_segments("zigzag", size, 16 * size), Mask(causal=True)
    group = in_two_stages(Workload(everyone, everyone, visible))
    for rank, mine in enumerate(everyone):
        whole = joined(group.pieces[rank])
        for part in (slice(0, count(whole)), *group.parts[rank]):
            assert len(tiles(mine, slice_segments(whole, part), visible)) <= 2


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_a_balanced_causal_layout_takes_two_large_tiles(size):
    everyone = all_segments("zigzag", size, 16 * size)
    visible = Mask(causal=True)
    (group,) = rounds_of(Workload(everyone, everyone, visible), at_once=size)
    for rank, mine in enumerate(everyone):
        keys = joined(group.pieces[rank])
        assert len(tiles(mine, keys, visible)) == (1 if rank in (0, size - 1) else 2)
        assert count(keys) == needed(Attention(16 * size, "zigzag", causal=True), size)[rank]


def test_what_comes_but_once_is_not_kept():
    """Documents come and go with their batch, and what they need with them."""
    everyone = all_segments("zigzag", 2, 12)
    halves = of_borders([0, 5, 12])
    for visible, apart in (
        (Mask(causal=True, window=3), ()),
        (Mask(causal=True, documents=halves), ()),
        (Mask(causal=True, prefix=3), ()),
        (Mask(causal=True), (Mask(causal=True), Mask(causal=True, documents=halves))),
    ):
        blocks = Workload(everyone, everyone, visible, apart)
        first, again = rounds_of(blocks, 1), rounds_of(blocks, 1)
        assert first == again
        assert (first is again) == (visible.window == 3 or visible.documents is halves)
    alike = Mask(causal=True, documents=of_borders([0, 5, 12]))
    assert rounds_of(Workload(everyone, everyone, alike), 1) is not first
    gone = ref(alike.documents)
    del alike
    assert gone() is None  # nothing that they hold refers to them
