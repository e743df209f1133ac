"""The table that gives each block of the Triton kernels its part of a call's tiles."""

import heapq
import random
from itertools import product

import pytest
import torch

from ring_attention_pytorch.geometry import layouts
from ring_attention_pytorch.geometry.documents import of_borders, of_ids
from ring_attention_pytorch.geometry.layouts import all_segments
from ring_attention_pytorch.geometry.segments import Segments, segment_positions
from ring_attention_pytorch.geometry.tiles import Mask, tiles
from ring_attention_pytorch.kernels._tile_table import TileTable, _numbers, in_steps, tile_table
from ring_attention_pytorch.kernels.triton import _packs_at_once
from ring_attention_pytorch.plan.masks import _runs, _segments
from ring_attention_pytorch.runtime.interfaces import Tiles
from tests.support.packed import PACKED, N


@pytest.mark.parametrize("side", ["rows", "cols"])
def test_a_block_of_the_triton_kernels_looks_at_its_own_documents_only(side):
    whole = all_segments("contiguous", 1, 7000)[0]
    found = Tiles(tiles(whole, whole, Mask(True, None, of_borders(range(0, 7001, 7)))))
    like = torch.empty(1, 7000)
    table = tile_table(found, side, 64, like, every=False)
    assert sorted(table.blocks[:, 0].tolist()) == list(range(-(-7000 // 64)))
    assert (table.blocks[:, 2] - table.blocks[:, 1]).max() <= 64 // 7 + 2
    assert tile_table(found, side, 64, like, every=False) is table


def test_blocks_look_at_every_tile_that_they_meet_and_are_left_out_if_there_is_none():
    for ids, causal, layout in product(PACKED.values(), (False, True), ("zigzag", "striped")):
        visible = Mask(causal, 3, of_ids(torch.tensor(ids[-1])))
        everyone = all_segments(layout, 2, N)
        found = tiles(everyone[0], everyone[1], visible)
        for side, block in product(("rows", "cols") if found else (), (1, 2, 5, 16)):
            like = torch.empty(1, layouts.count(everyone[0 if side == "rows" else 1]))
            table, whole = (tile_table(found, side, block, like, every) for every in (False, True))
            assert sorted(whole.blocks[:, 0].tolist()) == list(range(-(-like.shape[1] // block)))
            lines = {number: range(*ends) for number, *ends in table.blocks.tolist()}
            assert lines == {n: range(*e) for n, *e in whole.blocks.tolist() if range(*e)}
            at = (0, 1) if side == "rows" else (2, 3)
            for number in whole.blocks[:, 0].tolist():
                start = number * block
                for i, tile in enumerate(table.tiles.tolist()):
                    meets = tile[at[0]] < start + block and tile[at[1]] > start
                    assert not meets or i in lines[number]


def test_blocks_that_see_the_most_go_first():
    whole = all_segments("contiguous", 1, 96)[0]
    found = Tiles(tiles(whole, whole, Mask(True, None, of_borders([0, 16, 80, 96]))))
    for side, order in (("rows", [4, 3, 2]), ("cols", [1, 2, 3])):
        table = tile_table(found, side, 16, torch.empty(1, 96), every=False)
        assert table.blocks[:3, 0].tolist() == order


def work_of(table: TileTable, side: str, block: int) -> list[int]:
    """Pairs that each block sees, one row or column after another."""
    found = []
    for number, first, last in table.blocks.tolist():
        pairs = 0
        for r0, r1, c0, c1, left, right, _ in table.tiles[first:last].tolist():
            (a0, a1), (b0, b1), back, ahead = (r0, r1), (c0, c1), left, right
            if side == "cols":
                (a0, a1), (b0, b1), back, ahead = (c0, c1), (r0, r1), right, left
            for i in range(max(a0, number * block) - a0, min(a1, (number + 1) * block) - a0):
                pairs += max(0, min(b1 - b0, i + ahead + 1) - max(0, i - back))
        found.append(pairs)
    return found


def busiest(work: list[int], heads: int, slots: int) -> tuple[float, float]:
    """Work of the busiest slot over the mean, and the spread in longest blocks.

    As GPUs do it: the next program begins where one has ended, in the order of `block_of`.
    """
    at_once, busy = _packs_at_once(len(work), heads), [0] * slots
    for begun in range(0, heads, at_once):
        for pairs in work:
            for _ in range(min(at_once, heads - begun)):
                heapq.heappush(busy, heapq.heappop(busy) + pairs)
    return max(busy) * slots / sum(busy), (max(busy) - min(busy)) / max(work)


@pytest.mark.parametrize("side", ["rows", "cols"])
@pytest.mark.parametrize(("n", "block"), [(2048, 64), (4096, 64), (4096, 32), (8192, 128)])
def test_multiprocessors_have_equal_work_and_end_within_a_quarter_of_a_block(n, block, side):
    """So another order of programs could win little but by what they share in the cache."""
    (whole,) = all_segments("contiguous", 1, n)
    table = tile_table(tiles(whole, whole, Mask(True)), side, block, torch.empty(1, n), False)
    for heads, slots in ((32, 264), (192, 264), (32, 132), (8, 132)):
        most, spread = busiest(work_of(table, side, block), heads, slots)
        assert most <= 1.02
        assert spread <= 0.25


def shown_by(lines: list[tuple[int, ...]], n: int, m: int) -> torch.Tensor:
    """Return how often each pair is seen, by the definition of a line."""
    seen = torch.zeros(n, m, dtype=torch.int64)
    for r0, r1, c0, c1, left, right, step in lines:
        for i in range(r1 - r0):
            first, last = i - left, i // step * step + right
            seen[r0 + i, c0 + max(first, 0) : min(c0 + last + 1, c1)] += 1
    return seen


def test_only_even_stairs_are_joined():
    draw = random.Random(0)
    for _ in range(60):
        row = col = 0
        steps = []
        for _ in range(draw.randint(1, 9)):
            row, height = row + draw.choice((3, 3, 3, 3, 2, 5)), row
            col += draw.choice((3, 3, 3, 3, 1, 4))
            steps.append((height, row, 0, col, row - height, col))
        draw.shuffle(steps)
        plain = shown_by([(*each, 1) for each in steps], row, col)
        assert torch.equal(shown_by(in_steps(steps), row, col), plain)


def gathered(positions: torch.Tensor) -> Segments:
    """As ranks tell them one another."""
    return _segments(_runs(positions))


@pytest.mark.parametrize("step", [1, 2, 3, 4, 7, 64])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_steps_of_positions_are_a_property_of_few_tiles(step, layout):
    keys = all_segments(layout, 2, 50)
    for rank, (back, ahead) in product(range(2), ((1, 0), (0, -1), (0, 5))):
        at = segment_positions(keys[rank])
        stand = torch.cat([at // step * step + back * (step - 1) + ahead, at])
        queries = gathered(stand)
        for their in map(segment_positions, keys):
            found = tiles(queries, gathered(their), Mask(causal=True))
            lines = in_steps([*map(_numbers, found)])
            want = stand[:, None] >= their[None]
            assert torch.equal(shown_by(lines, len(stand), len(want[0])), want.long())
            if layout == "contiguous" and 1 < step < 10:
                assert len(lines) <= 4
