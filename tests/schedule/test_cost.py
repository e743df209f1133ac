"""The cost model: its bytes are those that are sent, and its words say what will happen."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ring_attention_pytorch import RingPlan, explain_plan
from ring_attention_pytorch.geometry.layouts import LAYOUTS, all_segments, positions
from ring_attention_pytorch.geometry.tiles import Mask, tiles, visible_pairs
from ring_attention_pytorch.plan.explain import predicted
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.schedule.cost import (
    H200,
    choose_transport,
    costs,
    host_seconds,
    likely_gather,
    part_seconds,
    predict,
    swap_launch_seconds,
    swap_seconds,
)
from ring_attention_pytorch.schedule.pieces import KVShape, Workload
from ring_attention_pytorch.schedule.steps import gather_first, ring
from tests.attention.test_ring_attention import hops
from tests.support import threads
from tests.support.cases import Attention, over_shared_memory

JOB = KVShape(1, 32, 8, 128, 128, 2)


def blocks(layout: str, size: int, length: int, visible: Mask) -> Workload:
    everyone = all_segments(layout, size, length)
    return Workload(everyone, everyone, visible)


@pytest.mark.parametrize("transport", ["ring", "gather"])
@pytest.mark.parametrize(("layout", "window"), [("zigzag", None), ("contiguous", 7)])
def test_bytes_are_those_that_are_received(transport, layout, window):
    size, case = 4, Attention(32, layout, causal=True, window=window, transport=transport)
    tensors, _, _, _ = case.data()

    def main(ring: Ring) -> int:
        at, _ = case.places(ring.rank, size)
        q, k, v = (t[:, at] for t in tensors)
        plan = RingPlan.make(
            q, k, v, causal=True, window=window, layout=layout, group=ring, transport=transport
        )
        return predicted(plan).cost.received

    told, _ = threads.run(size, main)
    assert sum(told) == sum(sent for _, sent in hops(case, size))


@settings(deadline=None)
@given(
    st.sampled_from(sorted(LAYOUTS)), st.integers(1, 6), st.integers(0, 60),
    st.builds(Mask, st.booleans(), st.none() | st.integers(0, 20), st.none(), st.none()),
    st.integers(1, 6),
)  # fmt: skip
def test_every_visible_pair_is_counted_once(layout, size, length, visible, at_once):
    found = blocks(layout, size, length, visible)
    for rank, mine in enumerate(found.queries):
        pairs = sum(visible_pairs(tiles(mine, k, visible)) for k in found.keys)
        for schedule in (ring(found), likely_gather(found, JOB, at_once), gather_first(found)):
            for back in (False, True):
                keys = schedule.positions(back, rank)
                assert sum(visible_pairs(tiles(mine, each, visible)) for each in keys) == pairs


def test_more_speed_never_takes_longer():
    found = blocks("zigzag", 16, 16 * 4096, Mask(causal=True))
    for transport, cost in costs(found, JOB, 15).items():
        assert 0 < cost.share <= 1
        for faster in ("forward", "backward", "memory", "pull", "network"):
            machine = H200._replace(**{faster: 2 * getattr(H200, faster)})
            quick = costs(found, JOB, 15, machine)[transport]
            assert quick.forward + quick.backward <= cost.forward + cost.backward


def test_one_rank_costs_its_kernel_and_the_call():
    found = blocks("contiguous", 1, 8192, Mask())
    cost = predict(likely_gather(found, JOB, 1), 0, JOB)
    assert cost.received == 0
    assert cost.share > 0.95
    assert swap_seconds(8192, JOB, 1) == 0


def test_the_choice_is_the_ring_on_a_cpu_and_gather_within_a_domain():
    found = blocks("zigzag", 4, 4 * 8192, Mask(causal=True))
    assert choose_transport(found, JOB, 3, None) == "ring"
    assert choose_transport(found, JOB, 3) == "gather"
    alone = blocks("zigzag", 1, 8192, Mask(causal=True))
    assert choose_transport(alone, JOB, 1) == "ring"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            dict(transport="gather"),
            ["2560 keys", "then their gradients go home", "sent point to point"],
        ),
        (
            dict(transport="ring"),
            ["ring: one neighbour", "hop 3: keys of place", "while the one before computes"],
        ),
        (dict(ulysses=2), ["swaps heads for sequence with 1 neighbour:", "4 query heads"]),
        (dict(ulysses=4), ["2 query heads and 1 key head"]),
    ],
    ids=str,
)
def test_a_plan_explains_itself_without_a_message(options, said):
    def main(ring: Ring) -> str:
        q = torch.empty(1, 1024, 8, 16).expand(1, 1024, 8, 16)
        plan = RingPlan.make(
            q, q[:, :, :2], q[:, :, :2], causal=True, layout="zigzag", group=ring, **options
        )
        before = ring.hub.gathers[ring.rank], ring.hub.exchanges[ring.rank]
        text = explain_plan(plan)
        assert before == (ring.hub.gathers[ring.rank], ring.hub.exchanges[ring.rank])
        return text

    found, _ = threads.run(4, main)
    for text in found:
        assert "1024 of 4096 tokens, zigzag, causal" in text
        assert "% of the kernel alone" in text
    for each in said:
        assert any(each in text for text in found), (each, found[1])


def test_stages_are_explained():
    """Of ranks that share memory, where keys come late."""

    def main(ring: threads.ThreadRing) -> list[bool]:
        q = torch.empty(1, 16, 2, 8)
        plan = RingPlan.make(q, q, q, causal=True, layout="zigzag", group=ring, transport="gather")
        found = (over_shared_memory(plan, [q, q, q], ring, 3, late=late) for late in (False, True))
        return ["computes, forward in two stages; " in explain_plan(each) for each in found]

    assert threads.run(4, main)[0] == [[False, True]] * 4


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (dict(by_copy_engine=False), "go home, added where they lie\n"),
        (dict(by_copy_engine=True), "go home by copy engine\n"),
        (
            dict(by_copy_engine=True, own_low_priority=True),
            "by copy engine, while own keys are computed on\n",
        ),
        (dict(together=True), "keys in shared memory, before any call; "),
    ],
    ids=str,
)
def test_ways_home_are_explained(how, said):
    """Of ranks that share memory."""

    def main(ring: threads.ThreadRing) -> bool:
        q = torch.empty(1, 16, 2, 8)
        plan = RingPlan.make(q, q, q, causal=True, layout="zigzag", group=ring, transport="gather")
        return said in explain_plan(over_shared_memory(plan, [q, q, q], ring, 3, **how))

    assert threads.run(4, main)[0] == [True] * 4


def test_the_pairs_of_packed_documents_are_those_that_are_seen():
    q = torch.empty(1, 6, 1, 8)
    packed = explain_plan(RingPlan.make(q, q, q, causal=True, cu_seqlens=[0, 2, 6]))
    assert "causal in documents" in packed
    assert f"{3 + 10} pairs" in packed
    assert "21 pairs" in explain_plan(RingPlan.make(q, q, q, causal=True))
    q = torch.empty(2, 6, 1, 8)
    apart = explain_plan(RingPlan.make(q, q, q, causal=True, cu_seqlens=[[0, 2, 6], [0, 6]]))
    assert "samples differ: pairs at most" in apart


def ranks_without_work_explain_themselves() -> None:
    """As all ranks do, or the others would wait for them in what comes next."""
    for layout, ways in product(("contiguous", "zigzag"), ({}, dict(transport="gather"))):
        for length in (0, 1, 3):

            def main(ring: Ring, layout: str = layout, ways: dict = ways, n: int = length) -> str:
                at = positions(layout, rank=ring.rank, ring_size=4, length=n)
                q = torch.empty(1, len(at), 2, 8)
                return explain_plan(RingPlan.make(q, q, q, layout=layout, group=ring, **ways))

            for rank, text in enumerate(threads.run(4, main)[0]):
                assert f"rank {rank} of 4: " in text
                assert "predicted" in text


def test_ranks_without_work_explain_themselves():
    ranks_without_work_explain_themselves()


def test_the_host_is_told_of_where_it_takes_longer():
    two = all_segments("zigzag", 2, 4096)
    found = ring(Workload(two, two, Mask(causal=True)))
    assert host_seconds(found, taped=True) < host_seconds(found, taped=False)
    ways = [swap_launch_seconds(*way) for way in ((True, True), (True, False), (False, False))]
    assert 0 < ways[0] < ways[1] < ways[2]
    slow = H200._replace(launch=10 * H200.launch)
    assert host_seconds(found, False, slow) == pytest.approx(10 * host_seconds(found, False))


def test_a_call_of_all_tiles_costs_a_fifth_of_one_for_each():
    program = gather_first(blocks("zigzag", 4, 512, Mask(causal=True))).forward
    slow = H200._replace(call=1.0)
    (part,) = program.parts
    each = [
        part_seconds(program, part, 1, JOB, slow._replace(one_call=one_call), 0.0)
        for one_call in (False, True)
    ]
    assert each == pytest.approx([2.0, 0.2], abs=1e-3)
    free = H200._replace(call=0.0)
    merges, merged = (
        part_seconds(program, part, 1, JOB, free._replace(one_call=one_call), 0.0)
        for one_call in (True, False)
    )
    assert merges == 0 < merged
