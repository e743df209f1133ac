"""Gathered keys give what dense attention gives, by the messages that it should take."""

import gc
from itertools import chain, product
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ring_attention_pytorch.comm.transports import TRANSPORTS
from ring_attention_pytorch.functional import ring_attn
from ring_attention_pytorch.geometry.layouts import LAYOUTS, segment_positions
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime.accumulate import GradAccumulator
from tests.support import threads
from tests.support.cases import (
    Attention,
    check_in_processes,
    check_in_threads,
    check_symmetric,
    errors,
    oracle,
    over_shared_memory,
    shard,
)
from tests.support.counted import forward_only, hops, needed
from tests.support.crossed import CROSS, cross
from tests.support.sampling import grid

# how keys may come: all at once, or one owner at a time
GATHERS = (dict(transport="gather"), dict(transport="gather", memory=0))


def matrix(layout: str, **how) -> list[Attention]:
    options = product((False, True), (None, 0, 6), (False, True))
    heads = ((4, 4), (4, 2), (3, 1))
    return [
        Attention(
            29, layout, causal=causal, window=window, masked=masked, heads=heads[i % 3][0],
            key_heads=heads[i % 3][1], d_v=5, kernel=("eager", "sdpa")[i // 2 % 2], **how,
        )
        for i, (causal, window, masked) in enumerate(options)
    ]  # fmt: skip


@grid("layout, size, how", product(sorted(LAYOUTS), (1, 2, 3, 4, 7), GATHERS), always=16, drawn=6)
def test_gathered_keys_give_what_dense_attention_gives(layout, size, how):
    for case in matrix(layout, **how):
        check_in_threads(case, size)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_gathered_keys_over_processes(layout, size, pools):
    cases = [case for how in GATHERS for case in matrix(layout, **how)]
    check_in_processes(cases[size % 3 :: 3], pools(size))


def test_odd_lengths_and_single_precision_over_processes(pools):
    cases = [
        Attention(length, layout, causal=True, window=window, dtype=dtype, d_v=3, **how)
        for length, layout, window, dtype, how in product(
            (0, 1, 2, 3, 5, 31), sorted(LAYOUTS), (None, 2), (torch.float64, torch.float32), GATHERS
        )
    ]
    check_in_processes(cases[::5], pools(3))  # every value of every option: 5 is prime to all


@pytest.mark.parametrize("how", GATHERS, ids=["all", "one"])
@pytest.mark.parametrize(("queries", "keys"), CROSS)
def test_cross_attention_with_shards_of_any_lengths(queries, keys, how):
    for masked in (False, True):
        check_in_threads(cross(queries, keys, masked=masked, **how), 3)


@pytest.mark.parametrize("ulysses", [1, 2])
@pytest.mark.parametrize("how", GATHERS, ids=["all", "one"])
def test_a_batch_of_nothing(how, ulysses):
    check_in_threads(Attention(9, causal=True, batch=0, masked=False, ulysses=ulysses, **how), 4)


@settings(deadline=None, max_examples=40)
@given(
    st.builds(
        Attention,
        length=st.integers(0, 40),
        layout=st.sampled_from(sorted(LAYOUTS)),
        causal=st.booleans(),
        window=st.none() | st.integers(0, 45),
        masked=st.booleans(),
        batch=st.integers(1, 2),
        d=st.integers(1, 9),
        d_v=st.integers(1, 9),
        transport=st.just("gather"),
        memory=st.none() | st.integers(0, 100_000),
        seed=st.integers(0, 3),
    ),
    st.integers(1, 9),
)
def test_any_length_any_ring_any_memory(case, size):
    check_in_threads(case, size)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_keys_pulled_from_shared_memory(layout):
    ways = (
        (2, 9, dict(own_low_priority=True)), (3, 1, dict(own_low_priority=True)),
        (4, 9, dict(by_copy_engine=True)),
        (4, 2, {}), (4, 9, dict(late=True, by_copy_engine=False)),
        (3, 9, dict(late=True, own_low_priority=True)),
        (2, 9, dict(together=True)), (4, 9, dict(together=True)),
        (2, 9, dict(own_apart=True)), (4, 9, dict(own_apart=True)),
    )  # fmt: skip
    few = [Attention(length, layout, causal=True, masked=True) for length in (0, 1, 3)]
    for number, (size, at_once, how) in enumerate(ways):
        for case in [*few, *matrix(layout)[number % 4 :: 4]]:
            check_symmetric(case, size, at_once, **how)
    samples = Attention(12, layout, causal=True, masked=True, ids=((0,) * 12, (0, 1) * 6))
    for how in (dict(together=True), dict(own_apart=True)):
        check_symmetric(samples, 4, 9, **how)  # which see differently
    for ulysses, length in ((2, 29), (4, 29), (2, 33)):  # 33: neighbours' longest differ
        case = Attention(length, layout, causal=True, masked=True, d=64, d_v=64, ulysses=ulysses)
        for how in ({}, dict(together=True), dict(own_apart=True)):
            check_symmetric(case, 4, 9, **how)


# --- messages ---


@pytest.mark.parametrize("how", GATHERS, ids=["all", "one"])
@pytest.mark.parametrize(
    ("layout", "causal", "window"),
    [
        ("zigzag", True, None), ("contiguous", True, None), ("striped", True, None),
        ("zigzag", False, None), ("contiguous", True, 5), ("contiguous", False, 9),
    ],
)  # fmt: skip
def test_only_keys_that_are_seen_are_sent_and_gradients_of_no_others(layout, causal, window, how):
    size = 4
    case = Attention(32, layout, causal=causal, window=window, d=8, d_v=8, **how)
    each = case.batch * case.key_heads * (case.d + case.d_v) * 8
    keys = sum(needed(case, size)) * each
    assert sum(forward_only(case, size).sent_bytes) == keys
    assert sum(sent for _, sent in hops(case, size)) == 3 * keys


def test_all_keys_come_in_one_exchange_and_gradients_go_home_in_one():
    for causal in (True, False):
        case = Attention(32, "zigzag", causal=causal, transport="gather")
        assert forward_only(case, 4).exchanges == [1] * 4
        assert [n for n, _ in hops(case, 4)] == [1 + 1 + 1] * 4


def test_nothing_is_exchanged_where_nothing_is_needed():
    for transport in TRANSPORTS:
        case = Attention(24, "contiguous", causal=True, window=0, transport=transport)
        assert hops(case, 3) == [(0, 0)] * 3
        assert hops(Attention(11, transport=transport), 1) == [(0, 0)]


def test_gradients_of_16_bits_travel_in_16_bits_and_are_summed_in_32():
    case = Attention(
        256, transport="gather", kernel="eager", dtype=torch.bfloat16, batch=1, d=16, d_v=16
    )
    forward = sum(forward_only(case, 8).sent_bytes)
    got, hub = threads.run(8, lambda ring: shard(case, ring))
    assert sum(hub.sent_bytes) == 3 * forward
    for rank, mine in enumerate(got):
        assert max(errors(case, rank, 8, mine, oracle(case)).values()) < 2**-7.5


@pytest.mark.parametrize(
    ("how", "at_once", "by_copy_engine"),
    [
        (dict(), 3, True),
        (dict(memory=0), 1, False),  # keys of a group go when the next but one comes
        (dict(ids=((0,) * 12, (0, 1) * 6)), 3, False),  # each sample's sums are read at once
    ],
    ids=["all", "one", "samples"],
)
def test_calls_go_side_by_side_where_keys_stay(how, at_once, by_copy_engine):
    """And a rank's own keys are known as that, in backward however they are divided."""
    case, size = Attention(12, "zigzag", causal=True, transport="gather", **how), 4

    def main(ring: threads.ThreadRing) -> None:
        (q, k, v), _, _, _ = case.data()
        at, _ = case.places(ring.rank, size)
        mine = [t[:, at] for t in (q, k, v)]
        plan = RingPlan.make(
            *mine, **case.options(), group=ring, layout=case.layout, transport="gather",
            memory=case.memory, **case.packed(at),
        )  # fmt: skip
        held = {*plan.positions().tolist()}
        for yields in (True, False):
            shared = over_shared_memory(
                plan, mine, ring, at_once, own_low_priority=yields and plan.chosen.concurrent
            )
            assert shared.schedule.own_low_priority == (yields and by_copy_engine)
            keys = plan.keys(*mine[1:])
            own = GradAccumulator(keys.k), GradAccumulator(keys.v)
            back = (block for block, _ in shared.transport.stream_back(keys, own))
            for block in chain(shared.transport.stream(keys), back):
                assert block.own == held.issuperset(segment_positions(block.segments).tolist())
                assert all(t.concurrent == by_copy_engine for _, t in shared.tiles(block.segments))

    threads.run(size, main)


def unseen_keys_have_no_gradient() -> None:
    """Nor is what was in memory before taken for one: of those that the last rank holds."""
    draw = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 12, 2, 4, generator=draw) for _ in range(4))

    def main(ring: threads.ThreadRing) -> list[int]:
        at = slice(4 * ring.rank, 4 * ring.rank + 4)
        mine = [t[:, at].clone().requires_grad_() for t in (q, k, v)]
        asked, held = torch.arange(4) + 2 * ring.rank, torch.arange(4) + 4 * ring.rank
        plan = RingPlan.make(
            *mine, causal=True, query_positions=asked, key_positions=held, cross=True, group=ring
        )
        plan = over_shared_memory(plan, mine, ring, 9, together=True)
        ring_attn(*mine, plan=plan).backward(dout[:, at])
        assert all(t.grad.isfinite().all() for t in mine)
        return [int(t.grad.count_nonzero()) for t in mine[1:]]

    empty = Tensor.new_empty

    def used(like: Tensor, *shape: Any, **how: Any) -> Tensor:
        return empty(like, *shape, **how).fill_(torch.nan)

    with mock.patch.object(Tensor, "new_empty", used):
        assert threads.run(3, main)[0] == [[32, 32], [32, 32], [0, 0]]


def test_unseen_keys_have_no_gradient():
    unseen_keys_have_no_gradient()


def alive() -> int:
    gc.collect()
    return sum(isinstance(o, Tensor) for o in gc.get_objects())


def repeated(transport: str, ulysses: int) -> tuple[int, int, bool]:
    """For a pool: live tensors after ten calls and after two hundred, and whether all agreed."""
    case = Attention(
        37, "zigzag", causal=True, masked=True, dtype=torch.float32, transport=transport,
        ulysses=ulysses, kernel="eager", bucket_size=64,
    )  # fmt: skip
    ring, (tensors, mask, dout, _) = Ring(), case.data()
    at, _ = case.places(ring.rank, ring.size)
    mine = [t[:, at].requires_grad_() for t in tensors]
    plan = RingPlan.make(
        *mine, causal=True, key_mask=mask[:, at], layout="zigzag", transport=transport,
        ulysses=ulysses, kernel="eager",
    )  # fmt: skip
    first, same, early = None, True, 0
    for i in range(60):
        out = ring_attn(*mine, plan=plan)
        got = [out.detach(), *torch.autograd.grad(out, mine, dout[:, at])]
        first = first or got
        same = same and all(torch.equal(a, b) for a, b in zip(first, got))
        if i == 10:
            early = alive()
    return early, alive(), same


@pytest.mark.parametrize(
    ("transport", "ulysses"), [("ring", 1), pytest.param("gather", 2, marks=pytest.mark.thorough)]
)
def test_sixty_calls_are_equal_in_every_bit_and_leave_nothing(transport, ulysses, pools):
    for early, late, same in pools(2 * ulysses).run(repeated, transport, ulysses):
        assert same
        assert late <= early


def batches_may_be_empty() -> None:
    for at_once, how in ((3, {}), (1, {}), (9, dict(together=True)), (9, dict(own_apart=True))):
        check_symmetric(Attention(13, "zigzag", causal=True, batch=0), 3, at_once, **how)


def test_batches_may_be_empty():
    batches_may_be_empty()
