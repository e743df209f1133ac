"""Packed documents: a token sees its own, whatever the layout and wherever ranks begin."""

from dataclasses import replace
from functools import lru_cache
from itertools import product
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ring_attention_pytorch import RingPlan, ring_attn
from ring_attention_pytorch.geometry import layouts
from ring_attention_pytorch.geometry.balance import balanced
from ring_attention_pytorch.geometry.layouts import LAYOUTS
from ring_attention_pytorch.geometry.tiles import tiles
from ring_attention_pytorch.plan import ring_plan
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime.uncopied import replaced
from tests.support import threads
from tests.support.cases import (
    CPU_KERNELS,
    Attention,
    borders,
    check_in_processes,
    check_in_threads,
)
from tests.support.packed import PACKED, Ids, N, ids_of_any_kind, in_runs


@lru_cache
def dealt(ids: tuple[Ids, ...], size: int) -> layouts.AssignedLayout:
    return balanced([borders(tuple(sorted(row))) for row in ids], size)


def packed_cases(size: int) -> list[Attention]:
    found = []
    for ids, causal, window in product(PACKED.values(), (False, True), (None, 3)):
        for layout in (*sorted(LAYOUTS), dealt(ids, size)):
            case = Attention(N, layout, causal=causal, window=window, ids=ids)
            ascending = all(list(row) == sorted(row) for row in ids)
            found.append(case.by_borders() if ascending and (causal or window is None) else case)
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_documents_of_all_kinds_in_all_layouts(size):
    """Every second case over three ranks, fewer over others."""
    step = {1: 5, 2: 5, 3: 2, 4: 5}[size]
    for i, case in enumerate(packed_cases(size)[size % step :: step]):
        check_in_threads(replace(case, kernel=CPU_KERNELS[i % 2]), size)


@pytest.mark.parametrize("size", [2, 4])
def test_documents_over_processes(size, pools):
    check_in_processes(packed_cases(size)[:: 3 * size + 1], pools(size))


def test_with_every_other_option():
    for masked, softclamp, kernel in product((False, True), (None, 1.5), (None, "eager")):
        case = Attention(
            N, "zigzag", causal=True, masked=masked, softclamp=softclamp, kernel=kernel
        )
        check_in_threads(replace(case, ids=PACKED["one long among short"], window=6), 3)
        check_in_threads(replace(case, ids=PACKED["scattered"], d_v=3), 3)


@settings(deadline=None, max_examples=40)
@given(ids_of_any_kind, st.booleans(), st.data())
def test_any_documents_any_ring_any_mask(ids, in_order, data):
    ids = tuple(tuple(sorted(row)) if in_order else row for row in ids)
    size = data.draw(st.integers(1, 5))
    case = Attention(
        len(ids[0]),
        data.draw(st.sampled_from([*sorted(LAYOUTS), dealt(ids, size)])),
        causal=data.draw(st.booleans()),
        window=data.draw(st.none() | st.integers(0, 12)),
        masked=data.draw(st.booleans()),
        kernel=data.draw(st.sampled_from(CPU_KERNELS)),
        ids=ids,
        bucket_size=data.draw(st.integers(1, 9)),
    )
    alike = all(max(row, default=0) == max(ids[0], default=0) for row in ids)
    check_in_threads(case.by_borders() if in_order and alike else case, size)


def plans(size: int, layout, ids: torch.Tensor, **options) -> tuple[list[RingPlan], threads.Hub]:
    """A plan of each rank for one packed sequence."""
    n = ids.shape[1]

    def main(ring: Ring) -> RingPlan:
        at = layouts.positions(layout, rank=ring.rank, ring_size=size, length=n)
        q = torch.empty(1, 1, 1, 4).expand(len(ids), len(at), 1, 4)
        return RingPlan.make(q, q, q, layout=layout, group=ring, documents=ids[:, at], **options)

    return threads.run(size, main)


def test_what_no_query_can_use_is_not_sent():
    within = torch.arange(4).repeat_interleave(8)[None]  # a document on each rank
    across = (torch.arange(32) + 4).div(8, rounding_mode="floor")[None]  # to the next
    for ids, distances in ((within, (0,)), (across, (0, 1, 3))):
        for plan in plans(4, "contiguous", ids)[0]:
            assert plan.blocks.distances == distances
    for plan in plans(4, "contiguous", across, causal=True)[0]:
        assert plan.blocks.distances == (0, 1)


def test_layers_that_are_given_a_plan_exchange_keys_only():
    ids = torch.tensor(PACKED["scattered"])
    made, hub = plans(3, "striped", ids, causal=True)
    assert hub.gathers == [2] * 3  # notes, runs

    def main(ring: Ring) -> None:
        own = made[ring.rank]
        transport = replace(own.transport, fabric=replace(own.transport.fabric, ring=ring))
        plan = replaced(own, ring=ring, transport=transport)
        q = torch.randn(2, plan.signature[1], 1, 4)
        for _ in range(3):
            ring_attn(q, q, q, plan=plan)

    with mock.patch.object(ring_plan, "tiles", side_effect=tiles) as worked_out:
        _, hub = threads.run(3, main)
    assert hub.gathers == [0] * 3
    assert worked_out.call_count == 3 * 3 * 2  # of each rank and owner and sample, once


def test_samples_that_see_alike_are_one_call():
    same = torch.tensor([[5, 5, 6], [1, 1, 0], [3, 2, 2]])
    for plan in plans(1, "contiguous", same)[0]:
        found = plan.tiles(plan.blocks.keys[0])
        assert [samples for samples, _ in found] == [slice(0, 2), slice(2, 3)]


def told(call, size: int = 2) -> str:
    """The one text that all ranks are told."""

    def main(ring: Ring) -> str:
        try:
            call(ring)
        except ValueError as error:
            return str(error)
        raise AssertionError("accepted")

    texts, _ = threads.run(size, main)
    assert len(set(texts)) == 1
    return texts[0]


LONGER = dealt((in_runs(3, 9),), 2)
WRONG = [
    (dict(documents=torch.zeros(1, 5, dtype=int)), "documents must be int [2, 5]"),
    (dict(documents=torch.zeros(2, 5)), "got torch.float32 [2, 5]"),
    (dict(documents=torch.zeros(2, 5, dtype=int), cu_seqlens=[0, 10]), "pass one or the other"),
    (dict(cu_seqlens=[0, 3, 2, 10]), "ascend from 0"),
    (dict(cu_seqlens=[1, 10]), "ascend from 0"),
    (dict(cu_seqlens=[]), "one list for all samples or 2, got 0"),
    (dict(cu_seqlens=[[0, 10]] * 3), "one list for all samples or 2, got 3"),
    (dict(cu_seqlens=[[0, 10], [0, 9]]), "must end alike, got [10, 9]"),
    (dict(cu_seqlens=torch.tensor([0.0, 10.0])), "cu_seqlens must be ascending ints"),
    (dict(cu_seqlens=[0, 9]), "must end with the length of the whole, 10, got 9"),
    (dict(cu_seqlens=[0, 10], cross=True), "need keys of the same tokens"),
    (dict(layout=LONGER), "dealt for 12 tokens over 2 ranks, got 10 over 2"),
]


@pytest.mark.parametrize(("given", "said"), WRONG)
def test_what_can_not_be_is_told_to_all(given, said):
    q = torch.randn(2, 5, 1, 4)
    assert said in told(lambda ring: ring_attn(q, q, q, group=ring, **given))
    # of one rank only
    text = told(lambda r: ring_attn(q, q, q, group=r, **(given if r.rank else {})))
    assert said in text or "must be the same on every rank" in text


def test_ranks_must_have_the_same_borders():
    q = torch.randn(1, 5, 1, 4)
    text = told(lambda ring: ring_attn(q, q, q, group=ring, cu_seqlens=[0, 3 + ring.rank, 10]))
    assert "cu_seqlens must be the same on every rank" in text
    assert "3 borders up to 10" in text


def test_dealt_layouts_are_compared_by_what_they_hold():
    q = torch.randn(1, 6, 1, 4)
    two = [LONGER, balanced([0, 12], 2)]
    assert "layout must be the same" in told(
        lambda ring: ring_attn(q, q, q, group=ring, layout=two[ring.rank])
    )
