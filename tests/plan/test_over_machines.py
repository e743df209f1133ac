"""Heads and transport over machines are chosen by bytes that cross, on all ranks alike."""

from typing import Any

import pytest
import torch

from ring_attention_pytorch.geometry.layouts import all_segments
from ring_attention_pytorch.geometry.tiles import Mask
from ring_attention_pytorch.plan.explain import explain_plan
from ring_attention_pytorch.plan.options import Options
from ring_attention_pytorch.plan.over_machines import (
    degree_over_machines,
    transport_over_machines,
    ways,
)
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.schedule.pieces import KVShape, Workload
from tests.support import threads
from tests.support.cases import Attention, check_in_threads

EIGHTS = (0,) * 8 + (1,) * 8


def case(machines: tuple[int, ...], heads: int, key_heads: int, window: int | None = None) -> Any:
    everyone = all_segments("zigzag", len(machines), 64 * len(machines))
    q, k = (torch.empty(1, 64, h, 64, dtype=torch.bfloat16) for h in (heads, key_heads))
    return Workload(everyone, everyone, Mask(True, window)), machines, (q, k, k)


@pytest.mark.parametrize(
    ("heads", "key_heads", "degree"),
    [
        (32, 8, 8),  # a key head for each rank of a machine: Ulysses sends the least
        (32, 2, 2),  # fewer: only as many ranks share heads, and relays do the rest
        (16, 1, 1),
        (40, 8, 8),
        (28, 4, 4),
        (7, 7, 1),  # heads that nothing divides
    ],
)
def test_heads_are_shared_by_as_many_ranks_as_send_the_least(heads, key_heads, degree):
    work, machines, qkv = case(EIGHTS, heads, key_heads)
    assert degree_over_machines(Options(), work, machines, qkv) == degree
    found = ways(work, machines, qkv)
    best = next(w for w in found if w.degree == degree and w.transport == "gather")
    assert best.crossing == found[0].crossing
    relayed = next(w for w in found if w.degree == 1 and w.relayed)
    assert best.crossing == relayed.crossing, "relays alone send the least there is"


def test_of_two_key_heads_relays_send_a_quarter_of_what_ulysses_sends():
    found = {str(way): way.crossing for way in ways(*case(EIGHTS, 32, 2))}
    assert found["gather by relays"] * 4 == found["ulysses=8, gather"]
    assert found["gather by relays"] * 8 == found["gather"]


def test_a_halo_is_not_worth_a_swap():
    assert degree_over_machines(Options(), *case(EIGHTS, 32, 8, window=8)) == 1


@pytest.mark.parametrize("given", [dict(ulysses=1), dict(transport="ring")])
def test_options_forbid_it(given):
    assert degree_over_machines(Options(**given), *case(EIGHTS, 32, 8)) == 1


def test_an_option_is_taken_as_it_is():
    assert degree_over_machines(Options(ulysses=4), *case(EIGHTS, 32, 8)) == 4


def test_nothing_is_chosen_on_one_machine():
    work, machines, qkv = case((0,) * 4, 8, 8)
    assert ways(work, machines, qkv) == []
    assert degree_over_machines(Options(), work, machines, qkv) == 1
    assert transport_over_machines(work, machines, KVShape(1, 8, 8, 64, 64, 2)) is None


@pytest.mark.parametrize("machines", [(0, 0, 0, 1), (0, 1, 0, 1), (0, 1, 1, 0)])
def test_neighbours_of_two_machines_never_swap_unasked(machines):
    assert degree_over_machines(Options(), *case(machines, 8, 8)) == 1


def test_a_gather_is_chosen_where_it_sends_less_than_a_ring():
    work, machines, _ = case((0, 0, 1, 1), 8, 8)
    shape = KVShape(1, 8, 8, 64, 64, 2)
    assert transport_over_machines(work, machines, shape) == "gather"
    two = all_segments("contiguous", 2, 64)
    twice = Workload(two, two, Mask())
    assert transport_over_machines(twice, (0, 1), shape._replace(itemsize=4)) is None


@pytest.mark.parametrize(
    ("heads", "key_heads", "machines", "found"),
    [(4, 2, (0, 0, 1, 1), ("gather", 2)), (3, 1, (0, 0, 1, 1), ("gather", 1)),
     (4, 2, (0, 1, 1, 0), ("gather", 1)), (4, 2, (0, 0, 0, 0), ("ring", 1))],
)  # fmt: skip
def test_plans_choose_so_and_are_exact(heads, key_heads, machines, found):
    asked = Attention(33, "zigzag", causal=True, heads=heads, key_heads=key_heads)
    (q, k, v), *_ = asked.data()

    def main(ring: threads.ThreadRing) -> tuple[str, int]:
        at, _ = asked.places(ring.rank, ring.size)
        like = (t[:, at] for t in (q, k, v))
        plan = RingPlan.make(*like, causal=True, layout="zigzag", group=ring)
        return plan.chosen.name, plan.degree

    assert threads.run(4, main, machines)[0] == [found] * 4
    if found[1] == 1:
        check_in_threads(asked, 4, machines)


# --- described ---


def described(machines: tuple[int, ...], heads: int, key_heads: int, **how: Any) -> list[str]:
    q, k = (torch.empty(1, 64, h, 8, dtype=torch.bfloat16) for h in (heads, key_heads))

    def main(ring: threads.ThreadRing) -> str:
        plan = RingPlan.make(q, k, k, causal=True, layout="zigzag", group=ring, **how)
        return explain_plan(plan)

    return threads.run(len(machines), main, machines)[0][0].splitlines()


def test_a_plan_says_who_shares_a_machine_and_what_others_would_send():
    lines = described((0, 1, 1, 0), 3, 1)
    assert "gather: by way of a relay on each machine" in lines
    assert "machines: 0: ranks 0, 3; 1: ranks 1 to 2" in lines
    one = 64 * 2 * 8 * 2  # bytes of a rank's keys and values
    found = [line for line in lines if line.startswith("between machines")]
    assert found == [
        f"between machines: this rank sends {one / 2 / 1000:.3g} kB forward and "
        f"{3 * one / 2 / 1000:.3g} kB backward, all ranks together {10.5 * one / 1000:.3g} kB"
    ]
    assert any(line.startswith("by gather by relays; others would send: gather ") for line in lines)


def test_a_plan_of_ulysses_counts_its_swaps_between_machines():
    apart, near = (described(machines, 4, 4, ulysses=2) for machines in ((0, 1) * 2, (0, 0, 1, 1)))
    swaps = 64 * 2 * 2 * 8 * 2 * 2  # q, k, v and out of two heads
    line = f"between machines: this rank sends {swaps / 1000:.3g} kB forward"
    assert any(each.startswith(line) for each in apart)
    assert any("by ulysses=2, gather; others would send: gather by relays" in each for each in near)


def test_on_one_machine_nothing_is_said_of_machines():
    assert not [line for line in described((0, 0), 4, 4) if "machine" in line]
