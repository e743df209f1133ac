"""A gather's calls: which wait for which keys, and where gradients are made."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ring_attention_pytorch.comm.fabric_copies import CopyChannel
from ring_attention_pytorch.comm.gather import Gather
from ring_attention_pytorch.geometry.layouts import all_segments
from ring_attention_pytorch.geometry.tiles import Mask
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.runtime.accumulate import GradAccumulator
from ring_attention_pytorch.runtime.interfaces import KVBlock
from ring_attention_pytorch.schedule.pieces import Workload
from tests.support import threads
from tests.support.cases import Attention, check_in_threads, check_symmetric, over_shared_memory


class Noted(threads.ThreadBuffer):
    """A buffer that notes the marks of its side stream, and those that were joined."""

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
    """Run `visit` on a gather over such buffers, on each of four ranks."""
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
    shares = CopyChannel.peer_gradients

    def told(call: CopyChannel, *how: Any) -> list:
        call.space.grads.told_of.append("rooms")
        return shares(call, *how)

    def visit(transport: Gather, keys: KVBlock) -> None:
        grads = transport.fabric.space.grads
        grads.told_of, grads.side_stream_follows = [], lambda: grads.told_of.append("follow")
        gone_through(transport, keys)
        assert grads.told_of == ["rooms", "follow"]

    monkeypatch.setattr(CopyChannel, "peer_gradients", told)
    noted(monkeypatch, 9, True, visit)


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
