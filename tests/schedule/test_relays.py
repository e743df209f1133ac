"""Gathers over several machines, walked on ints: keys cross once, gradients are added once.

The walker knows no chunks: it follows every token, and whose gradients a sum has.
"""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ring_attention_pytorch.geometry.layouts import LAYOUTS, all_segments
from ring_attention_pytorch.geometry.segments import Segments, count
from ring_attention_pytorch.geometry.tiles import Mask
from ring_attention_pytorch.schedule.pieces import Chunks, KVShape, Workload, rounds_of
from ring_attention_pytorch.schedule.relays import (
    Machines,
    Route,
    by_relays,
    crossing,
    legs,
    relay,
    rounds_by_machine,
    swap_crossing,
)
from ring_attention_pytorch.schedule.steps import Block, gather, ring
from tests.support.over_machines import Token, masks, message, placed, wanted

JOB = KVShape(1, 2, 1, 2, 3, itemsize=2)


def positions(segments: Segments) -> list[int]:
    return [start + i * stride for start, stride, length in segments for i in range(length)]


def sees(mask: Mask, query: int, key: int) -> bool:
    """By the definition, of a sample of documents up to 24."""
    far = mask.window is not None and abs(query - key) > mask.window
    apart = mask.documents is not None and not any(
        a <= query < b and a <= key < b
        for a, b in zip([*mask.documents.starts], [*mask.documents.starts[1:], 10**9])
    )
    return not far and not apart and not (mask.causal and key > query)


def check_round(pieces: tuple[Chunks, ...], machines: Machines) -> Counter[int]:
    """Keys come once, and gradients of all ranks are added once; return what leaves each rank."""
    both, sent = legs(pieces, machines), Counter[int]()
    for leg in both.first:
        assert {span.owner for span in leg.spans} == {leg.sender}, "the first leg is the owner's"
    held = {(leg.receiver, leg.sender): message(leg) for leg in both.first}
    assert len(held) == len(both.first), "two messages of one pair"
    for rank, chunks in enumerate(pieces):
        route = Route.of(pieces, machines, rank)
        came = [{leg.sender: message(leg) for leg in each} for each in route.receives]
        found = [t for way, _ in route.chunks for t in came[way.leg][way.sender][way.at]]
        assert found == wanted(chunks), "a needed key did not come, or not to its place"
        length = len(found)
        assert [i for _, at in route.chunks for i in range(at.start, at.stop)] == [*range(length)]
    crossed = Counter[tuple[int, Token]]()
    for leg in both.first:
        if machines[leg.sender] != machines[leg.receiver]:
            sent[leg.sender] += leg.tokens
            crossed.update((machines[leg.receiver], token) for token in message(leg))
            assert leg.receiver == relay(machines, machines[leg.receiver], leg.sender)
    assert all(times == 1 for times in crossed.values()), "a key crosses twice"
    union = {
        (machines[rank], token)
        for rank, chunks in enumerate(pieces)
        for token in wanted(chunks)
        if machines[token[0]] != machines[rank]
    }
    assert {*crossed} == union, "only what is needed crosses, and all of it"
    for leg in both.second:
        assert machines[leg.sender] == machines[leg.receiver], "a second leg crosses"
        for token in message(leg):
            assert token in held[leg.sender, token[0]], "a relay passes on what it has not"
    check_gradients(pieces, machines)
    return sent


def check_gradients(pieces: tuple[Chunks, ...], machines: Machines) -> None:
    """Follow sums of gradients home: each rank's part is in its owner's sum, once."""
    both = legs(pieces, machines)
    of_rank = {rank: Counter(wanted(chunks)) for rank, chunks in enumerate(pieces)}
    at_relay: dict[int, Counter[tuple[Token, int]]] = {r: Counter() for r in range(len(machines))}
    home = Counter[tuple[Token, int]]()
    for leg in both.second:
        for token in message(leg):
            assert of_rank[leg.receiver][token]
            at_relay[leg.sender][token, leg.receiver] += 1
    for leg in both.first:
        here = leg.receiver
        for token in message(leg):
            if of_rank[here][token]:
                home[token, here] += 1
            if machines[leg.sender] != machines[here]:
                for (of, rank), times in at_relay[here].items():
                    home[of, rank] += times * (of == token)
    expected = Counter(
        (token, rank) for rank, chunks in enumerate(pieces) for token in wanted(chunks)
    )
    assert home == expected


def check(work: Workload, machines: Machines, at_once: int) -> None:
    rounds = rounds_by_machine(work, machines, at_once)
    sent = Counter[int]()
    for each in rounds:
        sent += check_round(each.pieces, machines)
        assert all(len({c.owner for c in chunks}) <= at_once for chunks in each.pieces)
        assert all(len({machines[c.owner] for c in chunks}) <= 1 for chunks in each.pieces)
    shards = [positions(keys) for keys in work.keys]
    for rank, queries in enumerate(work.queries):
        seen = Counter(t for each in rounds for t in wanted(each.pieces[rank]))
        assert all(times == 1 for times in seen.values()), "a key comes in two rounds"
        for owner, keys in enumerate(shards):
            for at, key in enumerate(keys):
                if owner != rank and any(sees(work.visible, q, key) for q in positions(queries)):
                    assert seen[owner, at], "a key that is seen does not come"
    schedule = by_relays(work, machines, at_once)
    relayed = crossing(schedule, machines, JOB, relayed=True)
    assert relayed.forward == tuple(JOB.token_bytes * sent[r] for r in range(len(machines)))
    assert sum(relayed.backward) == sum(relayed.forward) * 2
    plain = gather(work, [*map(Block.of, rounds_of(work, len(machines)))])
    most = crossing(plain, machines, JOB)
    assert sum(relayed.forward) <= sum(most.forward)
    assert relayed.total <= most.total


@settings(deadline=None, max_examples=80)
@given(st.sampled_from(sorted(LAYOUTS)), masks, placed, st.integers(1, 7))
def test_each_needed_key_crosses_to_a_machine_once(layout, mask, machines, at_once):
    everyone = all_segments(layout, len(machines), 24)
    check(Workload(everyone, everyone, mask), machines, at_once)


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from(sorted(LAYOUTS)), placed, st.integers(0, 30), st.integers(0, 30),
    st.booleans(), st.integers(1, 4),
)  # fmt: skip
def test_so_it_does_of_other_keys_than_queries(layout, machines, queries, keys, causal, at_once):
    sides = (all_segments(layout, len(machines), length) for length in (queries, keys))
    check(Workload(*sides, Mask(causal)), machines, at_once)


def test_the_lower_bound_of_two_machines():
    """With zigzag and causal half of the keys cross: one machine's late or early chunks."""
    everyone = all_segments("zigzag", 4, 64)
    work, two = Workload(everyone, everyone, Mask(causal=True)), (0, 0, 1, 1)
    of_machine = 2 * count(everyone[0]) * JOB.token_bytes
    found = crossing(by_relays(work, two, 4), two, JOB, relayed=True)
    plain = crossing(gather(work, [*map(Block.of, rounds_of(work, 4))]), two, JOB)
    assert sum(found.forward[:2]) == 0.5 * of_machine
    assert sum(plain.forward[:2]) == of_machine
    hops = crossing(ring(work), two, JOB)
    assert sum(hops.forward[:2]) == 1.5 * of_machine
    assert max(found.forward) <= 0.5 * of_machine


def test_keys_cross_by_as_many_ranks_as_a_machine_has():
    everyone = all_segments("contiguous", 8, 64)
    machines = (0, 1) * 4
    found = crossing(
        by_relays(Workload(everyone, everyone, Mask()), machines, 8), machines, JOB, relayed=True
    )
    assert {*found.forward} == {8 * JOB.token_bytes}


@pytest.mark.parametrize(("machines", "crosses"), [((0, 0, 1, 1), 0), ((0, 1, 0, 1), 1)])
def test_swaps_cross_between_neighbours_of_two_machines(machines, crosses):
    everyone = all_segments("contiguous", 4, 16)
    found = swap_crossing(Workload(everyone, everyone, Mask()), machines, JOB, degree=2)
    assert found.forward == found.backward == (4 * crosses * (JOB.token_bytes + 2 * 2 * 5),) * 4
