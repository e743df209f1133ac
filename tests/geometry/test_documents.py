"""Packed documents: a token sees its own, whatever the layout and wherever ranks begin."""

import random
from dataclasses import replace
from functools import lru_cache
from itertools import product
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ring_attention_pytorch import RingPlan, ring_attn, shard_sequence, unshard_sequence
from ring_attention_pytorch.geometry import layouts
from ring_attention_pytorch.geometry import tiles as tiles_module
from ring_attention_pytorch.geometry.balance import balanced, visible_keys
from ring_attention_pytorch.geometry.documents import of_borders, of_ids
from ring_attention_pytorch.geometry.layouts import LAYOUTS, all_segments
from ring_attention_pytorch.geometry.segments import segment_positions
from ring_attention_pytorch.geometry.tiles import Mask, tiles, visible_pairs
from ring_attention_pytorch.kernels._tile_table import tile_table
from ring_attention_pytorch.plan import ring_plan
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime.interfaces import Tiles
from tests.support import threads
from tests.support.cases import (
    CPU_KERNELS,
    Attention,
    borders,
    check_in_processes,
    check_in_threads,
)

Ids = tuple[int, ...]
N = 29


def in_runs(*lengths: int) -> Ids:
    """Ids of contiguous documents; one of no length leaves its number out."""
    return tuple(number for number, n in enumerate(lengths) for _ in range(n))


PACKED: dict[str, tuple[Ids, ...]] = {
    "one": (in_runs(29),),
    "none empty": (in_runs(3, 1, 17, 8),),
    "some empty": (in_runs(0, 0, 5, 0, 24, 0),),
    "single tokens": (in_runs(*[1] * 29),),
    "one long among short": (in_runs(1, 2, 1, 20, 2, 1, 2),),
    "other samples, others": (in_runs(14, 15), in_runs(2, 25, 2)),
    "scattered": (tuple(i * 7 % 5 for i in range(29)), tuple(i // 4 % 3 for i in range(29))),
}


@lru_cache
def dealt(ids: tuple[Ids, ...], size: int) -> layouts.AssignedLayout:
    return balanced([borders(tuple(sorted(row))) for row in ids], size)


def packed_cases(size: int) -> list[Attention]:
    found = []
    for ids, causal, window in product(PACKED.values(), (False, True), (None, 3)):
        for layout in (*sorted(LAYOUTS), dealt(ids, size)):
            case = Attention(N, layout, causal=causal, window=window, ids=ids)
            ascending = all(list(row) == sorted(row) for row in ids)
            found.append(replace(case, borders=ascending and (causal or window is None)))
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_documents_of_all_kinds_in_all_layouts(size):
    for i, case in enumerate(packed_cases(size)[:: 1 + size // 3]):
        check_in_threads(replace(case, kernel=CPU_KERNELS[i % 2]), size)


@pytest.mark.parametrize("size", [2, 4])
def test_documents_over_processes(size, pools):
    check_in_processes(packed_cases(size)[:: size + 1], pools(size))


def test_with_every_other_option():
    for masked, softclamp, kernel in product((False, True), (None, 1.5), (None, "eager")):
        case = Attention(
            N, "zigzag", causal=True, masked=masked, softclamp=softclamp, kernel=kernel
        )
        check_in_threads(replace(case, ids=PACKED["one long among short"], window=6), 3)
        check_in_threads(replace(case, ids=PACKED["scattered"], d_v=3), 3)


ids_of_any_kind = st.integers(0, 33).flatmap(
    lambda n: st.lists(
        st.lists(st.integers(0, 6), min_size=n, max_size=n).map(tuple), min_size=1, max_size=2
    )
)


@settings(deadline=None, max_examples=40)
@given(ids_of_any_kind, st.booleans(), st.data())
def test_any_documents_any_ring_any_mask(ids, in_order, data):
    ids = tuple(tuple(sorted(row)) if in_order else row for row in ids)
    size = data.draw(st.integers(1, 5))
    case = Attention(
        len(ids[0]),
        data.draw(st.sampled_from([*sorted(LAYOUTS), dealt(ids, size)])),
        causal=data.draw(st.booleans()),
        window=data.draw(st.none() | st.integers(0, 12)),
        masked=data.draw(st.booleans()),
        kernel=data.draw(st.sampled_from(CPU_KERNELS)),
        ids=ids,
        borders=in_order and all(max(row, default=0) == max(ids[0], default=0) for row in ids),
        bucket_size=data.draw(st.integers(1, 9)),
    )
    check_in_threads(case, size)


# --- what it costs ---


def plans(size: int, layout, ids: torch.Tensor, **options) -> tuple[list[RingPlan], threads.Hub]:
    """A plan of each rank for one packed sequence."""
    n = ids.shape[1]

    def main(ring: Ring) -> RingPlan:
        at = layouts.positions(layout, rank=ring.rank, ring_size=size, length=n)
        q = torch.empty(1, 1, 1, 4).expand(len(ids), len(at), 1, 4)
        return RingPlan.make(q, q, q, layout=layout, group=ring, documents=ids[:, at], **options)

    return threads.run(size, main)


def test_what_no_query_can_use_is_not_sent():
    within = torch.arange(4).repeat_interleave(8)[None]  # a document on each rank
    across = (torch.arange(32) + 4).div(8, rounding_mode="floor")[None]  # to the next
    for ids, distances in ((within, (0,)), (across, (0, 1, 3))):
        for plan in plans(4, "contiguous", ids)[0]:
            assert plan.blocks.distances == distances
    for plan in plans(4, "contiguous", across, causal=True)[0]:
        assert plan.blocks.distances == (0, 1)


def test_layers_that_are_given_a_plan_exchange_keys_only():
    ids = torch.tensor(PACKED["scattered"])
    made, hub = plans(3, "striped", ids, causal=True)
    assert hub.gathers == [2] * 3  # notes, runs

    def main(ring: Ring) -> None:
        own = made[ring.rank]
        transport = replace(own.transport, fabric=replace(own.transport.fabric, ring=ring))
        plan = replace(own, ring=ring, transport=transport)
        q = torch.randn(2, plan.signature[1], 1, 4)
        for _ in range(3):
            ring_attn(q, q, q, plan=plan)

    with mock.patch.object(ring_plan, "tiles", side_effect=tiles) as worked_out:
        _, hub = threads.run(3, main)
    assert hub.gathers == [0] * 3
    assert worked_out.call_count == 3 * 3 * 2  # of each rank and owner and sample, once


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_pairing_is_near_linear_in_the_number_of_documents(layout):
    for many in (1000, 4000):
        visible = Mask(True, None, of_borders(range(0, 7 * many + 1, 7)))
        everyone = all_segments(layout, 4, 7 * many)
        of_pair = tiles_module._tile_of_pair
        with mock.patch.object(tiles_module, "_tile_of_pair", side_effect=of_pair) as paired:
            found = [tiles(everyone[1], keys, visible) for keys in everyone]
        pieces = sum(len(p) for p in visible.documents.pieces(everyone[1]).values())
        assert paired.call_count <= 4 * pieces
        assert sum(map(len, found)) <= 4 * pieces


def test_samples_that_see_alike_are_one_call():
    same = torch.tensor([[5, 5, 6], [1, 1, 0], [3, 2, 2]])
    for plan in plans(1, "contiguous", same)[0]:
        found = plan.tiles(plan.blocks.keys[0])
        assert [samples for samples, _ in found] == [slice(0, 2), slice(2, 3)]


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


# --- balanced ---


def lengths_of(kind: str, total: int, seed: int) -> list[int]:
    draw, found = random.Random(seed), []
    while sum(found) < total:
        if kind == "log-normal":
            found.append(max(1, int(draw.lognormvariate(8.3, 1))))
        elif kind == "one long, many short":
            found.append(total // 2 if not found else draw.randint(1, 1000))
        else:
            found.append(draw.randint(1, 60))
    draw.shuffle(found)
    return found


@pytest.mark.parametrize("kind", ["log-normal", "one long, many short", "all short"])
@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_no_rank_has_five_percent_more_work_than_the_mean(kind, size):
    for seed in range(3):
        cu = torch.tensor([0, *lengths_of(kind, size * 8192, seed)]).cumsum(0)
        n = int(cu[-1])
        for causal, window in ((True, None), (True, 1000), (False, None)):
            layout = balanced(cu, size, causal=causal, window=window)
            work = visible_keys(of_borders(cu.tolist()), causal, window)
            held = [segment_positions(s) for s in all_segments(layout, size, n)]
            assert torch.cat(held).sort().values.equal(torch.arange(n))
            loads = torch.stack([work[at].sum() for at in held])
            assert loads.max() <= 1.05 * loads.double().mean()
            tokens = [len(at) for at in held]
            assert max(tokens) <= 1.05 * n / size


@settings(deadline=None, max_examples=30)
@given(ids_of_any_kind, st.integers(1, 9), st.booleans(), st.none() | st.integers(0, 20))
def test_every_token_is_held_once_and_work_is_counted_as_the_tiles_count(ids, size, causal, window):
    row = sorted(ids[0])
    cu, n = borders(tuple(row)), len(row)
    layout = balanced(cu, size, causal=causal, window=window)
    held = all_segments(layout, size, n)
    assert sorted(p for s in held for p in segment_positions(s).tolist()) == list(range(n))
    visible = Mask(causal, window, of_borders(cu))
    work = visible_keys(visible.documents, causal, window)
    for mine in held:
        assert [s.start for s in mine] == sorted(s.start for s in mine)
        pairs = sum(visible_pairs(tiles(mine, keys, visible)) for keys in held)
        assert pairs == work[segment_positions(mine)].sum()


def test_of_one_document_it_is_even_as_zigzag_and_of_equal_ones_contiguous():
    one, equal = balanced([0, 800], 4), balanced(list(range(0, 801, 100)), 4)
    work = [sum(s.length * (2 * s.start + s.length) for s in mine) for mine in one.segments]
    assert len(set(work)) == 1
    assert max(map(len, one.segments)) == 2
    assert equal.segments == all_segments("contiguous", 4, 800)


def sharded_and_back(layout, n: int) -> bool:
    """For a pool: nothing is lost on the way."""
    x = torch.randn(2, n, 3, generator=torch.Generator().manual_seed(0))
    return torch.equal(
        unshard_sequence(shard_sequence(x, layout=layout), length=n, layout=layout), x
    )


def test_sharded_and_brought_together_again(pools):
    assert all(pools(3).run(sharded_and_back, balanced([0, 5, 6, 50, 67], 3), 67))


# --- what can't be ---


def told(call, size: int = 2) -> str:
    """The one text that all ranks are told."""

    def main(ring: Ring) -> str:
        try:
            call(ring)
        except ValueError as error:
            return str(error)
        raise AssertionError("accepted")

    texts, _ = threads.run(size, main)
    assert len(set(texts)) == 1
    return texts[0]


LONGER = dealt((in_runs(3, 9),), 2)
WRONG = [
    (dict(documents=torch.zeros(1, 5, dtype=int)), "documents must be int [2, 5]"),
    (dict(documents=torch.zeros(2, 5)), "got torch.float32 [2, 5]"),
    (dict(documents=torch.zeros(2, 5, dtype=int), cu_seqlens=[0, 10]), "pass one or the other"),
    (dict(cu_seqlens=[0, 3, 2, 10]), "ascend from 0"),
    (dict(cu_seqlens=[1, 10]), "ascend from 0"),
    (dict(cu_seqlens=[]), "one list for all samples or 2, got 0"),
    (dict(cu_seqlens=[[0, 10]] * 3), "one list for all samples or 2, got 3"),
    (dict(cu_seqlens=[[0, 10], [0, 9]]), "must end alike, got [10, 9]"),
    (dict(cu_seqlens=torch.tensor([0.0, 10.0])), "cu_seqlens must be ascending ints"),
    (dict(cu_seqlens=[0, 9]), "must end with the length of the whole, 10, got 9"),
    (dict(cu_seqlens=[0, 10], cross=True), "need keys of the same tokens"),
    (dict(layout=LONGER), "dealt for 12 tokens over 2 ranks, got 10 over 2"),
]


@pytest.mark.parametrize(("given", "said"), WRONG)
def test_what_can_not_be_is_told_to_all(given, said):
    q = torch.randn(2, 5, 1, 4)
    assert said in told(lambda ring: ring_attn(q, q, q, group=ring, **given))
    # of one rank only
    text = told(lambda r: ring_attn(q, q, q, group=r, **(given if r.rank else {})))
    assert said in text or "must be the same on every rank" in text


def test_ranks_must_have_the_same_borders():
    q = torch.randn(1, 5, 1, 4)
    text = told(lambda ring: ring_attn(q, q, q, group=ring, cu_seqlens=[0, 3 + ring.rank, 10]))
    assert "cu_seqlens must be the same on every rank" in text
    assert "3 borders up to 10" in text


def test_dealt_layouts_are_compared_by_what_they_hold():
    q = torch.randn(1, 6, 1, 4)
    two = [LONGER, balanced([0, 12], 2)]
    assert "layout must be the same" in told(
        lambda ring: ring_attn(q, q, q, group=ring, layout=two[ring.rank])
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (dict(cu_seqlens=[0, 4], ring_size=0), "ring_size must be at least 1"),
        (dict(cu_seqlens=[2, 4], ring_size=2), "ascend from 0"),
        (dict(cu_seqlens=[0, 4], ring_size=2, window=-1), "window must be None or at least 0"),
    ],
)
def test_balanced_says_what_can_not_be(given, said):
    with pytest.raises(ValueError, match=said):
        balanced(**given)
