"""A plan explains itself: what will be sent, kept and computed, and how long that takes."""

from itertools import product

import pytest
import torch

from ring_attention_pytorch import RingPlan, balanced, explain_plan
from ring_attention_pytorch.geometry.layouts import all_segments, positions
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime.uncopied import replaced
from ring_attention_pytorch.schedule.hardware import hardware, number_of
from ring_attention_pytorch.schedule.pieces import Workload
from tests.support import threads
from tests.support.cases import over_shared_memory


def test_explaining_says_whose_speeds_they_are():
    ring = Ring.alone()
    ring.size = 2
    q = torch.empty(1, 4, 2, 8)
    plan = RingPlan.make(q, q, q, causal=True, transport="gather")
    two = all_segments("contiguous", 2, 8)
    plan = replaced(plan, ring=ring, query_segments=two, blocks=Workload(two, two, plan.visible))
    assert "on H200s" in explain_plan(plan)
    slower = plan.chosen._replace(machine=hardware("sdpa", number_of("L4")))
    assert "on A100s" in explain_plan(replaced(plan, chosen=slower))


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


@pytest.mark.parametrize(
    ("layout", "borders", "said"),
    [
        # queries 16 to 47 of 64 are those of place 1: 1040 of 1540 pairs
        ("zigzag", [0, 54, 64], ["place 1 has 1.35 times the mean of pairs; a layout from bal"]),
        (balanced([0, 54, 64], 2), [0, 54, 64], []),
        ("contiguous", None, ['place 1 has 1.49 times the mean of pairs; layout="zigzag" is even']),
        ("zigzag", None, []),
    ],
)
def test_uneven_shards_are_explained(layout, borders, said):
    def main(ring: Ring) -> str:
        q = torch.empty(1, 32, 2, 4)
        plan = RingPlan.make(q, q, q, causal=True, layout=layout, cu_seqlens=borders, group=ring)
        return explain_plan(plan)

    found, _ = threads.run(2, main)
    assert [text.count("uneven: ") for text in found] == [len(said)] * 2
    assert all(each in text for each in said for text in found)


def test_stages_are_explained():
    """Ranks share memory, and keys come late."""

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
    """Ranks share memory."""

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
