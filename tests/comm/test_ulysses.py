"""Heads swapped for sequence, around any transport, give what dense attention gives."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ring_attention_pytorch.comm.messages import Form
from ring_attention_pytorch.comm.ulysses import HeadPartition, key_heads, land, most_bytes
from ring_attention_pytorch.functional import ring_attn, ulysses_attn
from ring_attention_pytorch.geometry.layouts import LAYOUTS, all_segments, count, segment_positions
from ring_attention_pytorch.geometry.tiles import Mask, tiles
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype
from tests.support import threads
from tests.support.cases import (
    Attention,
    check_in_processes,
    check_in_threads,
    errors,
    oracle,
    shard,
)
from tests.support.counted import hops
from tests.support.crossed import CROSS, cross
from tests.support.reference import relative_error
from tests.support.sampling import grid

DEGREES = ((2, 2), (3, 3), (4, 2), (4, 4))  # ranks, and how many of them swap
HEADS = ((12, 12), (12, 4), (12, 3), (12, 2), (12, 1))


def matrix(layout: str, **how) -> list[Attention]:
    options = product((False, True), (None, 6), (False, True))
    return [
        Attention(
            length, layout, causal=causal, window=window, masked=masked, heads=h, key_heads=h_kv,
            d_v=5, **how,
        )
        for (causal, window, masked), (h, h_kv), length in zip(
            options, HEADS * 2, (29, 0, 1, 3, 16, 29, 7, 30)
        )
    ]  # fmt: skip


@grid(
    "layout, ranks, transport",
    product(sorted(LAYOUTS), (*DEGREES, (6, 2), (6, 3)), ("ring", "gather")),
    always=20,
    drawn=6,
)
def test_heads_for_sequence_over_threads(layout, ranks, transport):
    size, degree = ranks
    for case in matrix(layout, transport=transport, ulysses=degree):
        check_in_threads(case, size)


@pytest.mark.parametrize(("size", "degree"), DEGREES)
def test_heads_for_sequence_over_processes(size, degree, pools):
    cases = [
        case
        for layout, transport in product(sorted(LAYOUTS), ("ring", "gather"))
        for case in matrix(layout, transport=transport, ulysses=degree)
    ]
    check_in_processes(cases[(size + degree) % 3 :: 3], pools(size))


@pytest.mark.parametrize("transport", ["ring", "gather"])
@pytest.mark.parametrize(("queries", "keys"), CROSS)
def test_cross_attention(queries, keys, transport):
    case = cross(queries, keys, heads=6, key_heads=2, masked=True, transport=transport, ulysses=3)
    check_in_threads(case, 3)


def test_every_rank_swaps_under_ulysses_attn():
    case = Attention(23, "zigzag", causal=True, heads=6, key_heads=2)
    tensors, _, dout, _ = case.data()

    def main(ring: Ring) -> list[Tensor]:
        at, _ = case.places(ring.rank, 3)
        mine = [t[:, at].requires_grad_() for t in tensors]
        out = ulysses_attn(*mine, causal=True, layout="zigzag", group=ring)
        return [out, *torch.autograd.grad(out, mine, dout[:, at])]

    got, hub = threads.run(3, main)
    assert hub.exchanges == [2 + 2] * 3  # there and back, each with its backward
    want = oracle(case)
    for rank, (out, _, _, dv) in enumerate(got):
        at, _ = case.places(rank, 3)
        assert relative_error(out, want[0][:, at]) < 1e-12
        assert relative_error(dv, want[4][:, at]) < 1e-12


def test_single_precision_and_the_sum_over_replicated_heads():
    case = Attention(33, "zigzag", causal=True, key_heads=1, ulysses=4, dtype=torch.float32)
    check_in_threads(case, 4)
    half = Attention(
        64, key_heads=1, ulysses=4, kernel="eager", dtype=torch.bfloat16, batch=1, d=16, d_v=16
    )
    got, _ = threads.run(4, lambda ring: shard(half, ring))
    for rank, mine in enumerate(got):
        assert max(errors(half, rank, 4, mine, oracle(half)).values()) < 2**-7


# --- what is sent, and where it lands ---


def test_bytes_are_those_of_the_heads_of_others():
    size, n, d = 4, 6, 8
    case = Attention(size * n, heads=4, key_heads=4, d=d, d_v=d, ulysses=4)
    one = case.batch * n * d * 8  # of one head
    lse = case.batch * n * 8
    for _, sent in hops(case, size):
        assert sent == (size - 1) * (2 * 3 * one + 2 * (one + lse))


@settings(deadline=None)
@given(st.sampled_from(sorted(LAYOUTS)), st.integers(1, 3), st.integers(1, 4), st.integers(0, 50))
def test_tokens_land_where_their_positions_say(layout, degree, rings, length):
    everyone = all_segments(layout, degree * rings, length)
    for first in range(0, len(everyone), degree):
        mine = everyone[first : first + degree]
        segments, landings = land(mine)
        whole = torch.full((sum(s.length for s in segments),), -1)
        for place, rows, at in landings:
            whole[at] = segment_positions(mine[place])[rows]
        assert torch.equal(whole, segment_positions(segments))
        if layout != "striped" or degree == 1:
            assert bool((whole.diff() > 0).all())


@settings(deadline=None)
@given(
    st.sampled_from(sorted(LAYOUTS)), st.sampled_from([1, 2, 3]), st.sampled_from([2, 3]),
    st.tuples(st.integers(0, 20), st.integers(0, 20)), st.sampled_from([(6, 6), (6, 2), (12, 1)]),
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_a_buffer_has_room_for_all_that_is_swapped(
    layout, rings, degree, lengths, heads, sizes, dtype
):
    """On any rank, of queries and keys of any lengths, there and back."""
    shards = [all_segments(layout, rings * degree, length) for length in lengths]
    of_heads = key_heads(heads[0], heads[0], degree), key_heads(*heads, degree)
    (d, d_v), most, needed = sizes, set(), 0
    q, k, v = (
        torch.empty(2, 0, h, width, dtype=dtype)
        for h, width in ((heads[0], d), (heads[1], d), (heads[1], d_v))
    )
    out = torch.empty(2, 0, heads[0], d_v, dtype=dtype)
    lse = torch.empty(2, 0, heads[0], dtype=accumulation_dtype(dtype))
    for first in range(0, rings * degree, degree):
        queries, keys = (
            HeadPartition(tuple(map(count, s[first : first + degree])), max(map(count, s)),
                   land(s[first : first + degree])[1], theirs)
            for s, theirs in zip(shards, of_heads)
        )  # fmt: skip
        most.add(most_bytes((queries, keys), q, k, v))
        for tensors, spreads in (
            ((q, k, v), (queries, keys, keys)), ((out, lse), (queries, queries)),
        ):  # fmt: skip
            for place, back in product(range(degree), (False, True)):
                ways = [s.to_sequence if back else s.to_heads for s in spreads]
                parts = tuple(way.part(t, place) for way, t in zip(ways, tensors))
                needed = max(needed, Form.of_parts(parts).nbytes)
    assert len(most) == 1, "not the same on all ranks"
    assert needed <= most.pop()


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("size", [2, 4, 8])
def test_all_ranks_together_make_one_causal_call(layout, size):
    (whole, _) = land(all_segments(layout, size, 16 * size + 3))
    assert len(tiles(whole, whole, Mask(causal=True))) == 1


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6))
def test_every_query_head_finds_its_key_head(grouped, group, places):
    heads = grouped * group * places
    for place, theirs in enumerate(key_heads(heads, grouped, places)):
        mine = range(place * heads // places, (place + 1) * heads // places)
        together = len(mine) // len(theirs)
        assert len(theirs) * together == len(mine)
        assert [theirs[i // together] for i in range(len(mine))] == [
            h // (heads // grouped) for h in mine
        ]


def test_a_plan_swaps_masks_once_and_keeps_its_own_positions():
    case = Attention(22, "zigzag", causal=True, masked=True)
    tensors, mask, _, _ = case.data()

    def main(ring: Ring) -> None:
        at, _ = case.places(ring.rank, 4)
        mine = [t[:, at] for t in tensors]
        plan = RingPlan.make(
            *mine, causal=True, key_mask=mask[:, at], layout="zigzag", group=ring, ulysses=2
        )
        assert torch.equal(plan.positions(), at)
        assert plan.degree == 2
        for _ in range(2):
            out = ring_attn(*mine, plan=plan)
            assert relative_error(out, oracle(case)[0][:, at]) < 1e-12
        assert ring.hub.gathers[ring.rank] == 1

    threads.run(4, main)


@pytest.mark.parametrize(
    ("size", "degree", "said"),
    [
        (4, 3, "ulysses must divide the ring's 4 ranks, got 3"),
        (2, 0, "ulysses must divide the ring's 2 ranks, got 0"),
        (3, 3, "ulysses must divide the 4 heads of q, got 3"),
    ],
)
def test_degrees_that_can_t_be_are_refused_on_all_ranks(size, degree, said):
    def main(ring: Ring) -> None:
        q = torch.randn(1, 4, 4, 8)
        with pytest.raises(ValueError, match=said):
            ring_attn(q, q, q, group=ring, ulysses=degree)

    _, hub = threads.run(size, main)
    assert hub.exchanges == [0] * size
