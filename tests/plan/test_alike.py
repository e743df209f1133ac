"""What every rank must do alike though no plan is made for it: layers, sinks, predicates."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from ring_attention_pytorch import RingPlan, ring_attn
from ring_attention_pytorch.ranks.failures import RingError
from ring_attention_pytorch.runtime.digests import digest_of_function
from tests.ranks.test_steps import little_patience
from tests.support import threads
from tests.support.ranks import Pool

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
    pool = Pool(2, timeout=60.0, group_timeout=3.0)
    answers = pool.answers(sinks_of_the_second)
    pool.stop()
    assert all("made without sinks" in told for _, told in answers), answers


def nearer_than(n: int) -> Callable[..., Tensor]:
    return lambda b, h, i, j: (i - j).abs() < n


def of_table(table: Tensor) -> Callable[..., Tensor]:
    def same(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return table[i] == table[j]

    return same


def both(*mods: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *at: mods[0](*at) & mods[1](*at)


class Within:
    """A predicate that is an object, of which some attributes are a rank's own."""

    def __init__(self, reach: int, rank: int) -> None:
        self.reach, self.rank = reach, rank

    def __call__(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return self.near(i, j)

    def near(self, i: Tensor, j: Tensor) -> Tensor:
        return (i - j).abs() < self.reach


TABLE = torch.arange(8) // 3
# name -> predicates that must be taken for one another, and one that must not
PREDICATES: dict[str, tuple[Any, Any, Any]] = {
    "a number": (nearer_than(3), nearer_than(3), nearer_than(4)),
    "code": (lambda b, h, i, j: i >= j, lambda b, h, i, j: i >= j, lambda b, h, i, j: i <= j),
    "a constant": (lambda b, h, i, j: i > 1, lambda b, h, i, j: i > 1, lambda b, h, i, j: i > 2),
    "a table": (of_table(TABLE), of_table(TABLE.clone()), of_table(TABLE.flip(0))),
    "an inner one": (
        both(nearer_than(3), of_table(TABLE)), both(nearer_than(3), of_table(TABLE)),
        both(nearer_than(2), of_table(TABLE)),
    ),
    "an attribute": (Within(3, 0), Within(3, 1), Within(2, 0)),
    "a method": (Within(3, 0).__call__, Within(3, 1).__call__, Within(2, 0).__call__),
    "what is bound": (
        partial(torch.where, TABLE), partial(torch.where, TABLE.clone()),
        partial(torch.where, TABLE + 1),
    ),
    "a default": (
        lambda b, h, i, j, n=3: i - j < n, lambda b, h, i, j, n=3: i - j < n,
        lambda b, h, i, j, n=4: i - j < n,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", PREDICATES)
def test_functions_are_told_apart_by_all_that_they_read(what):
    first, same, other = (digest_of_function(each) for each in PREDICATES[what])
    assert first.split()[-1] == same.split()[-1] != other.split()[-1]


def test_a_table_that_was_changed_in_place_is_another():
    table = TABLE.clone()
    before = digest_of_function(of_table(table))
    assert digest_of_function(of_table(table)) == before
    table[0] = 7
    assert digest_of_function(of_table(table)) != before


def test_functions_that_call_themselves_are_told_once():
    def odd(i: int) -> bool:
        return i > 0 and not odd(i - 1)

    assert digest_of_function(odd) == digest_of_function(odd)


@pytest.mark.parametrize("what", ["a number", "a table", "an attribute"])
def test_another_predicate_on_one_rank_is_an_error_on_all(what):
    first, same, other = PREDICATES[what]

    def main(ring: threads.ThreadRing) -> str:
        out = ring_attn(Q, Q, Q, mask_mod=(first, same)[ring.rank], group=ring)
        assert out.isfinite().all()
        try:
            ring_attn(Q, Q, Q, mask_mod=(first, other)[ring.rank], group=ring)
        except ValueError as error:
            return str(error)
        return "nothing"

    for told in threads.run(2, main)[0]:
        assert "mask_mod must be the same on every rank" in told
