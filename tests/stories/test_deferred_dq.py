"""Deferred dq is computed while gradients of keys travel, on every transport."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ring_attention_pytorch import RingPlan, explain_plan, observe, ring_attn
from ring_attention_pytorch.comm import transports
from ring_attention_pytorch.comm.fabric_kernels import OneStream
from ring_attention_pytorch.kernels import eager
from ring_attention_pytorch.plan import prepare
from ring_attention_pytorch.runtime import observe as observing
from ring_attention_pytorch.runtime.accumulate import Deferred, GradAccumulator
from ring_attention_pytorch.runtime.interfaces import Grads, KVBlock
from ring_attention_pytorch.schedule.steps import Part
from tests.support import threads
from tests.support.cases import Attention, check_in_threads, check_symmetric


def leave_dq(patch: pytest.MonkeyPatch) -> None:
    """Let the kernel "eager" make dk and dv first, and leave dq for later if it may."""
    whole = eager.backward

    def backward(saved: Any, keys: KVBlock, tiles: Any, terms: Any, grads: Grads) -> None:
        dq = GradAccumulator(saved.q)
        whole(saved, keys, tiles, terms, grads._replace(dq=dq))

        def rest() -> None:
            grads.dq.begin_update().add_(dq.begin_update())

        rest() if grads.dq.deferred is None else grads.dq.deferred.append(rest)

    patch.setattr(eager, "backward", backward)
    patch.setattr(
        eager, "CAN", eager.CAN._replace(traits=eager.CAN.traits._replace(keys_first=True))
    )


def what_is_left_is_in_the_gradients(patch: pytest.MonkeyPatch) -> None:
    """Over messages and shared memory, of one rank or several, of samples that differ."""
    leave_dq(patch)
    case = Attention(29, "zigzag", causal=True, masked=True, d_v=5, kernel="eager")
    differ = Attention(12, kernel="eager", ids=((0,) * 12, (3, 3, 0, 0) * 3))
    for how in (dict(), dict(transport="gather"), dict(transport="gather", memory=0)):
        for size in (1, 3):
            check_in_threads(replace(case, **how), size)
            check_in_threads(replace(differ, **how), size)
    for at_once, ways in ((9, {}), (1, {}), (9, dict(together=True)), (9, dict(own_apart=True))):
        check_symmetric(case, 3, at_once, **ways)


def test_what_is_left_is_in_the_gradients(monkeypatch):
    what_is_left_is_in_the_gradients(monkeypatch)


def nothing_is_left_where_parts_have_their_times(patch: pytest.MonkeyPatch) -> None:
    """An observed call, whose parts have their times, defers nothing."""
    leave_dq(patch)
    left: list[int] = []
    end = observing.Record.end

    def ended(record: observing.Record, part: Part) -> None:
        left.extend(map(len, seen))
        end(record, part)

    class Seen(Deferred):
        def __init__(self) -> None:
            seen.append(self)

    seen: list[Deferred] = []
    fabric = OneStream(SimpleNamespace(rank=0), None, (0,), arranged=(None,), overlap=True)
    program, beside = SimpleNamespace(blocks=(None,)), []
    for record in (None, "a record"):
        patch.setattr(observing.observed, "record", record)
        beside.append(fabric.channel_type(fabric, program, None, None).overlap)
    assert beside == [True, False]
    patch.setattr(observing.observed, "record", None)
    patch.setattr(observing.Record, "end", ended)
    patch.setattr("ring_attention_pytorch.attention.Deferred", Seen)
    q = torch.randn(1, 6, 2, 4, requires_grad=True)
    with observe():
        ring_attn(q, q, q, kernel="eager").sum().backward()
    assert left == [0]


def test_nothing_is_left_where_parts_have_their_times(monkeypatch):
    nothing_is_left_where_parts_have_their_times(monkeypatch)


def plans_tell_transports(patch: pytest.MonkeyPatch) -> None:
    """Plans choose transports that defer dq, with the kernel of few tokens too, and say so."""

    def main(ring: threads.ThreadRing) -> list[tuple[bool, set[bool]]]:
        q, found = torch.empty(2, 16, 2, 4), []
        differ = torch.tensor([[0] * 16, [1] * 8 + [2] * 8])
        for kernel, documents in (("eager", None), ("sdpa", None), ("eager", differ)):
            plan = RingPlan.make(
                q, q, q, causal=True, layout="zigzag", group=ring, kernel=kernel,
                transport="gather", documents=documents,
            )  # fmt: skip
            assert isinstance(plan.transport.fabric, OneStream)
            ways = (plan, plan.by(plan.chosen.overlapping_transport))
            said = {"while those of queries are computed" in explain_plan(way) for way in ways}
            found.append((plan.transport.fabric.overlap, said))
        return found

    leave_dq(patch)
    patch.setattr(transports, "shared_by", threads.shared_by)
    patch.setattr(prepare, "launches_decide", lambda *_: False)
    want = [(True, {True}), (False, {False}), (True, {True})]
    assert threads.run(2, main)[0] == [want] * 2


def test_plans_tell_transports(monkeypatch):
    plans_tell_transports(monkeypatch)
