"""Ranks out of step: where one of them skips a call, or makes another, nobody goes on with wrong
numbers.

Messages match by tags over threads as they do over gloo; with NCCL they match by order alone.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from ring_attention_pytorch import RingPlan, ring_attn
from ring_attention_pytorch.ranks.failures import RingError
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.ranks.steps import Steps
from tests.support import threads
from tests.support.ranks import Pool
from tests.support.reference import dense_attention, relative_error

SIZE, OTHER = 4, 1  # ranks, and which of them does otherwise
Plans = tuple[RingPlan, RingPlan]


def shards(seed: int, rank: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(100 * seed + rank)
    return [torch.randn(1, 4, 2, 8, generator=draw).requires_grad_() for _ in range(3)]


def of(plan: RingPlan, seed: int) -> Callable[[], None]:
    """A layer: forward here and now, and backward when it is asked for; both are right."""
    mine, whole = shards(seed, plan.ring.rank), [shards(seed, rank) for rank in range(SIZE)]
    out = ring_attn(*mine, plan=plan)
    q, k, v = (torch.cat(t, dim=1) for t in zip(*whole))
    want, _ = dense_attention(q, k, v, causal=plan.visible.causal)
    own = whole[plan.ring.rank]
    check(plan, "out", out, want.chunk(SIZE, dim=1)[plan.ring.rank])

    def backward() -> None:
        grads = torch.autograd.grad(out.sum(), mine)
        for name, got, exact in zip("qkv", grads, torch.autograd.grad(want.sum(), own)):
            check(plan, f"d{name}", got, exact)

    return backward


def check(plan: RingPlan, name: str, got: Tensor, want: Tensor) -> None:
    assert relative_error(got, want) < 1e-5, f"wrong {name} on rank {plan.ring.rank}"


def skips_backward(ring: Ring, plans: Plans) -> None:
    backward = of(plans[0], 1)
    if ring.rank != OTHER:
        backward()
    of(plans[0], 2)()


def fails_in_forward_and_goes_on(ring: Ring, plans: Plans) -> None:
    """As where there is no memory, which is caught."""
    plan = plans[0]
    if ring.rank == OTHER:
        forward = plan.kernel.forward
        failing = plan.kernel._replace(forward=_no_memory)
        object.__setattr__(plan, "kernel", failing)
        with pytest.raises(MemoryError):
            of(plan, 1)
        object.__setattr__(plan, "kernel", failing._replace(forward=forward))
    else:
        of(plan, 1)
    of(plan, 2)


def _no_memory(*given: object) -> None:
    raise MemoryError


def recomputes_alone(ring: Ring, plans: Plans) -> None:
    """As checkpointing does, on one rank only."""
    backward = of(plans[0], 1)
    if ring.rank == OTHER:
        of(plans[0], 1)
    backward()


def calls_in_another_order(ring: Ring, plans: Plans) -> None:
    for plan in plans if ring.rank != OTHER else plans[::-1]:
        of(plan, 1)


def holds_another_plan(ring: Ring, plans: Plans) -> None:
    """Of the same shapes, but causal."""
    of(plans[ring.rank == OTHER], 1)()


EVENTS = {
    event.__name__: event
    for event in (
        skips_backward, fails_in_forward_and_goes_on, recomputes_alone, calls_in_another_order,
        holds_another_plan,
    )
}  # fmt: skip


def plans_of(ring: Ring, transport: str) -> Plans:
    q = torch.zeros(1, 4, 2, 8, requires_grad=True)
    first, second = (
        RingPlan.make(q, q, q, causal=causal, transport=transport, group=ring, kernel="eager")
        for causal in (False, True)
    )
    return first, second


@contextmanager
def little_patience() -> Iterator[None]:
    before, threads.PATIENCE = threads.PATIENCE, 1.0
    try:
        yield
    finally:
        threads.PATIENCE = before


@pytest.mark.parametrize("transport", ["ring", "gather"])
@pytest.mark.parametrize("event", EVENTS)
def test_a_rank_out_of_step_gets_nothing_that_is_not_for_it(event, transport):
    def main(ring: threads.ThreadRing) -> None:
        EVENTS[event](ring, plans_of(ring, transport))

    with (
        little_patience(),
        pytest.raises(
            (TimeoutError, RingError), match=r"a message (was )?never (taken|came)|MemoryError"
        ),
    ):
        threads.run(SIZE, main)


def over_gloo(event: str, transport: str) -> bool:
    """For a pool: whether this rank hears of it; where it does not, all that it has is right."""
    ring = Ring()
    plans = plans_of(ring, transport)
    try:
        EVENTS[event](ring, plans)
    except RuntimeError:
        return True
    return False


@pytest.mark.thorough
@pytest.mark.parametrize("transport", ["ring", "gather"])
@pytest.mark.parametrize("event", EVENTS)
def test_over_gloo_that_ends_with_the_timeout(event, transport):
    pool = Pool(SIZE, timeout=60.0, group_timeout=4.0)
    answers = pool.answers(over_gloo, event, transport)
    pool.stop()
    assert all(kind == "ok" for kind, _ in answers), answers
    assert any(heard for _, heard in answers), answers


def test_a_skipped_plan_is_an_error_at_once_and_then_all_go_on():
    """Where a plan is made for each call, and one rank leaves a layer out."""
    q = torch.zeros(1, 4, 2, 8)

    def main(ring: threads.ThreadRing) -> str:
        for _ in range(2):
            RingPlan.make(q, q, q, group=ring)
        if ring.rank == OTHER:
            ring.steps.notes -= 1  # as if it had left one out while the others had a third
        with pytest.raises(ValueError, match="out of step") as told:
            ring_attn(q, q, q, group=ring)
        assert ring_attn(q, q, q, group=ring).shape == q.shape
        return str(told.value)

    (told,) = {*threads.run(SIZE, main)[0]}
    assert "before this 2 on ranks 0, 2, 3, 1 on rank 1" in told


def test_steps_that_differ_have_other_tags():
    def tags(*calls: tuple[str, int]) -> list[int]:
        steps, found = Steps(), []
        steps.notes += 1
        for call in calls:
            with steps.begin(*call):
                found += [steps.tag(), steps.tag()]
        return found

    assert tags(("forward", 1), ("backward", 1)) == tags(("forward", 1), ("backward", 1))
    every = tags(("forward", 1), ("backward", 1), ("forward", 2), ("forward", 1))
    assert len({*every}) == len(every)
    assert {*tags(("forward", 1))}.isdisjoint(tags(("forward", 2)) + tags(("backward", 1)))
    assert all(0 <= tag < 2**31 for tag in every)


def test_rings_of_a_group_count_calls_by_themselves_and_notes_together():
    met = [0]
    some, others, everyone = (Steps(met) for _ in range(3))
    for steps in (some, others):
        steps.notes += 1  # as each rank does once
    with some.begin("forward", 1):
        other = everyone.tag()
    met[0] += 1
    with some.begin("forward", 2), others.begin("forward", 2):
        assert some.tag() == others.tag()
    assert some.notes == everyone.notes == 3
    assert everyone.tag() != other
