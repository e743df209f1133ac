"""Choices by predicted times: what comes late, aside, or hidden behind other work."""

import pytest
import torch

from ring_attention_pytorch.geometry.documents import of_borders
from ring_attention_pytorch.geometry.layouts import Segment, all_segments
from ring_attention_pytorch.geometry.tiles import Mask
from ring_attention_pytorch.plan import plan_cache
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.schedule import policy
from ring_attention_pytorch.schedule.hardware import H200, hardware
from ring_attention_pytorch.schedule.pieces import KVShape, Workload, rounds_of
from ring_attention_pytorch.schedule.policy import (
    calls_of_documents_pay,
    keys_arrive_late,
    reduce_by_copy_engine,
)

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
    job, groups = KVShape(1, 32, 8, 128, 128, itemsize=2), rounds_of(blocks, size)
    assert reduce_by_copy_engine(blocks, groups, job, H200, own_low_priority) == by_copy_engine
    one_by_one = rounds_of(blocks, 1)
    assert reduce_by_copy_engine(blocks, one_by_one, job, H200, False) == (size > 2)


def test_calls_of_documents_are_considered_where_they_were_compared():
    """On H200s, if all samples have the same few documents."""
    one, job = ((Segment(0, 1, 32768),),), KVShape(1, 32, 8, 128, 128, itemsize=2)
    mask = Mask(causal=True, documents=of_borders([0, 16384, 32768]))
    work, slower = Workload(one, one, mask), hardware("triton")
    assert calls_of_documents_pay(work, job, H200, slower)
    assert not calls_of_documents_pay(work, job, H200._replace(device="H100"), slower)
    assert not calls_of_documents_pay(work, job, H200._replace(call=1.0), slower)
    assert not calls_of_documents_pay(work, job, H200, H200)
    for other in (work._replace(apart=(mask, mask)), work._replace(visible=Mask(causal=True))):
        assert not calls_of_documents_pay(other, job, H200, slower)


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


def test_launches_decide_up_to_the_seconds_of_120():
    two = all_segments("zigzag", 2, 4096)
    work, job = Workload(two, two, Mask(causal=True)), KVShape(1, 32, 8, 128, 128, itemsize=2)
    seconds = policy._seconds(work, job, H200)
    for times, decide in ((1.01, False), (0.99, True)):
        slower = times * 120 * H200.launch / seconds
        machine = H200._replace(forward=H200.forward / slower, backward=H200.backward / slower)
        assert policy.launches_decide(work, job, machine) == decide


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


JOB = KVShape(1, 32, 8, 128, 128, itemsize=2)
FIRST = H200._replace(keys_first=True)


def gradients_are_hidden_behind_dq() -> None:
    """So copy engines bring them."""
    four = all_segments("zigzag", 4, 4 * 8192)
    work = Workload(four, four, Mask(causal=True))
    for machine, hidden in ((H200, False), (FIRST, True)):
        assert policy.reduce_by_copy_engine(work, rounds_of(work, 4), JOB, machine, False) == hidden
    few = all_segments("zigzag", 4, 4 * 128)
    work = Workload(few, few, Mask(causal=True))
    assert not policy.reduce_by_copy_engine(work, rounds_of(work, 4), JOB, FIRST, False)


def test_gradients_are_hidden_behind_dq():
    gradients_are_hidden_behind_dq()
