"""Calls that every rank must make alike though no plan is made for them: layers, and sinks."""

from typing import Any

import pytest
import torch

from ring_attention_pytorch import RingPlan, ring_attn
from ring_attention_pytorch.ranks.failures import RingError
from tests.support import threads
from tests.support.out_of_step import little_patience
from tests.support.ranks import Pool, unhurried

Q = torch.randn(1, 4, 2, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("how", ["ring", "gather", "ulysses"])
def test_one_layer_on_one_rank_and_another_on_the_next_is_an_error(how):
    options: dict[str, Any] = {"ulysses": 2} if how == "ulysses" else {"transport": how}

    def main(ring: threads.ThreadRing) -> None:
        plan = RingPlan.make(Q, Q, Q, dropout=0.5, kernel="eager", group=ring, **options)
        for number in (3, 0, ring.rank):
            ring_attn(Q, Q, Q, plan=plan.for_layer(number))

    with little_patience(), pytest.raises((TimeoutError, RingError), match="never"):
        threads.run(2, main)


@pytest.mark.parametrize("made_with", [False, True])
def test_sinks_beside_a_plan_without_them_and_the_reverse_are_an_error(made_with):
    sinks = torch.zeros(2)
    plan = RingPlan.make(Q, Q, Q, sinks=sinks if made_with else None)
    ring_attn(Q, Q, Q, plan=plan, sinks=sinks if made_with else None)
    with pytest.raises(ValueError, match=f"made {'with' if made_with else 'without'} sinks"):
        ring_attn(Q, Q, Q, plan=plan, sinks=None if made_with else sinks)


def sinks_of_the_second() -> str:
    """For a pool: what a rank hears where another one has sinks."""
    plan = RingPlan.make(Q, Q, Q)
    try:
        ring_attn(Q, Q, Q, plan=plan, sinks=torch.zeros(2) if plan.ring.rank else None)
    except (ValueError, RingError) as error:
        return str(error)
    return "nothing"


@pytest.mark.thorough
def test_sinks_on_one_rank_only_are_an_error_on_all():
    pool = Pool(2, group_timeout=unhurried(3.0))
    answers = pool.answers(sinks_of_the_second)
    pool.stop()
    assert all("made without sinks" in told for _, told in answers), answers
