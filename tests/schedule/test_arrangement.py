"""Where tokens lie in shared memory: a rank that pulls its moves holds all that it computes on.

Memory is played with positions in place of keys.
"""

import pytest

from ring_attention_pytorch.geometry.layouts import LAYOUTS, all_segments
from ring_attention_pytorch.geometry.segments import segment_positions
from ring_attention_pytorch.geometry.tiles import Mask
from ring_attention_pytorch.schedule.arrangement import Arrangement, arrangements, moves
from ring_attention_pytorch.schedule.pieces import Workload
from ring_attention_pytorch.schedule.steps import KEYS, Program, gather_first

MASKS = [Mask(), Mask(causal=True), Mask(causal=True, window=4), Mask(window=1)]


def program_of(layout: str, size: int, length: int, mask: Mask, elsewhere: bool) -> Program:
    """Return the program of a rank's queries beside its keys, or beside those of another rank."""
    shards = all_segments(layout, size, length)
    queries = shards[::-1] if elsewhere else shards
    return gather_first(Workload(queries, shards, mask)).forward


def written(own: list[int], arranged: Arrangement) -> list[int | None]:
    """A rank's memory once it has put its own tokens there."""
    memory: list[int | None] = [None] * arranged.tokens
    for mine, at in arranged.own:
        assert mine.stop - mine.start == at.stop - at.start
        assert memory[at] == [None] * (at.stop - at.start), "two tokens at one place"
        memory[at] = own[mine]
    return memory


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize(("size", "length"), [(1, 9), (2, 16), (4, 32), (5, 23), (4, 3)])
def test_what_is_pulled_is_what_is_computed_on(layout, size, length, mask, elsewhere):
    program = program_of(layout, size, length, mask, elsewhere)
    arranged = arrangements(program)
    own = [segment_positions(keys).tolist() for keys in program.workload.keys]
    memories = [written(mine, each) for mine, each in zip(own, arranged)]
    for mine, memory in zip(own, memories):
        assert sorted(at for at in memory if at is not None) == sorted(mine)
    last = len(program.blocks) - 1
    pulled = [list(memory) for memory in memories]
    for transfer in program.transfers:
        if transfer.kind == KEYS and transfer.block == last:
            for rank in range(size):
                for owner, there, here in moves(program, transfer, rank, arranged):
                    assert owner != rank
                    pulled[rank][here] = memories[owner][there]
    for rank, (memory, each) in enumerate(zip(pulled, arranged)):
        chunks = program.chunks(last, rank)
        assert memory[: each.held] == [
            own[c.owner][at] for c in chunks for at in range(c.first, c.cols.stop)
        ]


@pytest.mark.parametrize("span", [slice(0, 4), slice(1, 3), slice(2, 2)])
def test_parts_of_own_tokens_are_found_where_they_lie(span):
    arranged = Arrangement(8, 7, ((slice(0, 1), slice(7, 8)), (slice(1, 4), slice(4, 7))))
    found = [
        pair
        for mine, at in arranged.find(span)
        for pair in zip(range(mine.start, mine.stop), range(at.start, at.stop))
    ]
    places = {0: 7, 1: 4, 2: 5, 3: 6}
    assert found == [(token, places[token]) for token in range(span.start, span.stop)]
