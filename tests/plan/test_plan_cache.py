"""Plans that are found again: only by all that they depend on, and only on all ranks together."""

import copy
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ring_attention_pytorch import RingPlan, ring_attn
from ring_attention_pytorch.plan import plan_cache, ring_plan
from ring_attention_pytorch.plan.placement import Placement
from ring_attention_pytorch.plan.proposal import Proposal
from ring_attention_pytorch.ranks.agreement import agree
from ring_attention_pytorch.ranks.ring import Ring

Q = torch.randn(1, 6, 4, 8)


@pytest.fixture(autouse=True)
def _nothing_kept() -> None:
    plan_cache.forget()


def test_a_plan_of_the_same_kind_is_found_again() -> None:
    plan = RingPlan.make(Q, Q, Q, causal=True)
    assert RingPlan.make(torch.randn_like(Q), Q, Q, causal=True) is plan
    ring_attn(Q, Q, Q, causal=True)  # of all options, by their defaults: another kind
    assert len(plan_cache._plans) == 2
    ring_attn(Q, Q, Q, causal=True)
    assert len(plan_cache._plans) == 2


OTHERS = {
    "option": dict(window=3),
    "layout": dict(layout="zigzag"),
    "length": dict(q=Q[:, :5]),
    "dtype": dict(q=Q.double()),
    "gradients": dict(q=Q.clone().requires_grad_()),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_kind_is_another_plan(other: str) -> None:
    plan = RingPlan.make(Q, Q, Q, causal=True)
    options = dict(OTHERS[other])
    q = options.pop("q", Q)
    assert RingPlan.make(q, q, q, causal=True, **options) is not plan
    assert RingPlan.make(Q, Q, Q, causal=True) is plan


def test_settings_are_part_of_the_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = RingPlan.make(Q, Q, Q)
    with torch.no_grad():
        assert RingPlan.make(Q, Q, Q) is not plan
    with torch.inference_mode():
        assert RingPlan.make(Q, Q, Q) is not plan
    with torch.autocast("cpu", torch.bfloat16):
        assert RingPlan.make(Q, Q, Q).signature != plan.signature
    torch.use_deterministic_algorithms(True)
    try:
        assert RingPlan.make(Q, Q, Q) is not plan
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.setenv("RING_ATTENTION_CHECK", "always")
    assert RingPlan.make(Q, Q, Q).agreed.always
    monkeypatch.delenv("RING_ATTENTION_CHECK")
    assert RingPlan.make(Q, Q, Q) is plan


VALUES = {
    "key_mask": torch.ones(1, 6, dtype=torch.bool),
    "documents": torch.zeros(1, 6, dtype=torch.long),
    "alibi_slopes": torch.ones(4),
    "mask_mod": lambda b, h, i, j: i >= j,
    "dropout": 0.5,
    "cu_seqlens": [0, 6],
}


@pytest.mark.parametrize("name", VALUES)
def test_what_depends_on_values_is_made_each_time(name: str) -> None:
    options = {name: VALUES[name]}
    assert RingPlan.make(Q, Q, Q, **options) is not RingPlan.make(Q, Q, Q, **options)


def test_sinks_are_seen_by_their_shape() -> None:
    plan = RingPlan.make(Q, Q, Q, sinks=torch.zeros(4))
    assert RingPlan.make(Q, Q, Q, sinks=torch.ones(4)) is plan
    assert RingPlan.make(Q, Q, Q) is not plan


def test_an_option_of_another_type_is_refused_though_it_equals_one_that_was_right() -> None:
    RingPlan.make(Q, Q, Q, causal=True, window=1)
    with pytest.raises(ValueError, match="causal=1"):
        RingPlan.make(Q, Q, Q, causal=1, window=1)
    with pytest.raises(ValueError, match="there is no option windw"):
        RingPlan.make(Q, Q, Q, causal=True, windw=1)


def test_few_kinds_are_kept_and_the_oldest_goes() -> None:
    first = RingPlan.make(Q, Q, Q)
    for window in range(plan_cache._KINDS - 1):
        RingPlan.make(Q, Q, Q, window=window)
        assert RingPlan.make(Q, Q, Q) is first
    for window in range(plan_cache._KINDS):
        RingPlan.make(Q, Q, Q, window=window)
    assert len(plan_cache._plans) == plan_cache._KINDS
    assert RingPlan.make(Q, Q, Q) is not first


def lengths(by_call: list[list[int]]) -> list[tuple[int, tuple[int, ...]]]:
    """For a pool: make plans for these lengths of each rank; tell which plan, and what it knows."""
    plan_cache.forget()
    found = []
    for each in by_call:
        q = torch.zeros(1, each[dist.get_rank()], 2, 4)
        plan = RingPlan.make(q, q, q, cross=True)
        keys = tuple(sum(s.length for s in segments) for segments in plan.blocks.keys)
        found.append((plan.number, keys))
    return found


def test_ranks_keep_a_plan_only_if_all_have_found_that_one(pools: Callable) -> None:
    """Rank 0 knows a plan of 2 tokens, rank 1 another one of 2; together they know none."""
    calls = [[2, 3], [3, 2], [2, 3], [2, 2], [2, 2], [2, 3]]
    for found in pools(2).run(lengths, [[*each] for each in calls]):
        assert [keys for _, keys in found] == [tuple(each) for each in calls]
        numbers = [number for number, _ in found]
        assert numbers[2] == numbers[0]
        assert numbers[4] == numbers[3]
        assert len({*numbers[:2], numbers[3]}) == 3


def test_a_call_in_a_batch_s_block_has_one_key_for_both_caches() -> None:
    made = []
    for _ in range(2):  # the second block finds the plan among those of the process
        with (
            Placement(Ring.alone(), layout="zigzag", length=6),
            mock.patch.object(plan_cache, "cache_key", wraps=plan_cache.cache_key) as keys,
        ):
            made.append(RingPlan.make(Q, Q, Q, causal=True))
            assert keys.call_count == 1
            assert RingPlan.make(Q, Q, Q, causal=True) is made[0]
    assert made[1] is made[0]
    assert made[0].layout == "zigzag"


def test_who_has_found_another_plan_makes_a_new_one() -> None:
    plan = RingPlan.make(Q, Q, Q, causal=True)

    def another(*given: object) -> list[dict[str, int]]:
        return [{**own, "plan": own["plan"] + 1} for own in agree(*given)]

    with mock.patch.object(ring_plan, "agree", another):
        assert RingPlan.make(Q, Q, Q, causal=True) is not plan


def few_layers_are_remembered(patch: pytest.MonkeyPatch) -> None:
    plan = RingPlan.make(Q, Q, Q, dropout=0.5, dropout_seed=1)
    patch.setattr(ring_plan, "_LAYERS", 2)
    layers = [plan.for_layer(number) for number in (1, 2, 1, 3)]
    assert layers[2] is layers[0]
    assert plan.for_layer(1) is layers[0]
    assert plan.for_layer(3) is layers[3]
    assert plan.for_layer(2) is not layers[1]


def test_few_layers_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last ones, however many numbers come: some count steps, too."""
    few_layers_are_remembered(monkeypatch)


def test_plans_of_groups_that_are_gone_go() -> None:
    for name, exists in (("gone", False), ("here", True)):
        ring = SimpleNamespace(exists=exists)
        plan_cache.keep(name, Proposal(), SimpleNamespace(ring=ring))
    assert list(plan_cache._plans) == ["here"]


def forgetful() -> tuple[bool, bool, str]:
    """For a pool: one rank forgets its plan, and then wants another one."""
    rank, q = dist.get_rank(), torch.randn(1, 4, 2, 4)
    first = RingPlan.make(q, q, q, causal=True)
    if rank == 1:
        plan_cache.forget()
    second = RingPlan.make(q, q, q, causal=True)
    third = RingPlan.make(q, q, q, causal=True)
    try:
        RingPlan.make(q, q, q, causal=rank != 1)
    except ValueError as error:
        return second is first, third is second, str(error)
    raise AssertionError("ranks differ, and nobody says so")


def test_who_has_forgotten_makes_all_make_it_anew_and_who_differs_is_told(pools: Callable) -> None:
    found = pools(3).run(forgetful)
    assert [each[:2] for each in found] == [(False, True)] * 3
    assert len({error for *_, error in found}) == 1
    assert "causal must be the same on every rank" in found[0][2]


def test_copies_have_no_plans() -> None:
    """Plans refer to the memory of what they were made for."""
    kept = plan_cache.PlanCache(a=1)
    for copied in (copy.deepcopy(kept), copy.copy(kept), pickle.loads(pickle.dumps(kept))):
        assert (type(copied), len(copied)) == (plan_cache.PlanCache, 0)
    assert kept["a"] == 1


def groups() -> list[int]:
    """For a pool: how many plans are kept while groups come and go."""
    plan_cache.forget()
    found, q = [], torch.randn(1, 4, 2, 4)
    for _ in range(3):
        group = dist.new_group()
        RingPlan.make(q, q, q, group=group)
        found.append(len(plan_cache._plans))
        dist.destroy_process_group(group)
    return found


def test_plans_go_with_their_groups(pools: Callable) -> None:
    assert pools(2).run(groups) == [[1, 1, 1]] * 2
