"""The cost model: its bytes are those that are sent; more speed never takes longer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ring_attention_pytorch import RingPlan
from ring_attention_pytorch.geometry.layouts import LAYOUTS, all_segments
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
    relayed_seconds,
    seconds_by,
    swap_launch_seconds,
    swap_seconds,
)
from ring_attention_pytorch.schedule.pieces import KVShape, Workload
from ring_attention_pytorch.schedule.relays import by_relays
from ring_attention_pytorch.schedule.steps import gather_first, ring
from tests.support import threads
from tests.support.cases import Attention, check_in_threads
from tests.support.counted import hops

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


def test_one_transport_costs_what_it_costs_among_all():
    found = blocks("zigzag", 4, 4 * 4096, Mask(causal=True))
    for transport, cost in costs(found, JOB, 3).items():
        assert seconds_by(transport, found, JOB, 3) == cost.forward + cost.backward


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
    assert choose_transport(found, JOB, 3, H200._replace(pull=1e9)) == "ring"
    alone = blocks("zigzag", 1, 8192, Mask(causal=True))
    assert choose_transport(alone, JOB, 1) == "ring"


def test_the_host_is_told_of_where_it_takes_longer():
    two = all_segments("zigzag", 2, 4096)
    found = ring(Workload(two, two, Mask(causal=True)))
    assert host_seconds(found, taped=True) < host_seconds(found, taped=False)
    assert 0 < swap_launch_seconds(taped=True) < swap_launch_seconds(taped=False)
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


@pytest.mark.parametrize("machines", [(0, 0, 1, 1), (0, 1, 2, 2, 0, 1)])
def test_bytes_by_way_of_relays_are_those_that_are_received(machines):
    case = Attention(48, "zigzag", causal=True, transport="gather", batch=1, key_heads=1)
    tensors, _, _, _ = case.data()

    def main(ring: Ring) -> int:
        at, _ = case.places(ring.rank, ring.size)
        mine = (t[:, at] for t in tensors)
        plan = RingPlan.make(
            *mine, **case.options(), layout=case.layout, group=ring, transport="gather"
        )
        return predicted(plan).cost.received

    told, _ = threads.run(len(machines), main, machines)
    assert sum(told) == sum(check_in_threads(case, len(machines), machines).ways.values())


def test_by_way_of_relays_a_slow_network_hides_sooner():
    """Two machines of 8, few key heads: 1/8 of the bytes cross, and are passed on beside that."""
    eights, few = (0,) * 8 + (1,) * 8, JOB._replace(key_heads=2)
    work, slow = blocks("zigzag", 16, 16 * 2048, Mask(causal=True)), H200._replace(network=5e9)
    direct = sum(predict(likely_gather(work, few, 8, slow), 8, few, slow)[:2])
    relayed = sum(predict(by_relays(work, eights, 8), 8, few, slow, eights)[:2])
    assert relayed < 0.7 * direct
    assert relayed_seconds(0, 10**9, slow) == slow.network_hop + 0.2
    assert relayed_seconds(10**9, 10**6, slow) == relayed_seconds(10**9, 0, slow) > 3e-3
