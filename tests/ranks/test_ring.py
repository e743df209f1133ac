"""Rings: places in a group and in parts of a ring, and messages among them."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ring_attention_pytorch import RingCache, RingPlan, ring_attn
from ring_attention_pytorch.ranks import ring as ring_module
from ring_attention_pytorch.ranks.failures import RingError
from ring_attention_pytorch.ranks.ring import Ring, Steps, SubRing, as_ring
from tests.support import threads


def test_alone_it_hears_itself_and_nothing_is_waited_for():
    ring = Ring.alone()
    assert (ring.rank, ring.size, ring.ranks, ring.several) == (0, 1, [0], False)
    assert ring.gather_bytes(b"note", 4) == [b"note"]
    assert ring.gather_notes("subject", b"note") == [b"note"]
    assert ring.exchange([], []).wait() == []
    assert ring.shared() is None
    assert ring.exists
    assert ring.peers == []


def test_a_ring_is_of_the_size_that_it_has():
    ring = Ring.alone()
    assert as_ring(ring) is ring
    assert as_ring(ring, 1) is ring
    with pytest.raises(ValueError, match="ring_size=2 was given beside a ring of 1"):
        as_ring(ring, 2)


def places(ring: Ring) -> tuple[int, ...]:
    return ring.size, ring.rank, ring.first, *ring.ranks


def exchanged(ring: Ring) -> list[int]:
    """Ring once around: this rank and its number of the group, to the next place."""
    sent = torch.tensor([ring.rank, dist.get_rank()])
    behind, ahead = (ring.rank - 1) % ring.size, (ring.rank + 1) % ring.size
    (got,) = ring.exchange([(ahead, sent)], [(behind, torch.empty_like(sent))]).wait()
    return got.tolist()


def in_halves() -> tuple:
    ring = Ring(size=2)
    problem = Ring(size=3)
    total = torch.tensor(1.0 + dist.get_rank())
    ring.total(total)
    return (
        places(ring),
        exchanged(ring),
        ring.several,
        ring.shared(),
        total,
        problem.problem,
        problem.size,
    )


def test_a_group_is_several_rings_of_consecutive_ranks(pools):
    for rank, found in enumerate(pools(4).run(in_halves)):
        place, first = rank % 2, rank - rank % 2
        where, got, several, shared, total, problem, size = found
        assert where == (2, place, first, first, first + 1)
        assert got == [1 - place, first + 1 - place]
        assert several
        assert shared is None  # the other ring's ranks are elsewhere
        assert total == 1 + 2 + 3 + 4  # of the whole group
        assert problem == "ring_size must divide the group's 4 ranks, got 3"
        assert size == 4


def test_a_part_of_a_ring_sends_to_its_places_and_agrees_on_nothing():
    def main(whole):
        part = SubRing(whole, (2, 0) if whole.rank in (0, 2) else (1, 3))
        other = 1 - part.rank
        sent = torch.tensor([float(whole.rank)])
        (got,) = part.exchange([(other, sent)], [(other, torch.empty(1))]).wait()
        assert part.steps is whole.steps
        with pytest.raises(NotImplementedError, match="not a part of it"):
            part.gather_bytes(b"", 1)
        return part.rank, got.item()

    results, _ = threads.run(4, main)
    assert results == [(1, 2.0), (0, 3.0), (0, 0.0), (1, 1.0)]


def test_what_has_a_group_says_how_to_make_it_elsewhere_when_it_is_pickled() -> None:
    q = torch.randn(1, 6, 2, 4)
    plan, cache = RingPlan.make(q, q, q, causal=True), RingCache(1, 1, 4)
    for it in (plan.ring, plan, plan.for_layer(1), cache):
        with pytest.raises(TypeError, match=r"can't be pickled, .*make it anew"):
            pickle.dumps(it)
    assert copy.copy(plan.ring) is copy.deepcopy(plan).ring is plan.ring
    out = ring_attn(q, q, q, plan=copy.deepcopy(plan))
    assert out.equal(ring_attn(q, q, q, plan=copy.copy(plan)))


def test_gloo_is_not_given_tensors_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it would fail with a bad address."""
    ring, t = Ring(), SimpleNamespace(is_cuda=True)
    for config, gloo in (("cpu:gloo,cuda:gloo", True), ("cpu:gloo,cuda:nccl", False)):
        fresh = copy.copy(ring) if gloo else Ring()
        monkeypatch.setattr(dist, "get_backend_config", lambda _, config=config: config)
        assert fresh._gloo_for_gpus is gloo
        if gloo:
            with pytest.raises(ValueError, match="gloo can't send tensors of GPUs: make the group"):
                fresh.exchange([(0, t)], [])


def test_what_a_rank_says_of_its_devices_need_not_be_text(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = Ring()
    monkeypatch.setattr(ring_module, "exchange", lambda *_: [b"\0", b"out of step \xff\x1b[2J\0"])
    monkeypatch.setattr(ring.steps, "clear_failure", lambda _: None)
    with pytest.raises(RingError, match=r"1: out of step \ufffd\\x1b\[2J; the ring is whole"):
        ring.gather_notes("a call", b"")


def test_steps_that_differ_have_other_tags():
    def tags(*calls: tuple[str, int, int | None]) -> list[int]:
        steps, found = Steps(), []
        steps.notes += 1
        for call in calls:
            with steps.begin(*call):
                found += [steps.tag(), steps.tag()]
        return found

    forward, backward = ("forward", 1, None), ("backward", 1, 1)
    assert tags(forward, backward) == tags(forward, backward)
    every = tags(forward, backward, ("forward", 2, None), forward)
    assert len({*every}) == len(every)
    assert all(0 <= tag < 2**31 for tag in every)
    assert {*tags(forward)}.isdisjoint(tags(("forward", 2, None)) + tags(backward))
    assert {*tags(backward)}.isdisjoint(tags(("backward", 1, 2)))


def test_calls_that_derivatives_are_of_differ_after_an_agreement_too():
    steps = Steps()
    numbers = []
    for _ in range(2):
        steps.notes += 1
        for _ in range(2):
            with steps.begin("forward", 1, None):
                numbers.append(steps.number)
    assert len({*numbers}) == 4


def test_rings_of_a_group_count_calls_by_themselves_and_notes_together():
    met = [0]
    some, others, everyone = (Steps(met) for _ in range(3))
    for steps in (some, others):
        steps.notes += 1  # as each rank does once
    with some.begin("forward", 1, None):
        other = everyone.tag()
    met[0] += 1
    with some.begin("forward", 2, None), others.begin("forward", 2, None):
        assert some.tag() == others.tag()
    assert some.notes == everyone.notes == 3
    assert everyone.tag() != other
