"""Schedules, walked on ints: who copies what from whom, and when; and transports that keep to them.

The walker knows no tensors. It follows every token, and whose gradients have been added to it.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ring_attention_pytorch.geometry.layouts import LAYOUTS, all_segments, count
from ring_attention_pytorch.geometry.segments import Segments
from ring_attention_pytorch.geometry.tiles import Mask
from ring_attention_pytorch.schedule.pieces import Workload, in_two_stages
from ring_attention_pytorch.schedule.pieces import rounds_of as rounds_of
from ring_attention_pytorch.schedule.steps import (
    GRADS,
    KEYS,
    Block,
    Part,
    Program,
    Schedule,
    Transfer,
    _gathered,
    gather,
    gather_first,
    ring,
)

MASKS = (Mask(), Mask(causal=True), Mask(causal=True, window=3), Mask(window=2))


def positions(segments: Segments) -> list[int]:
    return [start + i * stride for start, stride, length in segments for i in range(length)]


def sees(mask: Mask, query: int, key: int) -> bool:
    """True if this query sees this key, by the definition."""
    far = mask.window is not None and abs(query - key) > mask.window
    return not far and not (mask.causal and key > query)


class Walker:
    """All ranks at once: what has come to them, and whose gradients each token's sum has."""

    def __init__(self, program: Program) -> None:
        self.program, self.work = program, program.workload
        self.ranks = range(len(self.work.keys))
        self.where = {  # the position of each token of a block
            (rank, block): positions(self.of(block, rank))
            for rank in self.ranks
            for block in range(len(program.blocks))
        }
        self.here = {(rank, 0): {*range(len(self.where[rank, 0]))} for rank in self.ranks}
        self.sums: dict[tuple[int, int], list[Counter[int]]] = {
            key: [Counter() for _ in there] for key, there in self.where.items()
        }
        self.gone: set[tuple[int, int, int]] = set()  # gradients that were sent on
        self.seen: list[Counter[tuple[int, int]]] = [Counter() for _ in self.ranks]
        self.under_way: dict[int, list[tuple[int, int, list[Counter[int]]]]] = {}

    def of(self, block: int, rank: int) -> Segments:
        """Positions of all that a block has."""
        stages = range(len(self.program.spans(block, rank)))
        parts = (self.program.segments(Part(block, stage), rank) for stage in stages)
        return tuple(chain.from_iterable(parts))

    def walk(self) -> "Walker":
        for wait, start, part in self.program.steps:
            for number in wait:
                self.arrive(number)
            for number in start:
                assert number not in self.under_way, "started twice"
                self.under_way[number] = [*self.begin(self.program.transfers[number])]
            if part is not None:
                self.compute(part)
        assert not self.under_way, "nobody waits for it"
        return self

    def begin(self, transfer: Transfer) -> Iterator[tuple[int, int, list[Counter[int]]]]:
        """Begin a transfer: what each rank takes is as it is now."""
        for rank in self.ranks:
            peers = {(rank - distance) % len(self.ranks) for distance in transfer.distances}
            for peer, there, to, length in self.program.copies(transfer, rank):
                assert peer in peers, "no message comes from there"
                source, target = (peer, transfer.source), (rank, transfer.block)
                taken, places = range(there, there + length), slice(to, to + length)
                assert self.where[source][there : there + length] == self.where[target][places]
                if transfer.kind == KEYS:
                    assert {*taken} <= self.here.get(source, set()), "sent before it came"
                sums = [self.sums[source][token] for token in taken]
                if transfer.kind == GRADS:
                    sent = {(*source, token) for token in taken}
                    assert not sent & self.gone, "sent twice"
                    self.gone |= sent
                yield rank, to, [total.copy() for total in sums]

    def arrive(self, number: int) -> None:
        transfer = self.program.transfers[number]
        for rank, to, sums in self.under_way.pop(number):
            target = rank, transfer.block
            tokens = {*range(to, to + len(sums))}
            if transfer.kind == KEYS:
                before = self.here.setdefault(target, set())
                assert not before & tokens, "came twice"
                before |= tokens
                continue
            assert not {(*target, token) for token in tokens} & self.gone, "came too late"
            for token, more in zip(sorted(tokens), sums):
                self.sums[target][token] += more

    def compute(self, part: Part) -> None:
        for rank in self.ranks:
            span = self.program.spans(part.block, rank)[part.stage]
            tokens = {*range(span.start, span.stop)}
            assert tokens <= self.here.get((rank, part.block), set()), "computed before it came"
            keys = positions(self.program.segments(part, rank))
            assert keys == self.where[rank, part.block][span]
            for token, key in zip(sorted(tokens), keys):
                assert (rank, part.block, token) not in self.gone, "sent before it was complete"
                self.sums[rank, part.block][token][rank] += 1
                for query in positions(self.work.queries[rank]):
                    if sees(self.work.visible, query, key):
                        self.seen[rank][query, key] += 1


def check(program: Program, back: bool) -> None:
    """Each visible pair is computed once, and each token has all gradients of it once."""
    walker = Walker(program).walk()
    everyone = [*chain.from_iterable(map(positions, walker.work.keys))]
    users = defaultdict(set)
    for rank in walker.ranks:
        queries = positions(walker.work.queries[rank])
        pairs = [(i, j) for i in queries for j in everyone if sees(walker.work.visible, i, j)]
        assert walker.seen[rank] == Counter(pairs), rank
        for _, key in pairs:
            users[key].add(rank)
    if not back:
        return
    for (rank, block), sums in walker.sums.items():
        for token, (key, total) in enumerate(zip(walker.where[rank, block], sums)):
            if block == 0:
                assert {user for user in users[key] if total[user] != 1} == set(), (rank, key)
                assert all(times == 1 for times in total.values()), (rank, key)
            else:
                kept = (rank, block, token) not in walker.gone
                assert not (kept and total), "gradients that nobody was sent"


def schedules(work: Workload, at_once: int) -> Iterator[Schedule]:
    yield ring(work)
    rounds = [*map(Block.of, rounds_of(work, at_once))]
    for low_priority in (False, True):
        yield gather(work, rounds, low_priority)
    if len(work.distances) > 2:
        yield gather(work, [Block.of(in_two_stages(work))])
        yield gather(work, [Block(in_two_stages(work).stages)])
    yield gather_first(work)


def check_all(work: Workload, at_once: int) -> None:
    for schedule in schedules(work, at_once):
        check(schedule.forward, back=False)
        check(schedule.backward, back=True)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("size", [1, 2, 4, 5])
def test_each_pair_is_computed_once_and_its_gradient_comes_home_once(size, layout, mask):
    for length, at_once in ((16, 9), (21, 1), (21, 2)):
        everyone = all_segments(layout, size, length)
        check_all(Workload(everyone, everyone, mask), at_once)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(sorted(LAYOUTS)), st.integers(1, 6), st.integers(0, 30), st.integers(0, 30),
    st.builds(Mask, st.booleans(), st.none() | st.integers(0, 9), st.none(), st.none()),
    st.integers(1, 6),
)  # fmt: skip
def test_so_it_is_of_other_keys_than_queries(layout, size, queries, keys, mask, at_once):
    sides = (all_segments(layout, size, length) for length in (queries, keys))
    check_all(Workload(*sides, mask), at_once)


@pytest.mark.parametrize("transport", ["ring", "gather"])
@pytest.mark.parametrize("memory", [None, 0])
def test_keys_held_at_once_do_not_grow_with_the_ring(transport, memory):
    """Two blocks of others', if they come one at a time."""
    everyone = all_segments("zigzag", 8, 128)
    work = Workload(everyone, everyone, Mask(causal=True))
    each = [Block((((distance,),),)) for distance in work.distances[1:]]
    schedule = ring(work) if transport == "ring" else gather(work, each)
    for program in schedule[1:]:
        assert most_held(program) == 2


def most_held(program: Program) -> int:
    """The most blocks of others' keys that are under way or still needed at once."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for number, (_, start, part) in enumerate(program.steps):
        for transfer in (program.transfers[i] for i in start):
            if transfer.kind == KEYS:
                first.setdefault(transfer.block, number)
                last[transfer.source] = number
        if part is not None:
            last[part.block] = number
    spans = [range(first[block], last[block] + 1) for block in first if block]
    return max(sum(at in span for span in spans) for at in range(len(program.steps)))


def test_no_rank_is_asked_for_more_than_it_holds():
    everyone = all_segments("striped", 3, 10)
    program = ring(Workload(everyone, everyone, Mask())).backward
    home = program.transfers[-1]
    for rank in range(3):
        (copy, *more) = program.copies(home, rank)
        assert copy.length + sum(each.length for each in more) == count(everyone[rank])


def test_of_rounds_in_stages_each_transfer_starts_once():
    everyone = all_segments("contiguous", 5, 23)
    own, *rounds = Block((((0,),),), True), Block((((1,),), ((2,),))), Block((((3,),), ((4,),)))
    program = _gathered(Workload(everyone, everyone, Mask()), [own, *rounds])
    Walker(program).walk()
    started = Counter(chain.from_iterable(step.start for step in program.steps))
    assert started == Counter(range(4))
