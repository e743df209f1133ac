"""Every transport gives the same results by the messages that it should take, and no more."""

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from itertools import chain, product, zip_longest
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ring_attention_pytorch.comm import fabric_copies, symmetric_memory, transports
from ring_attention_pytorch.comm.fabric_copies import CopyChannel, CopyEngines
from ring_attention_pytorch.comm.fabric_kernels import OneStream
from ring_attention_pytorch.comm.fabric_messages import Messages
from ring_attention_pytorch.comm.gather import Gather
from ring_attention_pytorch.comm.messages import Form
from ring_attention_pytorch.comm.transports import (
    TRANSPORTS,
    fabric_among,
    make_transport,
    owners_at_once,
)
from ring_attention_pytorch.functional import ring_attn
from ring_attention_pytorch.geometry.documents import of_borders
from ring_attention_pytorch.geometry.layouts import (
    LAYOUTS,
    Segment,
    all_segments,
    count,
    positions,
    segment_positions,
)
from ring_attention_pytorch.geometry.segments import slice_segments
from ring_attention_pytorch.geometry.tiles import Mask, tiles
from ring_attention_pytorch.kernels import SelectedKernel, choose
from ring_attention_pytorch.plan import plan_cache, prepare, proposal
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime import streams
from ring_attention_pytorch.runtime.accumulate import GradAccumulator
from ring_attention_pytorch.runtime.interfaces import KernelRequest, KVBlock, Traits
from ring_attention_pytorch.runtime.replay import NEVER
from ring_attention_pytorch.schedule import policy
from ring_attention_pytorch.schedule.hardware import H200
from ring_attention_pytorch.schedule.pieces import (
    KVShape,
    Workload,
    in_two_stages,
    joined,
    schedule,
    tokens,
)
from ring_attention_pytorch.schedule.policy import keys_arrive_late, reduce_by_copy_engine
from tests.attention.test_ring_attention import CROSS, Live, cross, forward_only, hops
from tests.support import threads
from tests.support.cases import (
    Attention,
    check_in_processes,
    check_in_threads,
    check_symmetric,
    errors,
    miscounted,
    oracle,
    over_shared_memory,
    shard,
)

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


@pytest.mark.parametrize("how", GATHERS, ids=["all", "one"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_gathered_keys_give_what_dense_attention_gives(layout, size, how):
    for case in matrix(layout, **how):
        check_in_threads(case, size)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_gathered_keys_over_processes(layout, size, pools):
    check_in_processes([case for how in GATHERS for case in matrix(layout, **how)], pools(size))


def test_odd_lengths_and_single_precision_over_processes(pools):
    cases = [
        Attention(length, layout, causal=True, window=window, dtype=dtype, d_v=3, **how)
        for length, layout, window, dtype, how in product(
            (0, 1, 2, 3, 5, 31), sorted(LAYOUTS), (None, 2), (torch.float64, torch.float32), GATHERS
        )
    ]
    check_in_processes(cases, pools(3))


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
    for size, at_once, how in (
        (2, 9, dict(own_low_priority=True)), (3, 1, dict(own_low_priority=True)),
        (4, 9, dict(by_copy_engine=True)),
        (4, 2, {}), (4, 9, dict(late=True, by_copy_engine=False)),
        (3, 9, dict(late=True, own_low_priority=True)),
        (2, 9, dict(together=True)), (4, 9, dict(together=True)),
        (2, 9, dict(own_apart=True)), (4, 9, dict(own_apart=True)),
    ):  # fmt: skip
        few = [Attention(length, layout, causal=True, masked=True) for length in (0, 1, 3)]
        for case in [*few, *matrix(layout)[::2]]:
            check_symmetric(case, size, at_once, **how)
    samples = Attention(12, layout, causal=True, masked=True, ids=((0,) * 12, (0, 1) * 6))
    for how in (dict(together=True), dict(own_apart=True)):
        check_symmetric(samples, 4, 9, **how)  # which see differently
    for ulysses, length in ((2, 29), (4, 29), (2, 33)):  # 33: neighbours' longest differ
        case = Attention(length, layout, causal=True, masked=True, d=64, d_v=64, ulysses=ulysses)
        for how in ({}, dict(together=True), dict(own_apart=True)):
            check_symmetric(case, 4, 9, **how)


@pytest.mark.parametrize(
    ("at_once", "ulysses", "how"),
    [
        (1, 1, {}), (3, 1, {}), (3, 1, dict(late=True, own_low_priority=True)), (1, 2, {}),
        (3, 1, dict(together=True)), (3, 2, dict(together=True)),
        (3, 1, dict(own_apart=True)), (3, 2, dict(own_apart=True)),
    ],
)  # fmt: skip
def test_shared_memory_is_written_anew_when_all_have_read_it(at_once, ulysses, how):
    """Calls follow one another in any order, and one rank reads late."""
    size, case = 4, Attention(32, "zigzag", causal=True)
    read, join = threads.ThreadBuffer.of, threads.ThreadBuffer.join

    def late(buffer: threads.ThreadBuffer, rank: int, *what: object) -> list[Tensor]:
        if buffer.rank == 2 and rank != 2:
            time.sleep(0.03)
        return read(buffer, rank, *what)

    def join_late(buffer: threads.ThreadBuffer, end: int) -> None:
        if buffer.rank == 2:
            time.sleep(0.03)
        join(buffer, end)

    def main(ring: Ring) -> bool:
        (q, k, v), _, dout, _ = case.data()
        at, _ = case.places(ring.rank, size)
        layers = [[(t[:, at] * i).requires_grad_() for t in (q, k, v)] for i in (1, 2, 3)]
        sent = RingPlan.make(*layers[0], causal=True, layout="zigzag", group=ring, ulysses=ulysses)
        shared = over_shared_memory(sent, layers[0], ring, at_once, **how)

        def step(plan: RingPlan) -> list[Tensor]:
            outs = [ring_attn(*mine, plan=plan) for mine in layers]
            grads = [torch.autograd.grad(out, mine, dout[:, at]) for out, mine in zip(outs, layers)]
            return [*outs, *chain(*grads), ring_attn(*layers[1], plan=plan)]

        return all(map(torch.allclose, step(sent), step(shared)))

    with (
        mock.patch.object(threads.ThreadBuffer, "of", late),
        mock.patch.object(threads.ThreadBuffer, "join", join_late),
        threads.late(),
    ):
        assert all(threads.run(size, main)[0])


class Noted(threads.ThreadBuffer):
    """A shelf that notes how far its stream was told to come, and to which end it was joined."""

    def __init__(self, *how: Any) -> None:
        super().__init__(*how)
        self.marks, self.waited, self.unread = 0, [], 0

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    def join(self, end: int) -> None:
        self.waited.append(end)

    def publish(self) -> None:
        self.unread += self.waited != list(range(1, self.marks + 1))
        super().publish()


def noted(
    monkeypatch: pytest.MonkeyPatch, at_once: int, late: bool, visit: Callable[..., None]
) -> None:
    """Visit a gather over such shelves on each of four ranks."""
    case = Attention(32, "zigzag", causal=True, dtype=torch.bfloat16)

    def main(ring: threads.ThreadRing) -> None:
        (q, k, v), _, _, _ = case.data()
        at, _ = case.places(ring.rank, ring.size)
        mine = [t[:, at] for t in (q, k, v)]
        plan = RingPlan.make(*mine, **case.options(), group=ring, layout="zigzag")
        plan = over_shared_memory(plan, mine, ring, at_once, late=late, own_low_priority=late)
        visit(plan.transport, plan.keys(*mine[1:]))

    monkeypatch.setattr(threads, "ThreadBuffer", Noted)
    threads.run(4, main)


def gone_through(
    transport: Gather, keys: KVBlock, wide: bool = False
) -> tuple[GradAccumulator, GradAccumulator]:
    """Sums of own gradients, when all of backward has brought something, or is still away."""
    own = GradAccumulator(keys.k), GradAccumulator(keys.v)
    for total in own if wide else ():
        total.begin_update()
    for block, sums in transport.stream_back(keys, own):
        for total in sums:
            total.add(slice(0, block.k.shape[1]), torch.zeros_like(block.k))
    return own


@pytest.mark.parametrize("late", [False, True])
def test_calls_wait_for_the_keys_of_their_own_stage(monkeypatch, late):
    def visit(transport: Gather, keys: KVBlock) -> None:
        waited = transport.fabric.space.keys.waited
        came = [[*waited] for _ in transport.stream(keys)]
        assert came == ([[], [1], [1, 2]] if late else [[], [1]])
        gone_through(transport, keys)
        assert waited[len(came[-1]) :] == [3 if late else 2]  # all at once

    noted(monkeypatch, 9, late, visit)


def test_gradients_are_made_where_their_owners_read_them(monkeypatch):
    def visit(transport: Gather, keys: KVBlock) -> None:
        own = GradAccumulator(keys.k), GradAccumulator(keys.v)
        for block, sums in transport.stream_back(keys, own):
            whole = slice(0, block.k.shape[1])
            if not block.own:
                place, grads = sums[0].alloc(whole), transport.fabric.space.grads
                at = grads.hub.buffers["grads", grads.rank][grads.slot]
                assert place.data_ptr() == at.data_ptr()

    noted(monkeypatch, 9, False, visit)


def test_rooms_are_there_before_the_stream_follows_that_fills_them(monkeypatch):
    """For PyTorch may fill new memory itself, on the stream that computes."""
    shares = CopyChannel.shares

    def told(call: CopyChannel, *how: Any) -> list:
        call.space.grads.told_of.append("rooms")
        return shares(call, *how)

    def visit(transport: Gather, keys: KVBlock) -> None:
        grads = transport.fabric.space.grads
        grads.told_of, grads.follow = [], lambda: grads.told_of.append("follow")
        gone_through(transport, keys)
        assert grads.told_of == ["rooms", "follow"]

    monkeypatch.setattr(CopyChannel, "shares", told)
    noted(monkeypatch, 9, True, visit)


# of zigzag's causal chunks, 32 and 8 heads of size 128: ranks, tokens of each, whether own keys are
# overtaken, and whether enough is left to compute on meanwhile
ASIDE = [
    (4, 8192, False, False), (4, 2048, True, False), (4, 4096, True, True),
    (8, 4096, True, False), (8, 8192, True, True), (2, 1024, True, True),
]  # fmt: skip


@pytest.mark.parametrize(("size", "tokens", "own_low_priority", "by_copy_engine"), ASIDE)
def test_gradients_come_aside_where_that_is_hidden(size, tokens, own_low_priority, by_copy_engine):
    held = all_segments("zigzag", size, size * tokens)
    blocks = Workload(held, held, Mask(causal=True))
    job, groups = KVShape(1, 32, 8, 128, 128, itemsize=2), schedule(blocks, size)
    assert reduce_by_copy_engine(blocks, groups, job, H200, own_low_priority) == by_copy_engine
    one_by_one = schedule(blocks, 1)
    assert reduce_by_copy_engine(blocks, one_by_one, job, H200, False) == (size > 2)


class Place(Ring):
    """A rank of a ring that sends nothing."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size


@pytest.mark.parametrize("size", range(2, 10))
@pytest.mark.parametrize(("layout", "causal"), [*product(("zigzag", "contiguous"), (False, True))])
def test_no_two_ranks_pull_from_one_at_a_time(size, layout, causal):
    held = all_segments(layout, size, 8 * size)
    work, by_rank = Workload(held, held, Mask(causal)), []
    (group,) = schedule(work, size)
    for rank in range(size):
        ranks = tuple(range(size))
        (sources,) = CopyEngines(Place(rank, size), None, ranks)._sources(work, group)
        assert {m[0].stop - m[0].start for s in sources for m in s.moves} <= {4, 8}
        by_rank.append([s.rank for s in sources for _ in s.moves])
    for asked in zip_longest(*by_rank):
        readers = [owner for owner in asked if owner is not None]
        assert len(readers) == len({*readers})


@pytest.mark.parametrize("wide", [False, True])
def test_dq_waits_for_no_gradients_that_come_home(monkeypatch, wide):
    """Which dk and dv wait for, be there running sums or not."""

    def visit(transport: Gather, keys: KVBlock) -> None:
        own, waited = gone_through(transport, keys, wide), transport.fabric.space.grads.waited
        for i, total in enumerate(own):
            assert waited == [1] * i
            total.finalize()
        assert waited == [1, 1]

    noted(monkeypatch, 9, False, visit)


def test_a_turn_of_several_says_that_the_last_one_was_read(monkeypatch):
    def visit(transport: Gather, keys: KVBlock) -> None:
        for _ in transport.stream(keys):
            pass
        gone_through(transport, keys)
        space = transport.fabric.space
        assert (space.keys.marks, space.grads.marks) == (6, 3)
        assert not space.keys.unread
        assert not space.grads.unread

    noted(monkeypatch, 1, False, visit)


LATE = [
    (8 * 2048, True, {}),
    (8 * 16384, False, {}),
    (8 * 2048, False, dict(at_once=2)),  # groups come one after another
    (8 * 2048, False, dict(window=4096)),
    (8 * 2048, False, dict(prefix=700)),  # tiles are large in the order of positions alone
    (8 * 2048, False, dict(keys=((Segment(0, 1, 8 * 2048),), *[()] * 7))),  # some have none
]


@pytest.mark.parametrize(("tokens", "late", "otherwise"), LATE)
def test_few_tokens_of_many_ranks_come_late(tokens, late, otherwise):
    everyone = all_segments("zigzag", 8, tokens)
    causal, seen = "keys" not in otherwise, {"window", "prefix"} & {*otherwise}
    visible = Mask(causal, **{name: otherwise[name] for name in seen})
    blocks = Workload(everyone, otherwise.get("keys", everyone), visible)
    job = KVShape(1, 32, 8, 128, 128, itemsize=2)
    assert keys_arrive_late(blocks, otherwise.get("at_once", 7), job, H200) == late


# --- messages ---


def needed(case: Attention, size: int) -> list[int]:
    """How many keys of others each rank can see, counted pair by pair."""
    places = [case.places(rank, size)[0] for rank in range(size)]
    far = case.length if case.window is None else case.window

    def seen(rank: int, owner: int) -> int:
        behind = places[rank][:, None] - places[owner]
        visible = (behind <= far) & (behind >= (0 if case.causal else -far))
        return int(visible.any(0).sum())

    return [sum(seen(r, o) for o in range(size) if o != r) for r in range(size)]


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


def test_a_hop_of_the_ring_is_one_message(pools):
    for forward, both in pools(3).run(messages_of_each_exchange, "ring"):
        assert forward == [2, 2]  # one out, one in
        assert both == [2, 2, 2, 2]


def messages_of_each_exchange(transport: str) -> tuple[list[int], list[int]]:
    """For a pool: operations of each batch, forward and backward."""
    case, ring = Attention(32, masked=True, transport=transport), Ring()
    (q, k, v), mask, dout, _ = case.data()
    at, _ = case.places(ring.rank, ring.size)
    mine = [t[:, at].requires_grad_() for t in (q, k, v)]
    with mock.patch.object(dist, "batch_isend_irecv", side_effect=dist.batch_isend_irecv) as sent:
        out = ring_attn(*mine, key_mask=mask[:, at], transport=transport)
        forward = [len(call.args[0]) for call in sent.call_args_list]
        torch.autograd.grad(out, mine, dout[:, at])
        both = [len(call.args[0]) for call in sent.call_args_list]
    return forward, both[len(forward) :]


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.sampled_from([2, 4, 8]))
def test_a_message_holds_its_tensors(lengths, size):
    dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[size]
    tensors = [torch.randn(2, 3, n).to(dtype) for n in lengths] + [torch.rand(2, 3) < 0.5]
    form = Form.of(tensors, 3)
    message = form.pack(tensors, form.empty(torch.device("cpu")))
    assert message.numel() == form.nbytes
    for t, found in zip(tensors, form.open(message)):
        assert torch.equal(t, found)
        assert t.numel() == 0 or (found.data_ptr() - message.data_ptr()) % 16 == 0


# --- schedules ---


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
    groups = (in_two_stages(blocks),) if staged else schedule(blocks, at_once)
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
    (group,) = schedule(Workload(everyone, everyone, visible), at_once=size)
    for rank, mine in enumerate(everyone):
        keys = joined(group.pieces[rank])
        assert len(tiles(mine, keys, visible)) == (1 if rank in (0, size - 1) else 2)
        assert count(keys) == needed(Attention(16 * size, "zigzag", causal=True), size)[rank]


# --- memory ---


def most_bytes(case: Attention, size: int) -> int:
    """The most bytes of others' keys and gradients that any rank held at once, in backward."""
    tensors, _, _, _ = case.data()

    def main(ring: Ring) -> int:
        at, _ = case.places(ring.rank, size)
        q, k, v = (t[:, at] for t in tensors)
        plan = RingPlan.make(
            q, k, v, causal=case.causal, layout=case.layout, group=ring,
            transport=case.transport, memory=case.memory,
        )  # fmt: skip
        own = GradAccumulator(k), GradAccumulator(v)
        held = [total.begin_update() for total in own]
        with Live() as live:
            for _, of_keys in plan.transport.stream_back(plan.keys(k, v), own):
                for total in of_keys:
                    total.begin_update()
        assert all(total.begin_update() is memory for total, memory in zip(own, held))
        return live.most

    return max(threads.run(size, main)[0])


@pytest.mark.parametrize(("layout", "window"), [("contiguous", 4), ("zigzag", None), ("zigzag", 4)])
def test_own_keys_are_one_part_backward(layout, window):
    size, case = 4, Attention(64, layout, causal=True, window=window, transport="gather")
    everyone = all_segments(layout, size, case.length)
    blocks = Workload(everyone, everyone, Mask(True, window))
    for place, own in enumerate(everyone):
        ring = SimpleNamespace(rank=place, size=size)
        transport = Gather.make(ring, blocks, at_once=size)
        assert next(iter(transport.schedule.positions(True, place))) == own
    check_in_threads(case, size)
    check_symmetric(case, size, size)


@pytest.mark.parametrize(("masked", "copies"), [(False, 18), (True, 36)])
def test_keys_and_values_of_a_piece_come_by_one_copy(masked, copies, monkeypatch):
    """And the mask by another, for each takes some time to begin.

    Of their eight chunks the four ranks need 6, 5, 4 and 3 of one another.
    """
    case, size, copied = Attention(64, "zigzag", causal=True, transport="gather"), 4, []

    def main(ring: threads.ThreadRing) -> None:
        (q, k, v), _, _, _ = case.data()
        at, _ = case.places(ring.rank, size)
        mine = [t[:, at] for t in (q, k, v)]
        mask = torch.ones(mine[0].shape[:2], dtype=torch.bool) if masked else None
        plan = RingPlan.make(*mine, causal=True, layout="zigzag", key_mask=mask, group=ring)
        ring_attn(*mine, plan=over_shared_memory(plan, mine, ring, size))

    monkeypatch.setattr(fabric_copies, "_copy", lambda place, t: copied.append(place.copy_(t)))
    threads.run(size, main)
    assert len(copied) == copies


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


FEW = [
    (dict(causal=True), 32),
    (dict(), 64),
    (dict(causal=True, window=7), 8),
    (dict(window=7), 15),
    (dict(causal=True, cu_seqlens=[0, 16, 32, 48, 64]), 8.5),
]


@pytest.mark.parametrize(("shown", "most"), FEW)
def test_few_tokens_come_together(shown, most, monkeypatch):
    """Of 64, each sees so many at most. In CUDA graphs nothing is launched one by one."""

    def main(ring: threads.ThreadRing) -> list[tuple[type | None, type]]:
        q = torch.empty(1, 16, 2, 4)
        plan = RingPlan.make(q, q, q, **shown, layout="zigzag", group=ring)
        made = [
            transports.make_transport(
                "gather", ring, plan.blocks, at_once, plan.chosen.shape, q.device
            )
            for at_once in (9, 1)
        ]
        few = (
            transports.make_one_stream(each, plan.blocks, plan.chosen.shape, q.device, machine)
            for each in made
        )
        return [
            (spares and type(spares.fabric), type(each.fabric)) for spares, each in zip(few, made)
        ]

    monkeypatch.setattr(transports, "shared_by", threads.shared_by)
    job = KVShape(1, 2, 2, 4, 4, itemsize=4)
    flops, copied = 16 * most * job.pair_flops, 16 * job.token_bytes
    of_both = 1 / H200.forward + 2.5 / H200.backward
    few, many = (OneStream, CopyEngines), (None, CopyEngines)
    for *bounds, found in (
        (flops, copied, few), (flops - 1, copied, many), (flops, copied - 1, many)
    ):  # fmt: skip
        machine = H200._replace(
            host=(bounds[0] + 0.5) * of_both, memory=(bounds[1] + 0.5) / policy._SOON_COPIED
        )
        assert threads.run(4, main)[0] == [[found, many]] * 4


def few_tokens_get_the_kernel_that_is_launched_least(patch: pytest.MonkeyPatch) -> None:
    """Unless one is named, or other masks take as few calls of any, or there is much to compute."""

    def main(ring: threads.ThreadRing) -> list[str]:
        q, one = torch.empty(2, 16, 2, 4), torch.empty(1, 16, 2, 4)
        plan_cache.forget()
        how = dict(layout="zigzag", group=ring, transport="gather")
        borders, each_sample_s = [0, 16, 64], torch.arange(2).mul(16).add(16)[:, None]
        numbers = (
            positions("zigzag", rank=ring.rank, ring_size=4, length=64) >= each_sample_s
        ).int()
        shown = (
            (q, dict()), (q, dict(kernel="sdpa")), (q, dict(causal=False)),
            (one, dict(cu_seqlens=borders)), (q, dict(documents=numbers)),
        )  # fmt: skip
        plans = [RingPlan.make(t, t, t, **dict(causal=True) | how | each) for t, each in shown]
        assert {type(plan.transport.fabric) for plan in plans} == {OneStream}
        return [plan.kernel.name for plan in plans]

    patch.setattr(transports, "shared_by", threads.shared_by)
    patch.setattr(proposal, "fewest_launches", lambda case: choose("eager", case))
    job = KVShape(2, 2, 2, 4, 4, itemsize=4)
    seconds = 16 * 32 * job.pair_flops * (1 / H200.forward + 2.5 / H200.backward)
    for launches, found in ((2.01, "eager"), (1.01, "eager"), (0.99, "sdpa")):
        patch.setattr(policy, "_CALLS", launches * seconds / H200.launch)
        assert threads.run(4, main)[0] == [[found] + 4 * ["sdpa"]] * 4


def test_few_tokens_get_the_kernel_that_is_launched_least(monkeypatch):
    few_tokens_get_the_kernel_that_is_launched_least(monkeypatch)


def short_documents_get_a_kernel_of_their_own(patch: pytest.MonkeyPatch) -> None:
    """Unless one is named, documents are long, or query heads share no keys; on one rank, too."""

    def short(case: KernelRequest) -> SelectedKernel:
        return choose("eager", case)._replace(name="short", traits=Traits(fuses_merge=True))

    def main(ring: threads.ThreadRing) -> list[tuple[str, bool]]:
        q, k = torch.empty(2, 1024, 4, 8), torch.empty(2, 1024, 2, 8)
        total, place = 1024 * ring.size, slice(1024 * ring.rank, 1024 * (ring.rank + 1))
        few, many = (dict(cu_seqlens=range(0, total + 1, n)) for n in (512, 1024))
        halves, thirds = (torch.arange(total) // n for n in (512, 400))
        differ = dict(documents=torch.stack((halves, thirds))[:, place])
        shown = (
            (k, few), (k, differ), (k, few | dict(kernel="sdpa")),
            (k, few | dict(causal=False)), (k, many), (k, many | dict(window=10)), (q, few),
        )  # fmt: skip
        plans = [
            RingPlan.make(q, t, t, group=ring, **dict(causal=True) | options)
            for t, options in shown
        ]
        return [(plan.kernel.name, plan.chosen.machine.one_call) for plan in plans]

    patch.setattr(proposal, "for_short_documents", short)
    found = [("short", True)] * 2 + [("sdpa", False)] * 5
    for size in (1, 2):
        assert threads.run(size, main)[0] == [found] * size


def test_short_documents_get_a_kernel_of_their_own(monkeypatch):
    short_documents_get_a_kernel_of_their_own(monkeypatch)


@pytest.mark.parametrize(("launch", "few"), [(1.0, 120), (2.0, 240), (9.0, 240)])
def test_a_host_that_was_busy_counts_as_twice_as_slow_at_most(launch, few):
    """Else what was measured once would give many tokens the kernel of few."""
    two = all_segments("zigzag", 2, 4096)
    work, machine = (
        Workload(two, two, Mask(causal=True)),
        H200._replace(launch=launch * H200.launch),
    )
    job = KVShape(1, 32, 8, 128, 128, itemsize=2)
    seconds = policy._seconds(work, job, machine)
    for times, found in ((1.01, True), (0.99, False)):
        slower = times * few * H200.launch / seconds
        speeds = dict(forward=machine.forward / slower, backward=machine.backward / slower)
        assert policy.launches_decide(work, job, machine._replace(**speeds)) != found


def test_of_many_tables_the_one_asked_for_longest_ago_is_given_up(monkeypatch):
    monkeypatch.setattr(symmetric_memory, "_KEPT", 2)
    monkeypatch.setattr(symmetric_memory, "capturing", lambda device: False)
    buffer = SimpleNamespace(device=torch.device("cpu"), tables={}, read_by_graphs=set())
    made = []

    def asked(kind: str) -> None:
        def make() -> SimpleNamespace:
            made.append(kind)
            return SimpleNamespace(table=torch.zeros(1))

        symmetric_memory.SymmetricBuffer.table(buffer, kind, make)

    for kind in ("a", "b", "a", "c", "a", "b"):
        asked(kind)
    assert made == ["a", "b", "c", "b"]


def plans_know_their_own_transport() -> None:
    """How often it has the kernel called, and whether calls may overlap, whoever asked before."""

    def main(ring: threads.ThreadRing) -> list:
        q = torch.randn(1, 8, 2, 4)
        plan = RingPlan.make(q, q, q, causal=True, layout="contiguous", group=ring)
        many, few = (
            over_shared_memory(plan, [q] * 3, ring, 9, **how) for how in ({}, dict(together=True))
        )
        found = []
        for first, second in ((many, few), (few, many)):
            plans = [first.by(first.transport), first.by(first.transport).by(second.transport)]
            found.append([
                [p.calls(back) for back in (False, True)]
                + [p.tiles(p.blocks.keys[ring.rank])[0][1].concurrent]
                for p in plans
            ])  # fmt: skip
        assert found[0] == found[1][::-1]
        return found[0]

    own_alone, both = threads.run(2, main)[0]
    assert own_alone == [[1, 1, True], [1, 1, False]]
    assert both == [[2, 2, True], [1, 1, False]]


def test_plans_know_their_own_transport():
    plans_know_their_own_transport()


def few_may_be_short(patch: pytest.MonkeyPatch) -> None:
    """By the transport of their graphs, if not by their own."""
    q = torch.randn(1, 8, 2, 4)
    patch.setattr(policy, "_SMALL", -1)
    for own_low_priority in (False, True):
        plan_cache.forget()
        fabric = SimpleNamespace(ring=Ring.alone(), replay=NEVER)
        few, made = (
            SimpleNamespace(schedule=SimpleNamespace(own_low_priority=on), fabric=fabric)
            for on in (False, own_low_priority)
        )
        patch.setattr(prepare, "make_transport", lambda *_, made=made: made)
        patch.setattr(prepare, "make_one_stream", lambda *_, few=few: few)
        assert RingPlan.make(q, q, q, causal=True).chosen.concurrent == own_low_priority


def test_few_may_be_short(monkeypatch):
    few_may_be_short(monkeypatch)


def test_long_calls_go_one_after_another(monkeypatch):
    long = [torch.randn(1, 8, 2, 4) for _ in range(3)]
    for most, short in ((2 * 64 * 2 * 8, True), (2 * 64 * 2 * 8 - 1, False)):
        plan_cache.forget()
        monkeypatch.setattr(policy, "_SMALL", (most + 0.5) / (H200.call * H200.forward))
        assert RingPlan.make(*long, causal=True).chosen.concurrent == short
    held = ((Segment(0, 1, 8),),)
    blocks, job = Workload(held, held, Mask(causal=True)), KVShape(1, 2, 2, 4, 4, itemsize=4)
    enough = (64 * job.pair_flops + 0.5) / (H200.call * H200.forward)
    monkeypatch.setattr(policy, "_SMALL_UNDIVIDED", enough)
    assert not policy.is_small(blocks, job, H200)
    assert policy.is_small(blocks, job, H200, undivided=True)


@pytest.mark.parametrize("transport", ["ring", "gather"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_plan_knows_how_often_its_kernel_is_called(transport, size):
    """So that a kernel which merges by itself rounds in the last call, and not before."""
    memory = 0 if transport == "gather" else None
    for case in (
        Attention(29, "zigzag", causal=True),
        Attention(29, "zigzag", causal=True, memory=memory),
        Attention(29, "contiguous", causal=True, window=3),
        Attention(2, "striped", causal=True),
        Attention(24, ids=((0,) * 6 + (1,) * 13 + (2,) * 5,), causal=True),
    ):
        assert not miscounted(replace(case, transport=transport), size)


def test_ranks_of_one_machine_gather_and_swap_out_of_shared_memory(monkeypatch):
    """As those of GPUs are put together; what they share is stood in for."""

    class Group:
        """What a space is kept for."""

    wanted, group = [], Group()
    space = SimpleNamespace(reserve=lambda group, **room: wanted.append({group, *room}))
    monkeypatch.setattr(symmetric_memory, "_spaces", {group: space})
    ring = SimpleNamespace(rank=1, size=2, shared=lambda: (group, (4, 6)))
    everyone, device = all_segments("zigzag", 2, 16), torch.device("cuda", 0)
    blocks, job = Workload(everyone, everyone, Mask()), KVShape(1, 2, 1, 2, 3, itemsize=2)
    gather = make_transport("gather", ring, blocks, 1, job, device).fabric
    assert isinstance(gather, CopyEngines)
    assert (gather.space, gather.ranks) == (space, (4, 6))
    swap = fabric_among(ring, 100, device)
    assert (swap.space, swap.ranks) == (space, (4, 6))
    assert wanted == [{group, "keys", "grads"}, {group, "swaps"}]
    for length, late in ((64, True), (1 << 22, False)):
        four = Workload(*[all_segments("zigzag", 4, length)] * 2, Mask(causal=True))
        among = SimpleNamespace(rank=1, size=4, shared=lambda: (group, range(4)))
        made = make_transport("gather", among, four, 3, job, device)
        assert (len(made.schedule.forward.blocks[1].stages) == 2) == late
    for other in (
        make_transport("gather", ring, blocks, 1, job, torch.device("cpu")),
        make_transport("ring", ring, blocks, 1, job, device),
    ):
        assert isinstance(other.fabric, Messages)
    assert isinstance(fabric_among(ring, 100, torch.device("cpu")), Messages)
    monkeypatch.setattr(symmetric_memory, "_spaces", {group: None})
    assert isinstance(fabric_among(ring, 100, device), Messages)


def test_both_halves_of_a_shelf_start_where_any_dtype_may(monkeypatch):
    def buffer(group: None, device: None, nbytes: int, meet: None, halves: int) -> SimpleNamespace:
        return SimpleNamespace(nbytes=nbytes, captured=False, memory=[None] * halves)

    monkeypatch.setattr(symmetric_memory, "SymmetricBuffer", buffer)
    monkeypatch.setattr(symmetric_memory, "timeout_of", lambda group: timedelta(seconds=1))
    monkeypatch.setattr(symmetric_memory, "allocate", lambda *_: (None, [], None))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    group = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    monkeypatch.setattr(symmetric_memory, "Ring", lambda group: Ring.alone())
    space = symmetric_memory.SymmetricWorkspace(group, torch.device("cpu"))
    space.reserve(None, keys=22_369_622, grads=5)
    assert space.keys.nbytes >= 22_369_622
    assert space.keys.nbytes % 512 == space.grads.nbytes % 512 == 0


def test_shelves_stay_whose_graphs_others_captured(monkeypatch):
    """Graphs of ours go with the memory, so nobody need keep that; nor what no graph has seen."""
    device = torch.device("cpu")

    def written() -> symmetric_memory.SymmetricBuffer:
        buffer = symmetric_memory.SymmetricBuffer.__new__(symmetric_memory.SymmetricBuffer)
        buffer.slot, buffer.device, buffer.captured, buffer.views = (
            0,
            device,
            False,
            {(0, 0, ()): []},
        )
        buffer.rank = 0
        buffer.local_view(())
        return buffer

    monkeypatch.setattr(streams, "capturing", lambda device: False)
    assert not written().captured
    monkeypatch.setattr(streams, "capturing", lambda device: True)
    assert written().captured
    with streams.passing_capture():
        assert not written().captured
    assert written().captured


def test_what_comes_but_once_is_not_kept():
    """Documents come and go with their batch: what they need is not kept for a thousand more."""
    everyone = all_segments("zigzag", 2, 12)
    halves = of_borders([0, 5, 12])
    for visible, apart in (
        (Mask(causal=True, window=3), ()),
        (Mask(causal=True, documents=halves), ()),
        (Mask(causal=True, prefix=3), ()),
        (Mask(causal=True), (Mask(causal=True), Mask(causal=True, documents=halves))),
    ):
        blocks = Workload(everyone, everyone, visible, apart)
        first, again = schedule(blocks, 1), schedule(blocks, 1)
        assert first == again
        assert (first is again) == (visible.window == 3)


@pytest.mark.parametrize("causal", [False, True])
def test_the_memory_of_a_gather_is_bounded_by_its_budget(causal):
    size, n, d = 8, 16, 64
    case = Attention(n * size, "zigzag", causal=causal, batch=1, d=d, d_v=d, transport="gather")
    shard_bytes, before = n * case.key_heads * 2 * d * 8, 0
    for at_once in (1, 2, 4):
        memory = shard_bytes * (5 + 7 * at_once)
        blocks = Workload(*[all_segments("zigzag", size, n * size)] * 2, Mask(causal))
        assert owners_at_once(memory, blocks, KVShape(1, 4, case.key_heads, d, d, 8)) == at_once
        taken = most_bytes(replace(case, memory=memory), size)
        assert before < taken <= memory
        before = taken
    assert before < most_bytes(case, size)


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
    for i in range(200):
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
def test_two_hundred_calls_are_equal_in_every_bit_and_leave_nothing(transport, ulysses, pools):
    for early, late, same in pools(2 * ulysses).run(repeated, transport, ulysses):
        assert same
        assert late <= early


# --- asking for one ---


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            dict(transport="pigeon"),
            r"transport must be None or one of 'ring', 'gather', got 'pigeo",
        ),
        (dict(memory=-1), "memory must be None or at least 0 bytes, got -1"),
        (dict(transport="ring", memory=5), r"always takes the least memory"),
    ],
)
def test_what_can_t_be_is_refused(options, said):
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(ValueError, match=said):
        ring_attn(q, q, q, **options)


@pytest.mark.parametrize("name", ["transport", "ulysses", "memory"])
def test_ranks_that_ask_for_different_ways_are_told(name):
    other = {"transport": "gather", "ulysses": 2, "memory": 100}[name]

    def main(ring: Ring) -> str:
        q = torch.randn(1, 4, 2, 8)
        with pytest.raises(ValueError, match=f"{name} must be the same on every rank") as error:
            ring_attn(q, q, q, group=ring, **({name: other} if ring.rank == 1 else {}))
        return str(error.value)

    said, hub = threads.run(2, main)
    assert len(set(said)) == 1
    assert hub.exchanges == [0, 0]


def batches_may_be_empty() -> None:
    for at_once, how in ((3, {}), (1, {}), (9, dict(together=True)), (9, dict(own_apart=True))):
        check_symmetric(Attention(13, "zigzag", causal=True, batch=0), 3, at_once, **how)


def test_batches_may_be_empty():
    batches_may_be_empty()
