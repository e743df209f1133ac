"""The common part of fabrics through shared memory: swaps, and who has whose gradients."""

from hypothesis import given
from hypothesis import strategies as st

from ring_attention_pytorch.comm.fabric_shared import SharedMemory, Source, _by_stretch
from tests.support import threads
from tests.support.positions import quickly
from tests.support.swaps import check_swapped


def test_each_rank_gets_its_head_of_all_tokens():
    def fabric(ring):
        shared = threads.shared_by(ring)
        shared.space.reserve(None, swaps=4096)
        return SharedMemory(ring, shared.space, shared.ranks)

    check_swapped(fabric)


@st.composite
def sources(draw):
    """Parts of others' memory, whose places here do not overlap; those there may be anywhere."""
    found = []
    for rank in range(draw(st.integers(1, 3))):
        cuts = sorted(draw(st.sets(st.integers(0, 20), max_size=6)))
        moves = []
        for start, stop in zip(cuts[::2], cuts[1::2]):
            there = draw(st.integers(0, 30))
            moves.append((slice(there, there + stop - start), slice(start, stop)))
        found.append(Source(rank, 50, tuple(moves)))
    return found


def token_by_token(of: list[Source]) -> dict[int, list[tuple[int, int]]]:
    """By own token, which ranks have something for it, and where."""
    found: dict[int, list[tuple[int, int]]] = {}
    for source in of:
        for there, here in source.moves:
            for k in range(here.stop - here.start):
                found.setdefault(here.start + k, []).append((source.rank, there.start + k))
    return found


@quickly
@given(sources())
def test_stretches_have_all_that_others_have_of_each_token(of):
    found = {}
    for here, users in _by_stretch(of):
        for k in range(here.stop - here.start):
            assert here.start + k not in found
            found[here.start + k] = [(rank, there.start + k) for rank, _, there in users]
            assert {length for _, length, _ in users} == {50}
    assert found == token_by_token(of)


@quickly
@given(sources())
def test_joined_moves_are_the_same_copies(of):
    joined = [source.joined() for source in of]
    assert token_by_token(joined) == token_by_token(of)
    assert all(len(a.moves) <= len(b.moves) for a, b in zip(joined, of))
