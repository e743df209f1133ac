"""Ranks out of step: where one of them skips a call, or makes another, nobody goes on with wrong
numbers.

Messages match by tags over threads as they do over gloo; with NCCL they match by order alone.
"""

from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import pytest
import torch

from ring_attention_pytorch import RingPlan, ring_attn
from ring_attention_pytorch.ranks.failures import RingError
from ring_attention_pytorch.ranks.ring import Ring
from tests.support import threads
from tests.support.out_of_step import EVENTS, OTHER, SIZE, little_patience, plans_of
from tests.support.ranks import Pool, unhurried

TRANSPORTS = "ring", "gather"


@pytest.mark.parametrize("transport", TRANSPORTS)
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


def answers_of(event: str, transport: str) -> list[tuple[str, Any]]:
    pool = Pool(SIZE, group_timeout=unhurried(4.0))
    try:
        return pool.answers(over_gloo, event, transport)
    finally:
        pool.stop()


@pytest.fixture(scope="module")
def waited():
    """Answers of all ranks by event and transport: several pools wait at a time."""
    with ThreadPoolExecutor(5) as workers:
        cases = list(product(EVENTS, TRANSPORTS))
        yield dict(zip(cases, workers.map(answers_of, *zip(*cases))))


@pytest.mark.thorough
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("event", EVENTS)
def test_over_gloo_that_ends_with_the_timeout(event, transport, waited):
    answers = waited[event, transport]
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
