"""The runs of ranks, against loops over single tokens."""

import random
from itertools import pairwise

import pytest
import torch

from ring_attention_pytorch.geometry.balance import balanced
from ring_attention_pytorch.geometry.documents import of_borders, of_ids
from ring_attention_pytorch.geometry.layouts import all_segments
from ring_attention_pytorch.geometry.segments import Segment, segment_positions
from ring_attention_pytorch.recurrent.runs import Runs
from tests.support.recurrent_cases import borders_of


def by_token(segments, packing, batch):
    """Every rank's tokens one by one: (sample, document, position in it), and where each is."""
    places = {}
    for rank, of_rank in enumerate(segments):
        for sample in range(batch):
            for index, position in enumerate(segment_positions(of_rank).tolist()):
                document, in_document = 0, position
                if packing is not None:
                    documents = packing[sample]
                    run = next(
                        i for i, r in enumerate(documents.runs) if r.start <= position < r.stop
                    )
                    document = documents.runs[run].document
                    in_document = position - documents.offsets[run]
                places[sample, document, in_document] = (rank, index)
    return places


def drawn(seed: int):
    """Segments of every rank, documents of each sample, and their number."""
    draw = random.Random(seed)
    size, length, batch = draw.choice([1, 2, 3, 4, 8]), draw.randrange(0, 60), draw.choice([1, 2])
    packing = None
    if length and draw.random() < 0.8:
        packing = tuple(of_borders(borders_of(draw, length)) for _ in range(batch))
        if draw.random() < 0.3:  # documents that come back
            ids = torch.tensor([draw.randrange(3) for _ in range(length)])
            packing = (of_ids(ids),) * batch
    layout = draw.choice(["contiguous", "zigzag"])
    if packing and draw.random() < 0.4:
        layout = balanced(borders_of(draw, length), size)
    return all_segments(layout, size, length), packing, batch


@pytest.mark.parametrize("seed", range(30))
def test_runs_are_the_tokens_of_each_document_in_order(seed) -> None:
    segments, packing, batch = drawn(seed)
    runs, places = Runs.of(segments, packing, batch), by_token(segments, packing, batch)
    found = {}
    for chain in runs.chains:
        position = 0
        for run in chain:
            assert run.position == position
            for step in range(run.length):
                found[run.sample, run.document, position + step] = run.rank, run.start + step
            position += run.length
    assert found == places
    assert sum(run.length for held in runs.held for run in held) == len(places)
    for held in runs.held:  # in the order held, and as few as can be
        assert [*held] == sorted(held, key=lambda run: (run.sample, run.start))
        for one, two in pairwise(held):
            after = one.start + one.length, one.position + one.length
            assert (*one[1:3], *after) != (*two[1:3], two.start, two.position)


@pytest.mark.parametrize("seed", range(30, 50))
def test_tokens_before_runs_and_the_last_ones(seed) -> None:
    segments, packing, batch = drawn(seed)
    runs, places = Runs.of(segments, packing, batch), by_token(segments, packing, batch)
    width = 1 + seed % 5
    found = {
        (run, place): (owner.rank, owner.sample, owner.start + index)
        for run, place, owner, index in runs.before(width)
    }
    want = {}
    for run in [run for held in runs.held for run in held]:
        for place in range(width):
            at = run.sample, run.document, run.position - width + place
            if at in places:
                rank, index = places[at]
                want[run, place] = (rank, run.sample, index)
    assert found == want
    whole = {}
    for rank, of_rank in enumerate(segments):
        for index, position in enumerate(segment_positions(of_rank).tolist()):
            whole[position] = rank, index
    ends = [run and (run.rank, run.start + run.length - 1) for run in runs.ends()]
    assert ends == [whole.get(len(whole) - 1)] * batch


def test_only_runs_that_others_need_are_sent() -> None:
    segments = all_segments("zigzag", 2, 16)  # rank 0: 0-3 and 12-15, rank 1: 4-11
    packing = (of_borders([0, 2, 6, 8, 13, 16]),)
    runs = Runs.of(segments, packing, 1)
    assert [run.length for run in runs.held[0]] == [2, 2, 1, 3]
    assert runs.sent(0, final=False) == [1]
    assert runs.sent(0, final=True) == [1, 3]
    assert runs.sent(1, final=True) == [2]
    assert runs.continues
    assert not Runs.of(all_segments("contiguous", 2, 16), (of_borders([0, 8, 16]),), 1).continues


def test_halves_of_the_last_zigzag_rank_are_one_run() -> None:
    runs = Runs.of(all_segments("zigzag", 3, 12), None, 1)
    assert [len(held) for held in runs.held] == [2, 2, 1]


def test_striped_shards_are_refused() -> None:
    with pytest.raises(ValueError, match="need consecutive tokens on each rank, and the striped"):
        Runs.of(all_segments("striped", 2, 16), None, 1)
    assert len(Runs.of(((Segment(0, 1, 16),),), None, 1).held[0]) == 1
