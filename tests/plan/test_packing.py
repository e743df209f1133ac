"""Documents of spread sequences: what ranks gather is what the whole sequence says."""

from types import SimpleNamespace

import pytest
import torch

from ring_attention_pytorch.geometry.documents import of_borders, of_ids
from ring_attention_pytorch.geometry.layouts import LAYOUTS, all_segments
from ring_attention_pytorch.geometry.segments import segment_positions
from ring_attention_pytorch.plan.packing import (
    exchange_json,
    gather_packings,
    local_packing,
    whole_packing,
)
from tests.support import threads
from tests.support.packed import PACKED, N


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("name", PACKED)
def test_ids_of_all_ranks_are_those_of_the_whole(name, layout):
    whole = torch.tensor(PACKED[name])
    segments = all_segments(layout, 3, N)

    def main(ring):
        ids = whole[:, segment_positions(segments[ring.rank])]
        return whole_packing(ring, ids, None, segments, len(whole))

    results, hub = threads.run(3, main)
    assert results == [tuple(of_ids(row) for row in whole)] * 3
    assert max(hub.exchanges) == 0  # over the host alone


def test_ids_may_be_any_integers():
    ids = torch.tensor([[-3, -3, 2**40, 2**40, -3]])
    assert local_packing(ids, None, ids)[0].lengths == [3, 2]


def test_borders_of_one_sample_are_those_of_all():
    borders, others = [0, 4, 9], [0, 9]
    x = torch.zeros(2, 9, 4)
    assert local_packing(None, borders, x) == (of_borders(borders),) * 2
    assert local_packing(None, [borders, others], x) == (of_borders(borders), of_borders(others))
    assert local_packing(None, None, x) is None


def test_each_rank_brings_documents_of_its_own_samples():
    def main(ring):
        return gather_packings(ring, (of_borders([0, ring.rank + 1, 9]), of_borders([0, 9])))

    results, _ = threads.run(2, main)
    want = tuple(of_borders(b) for b in ([0, 1, 9], [0, 9], [0, 2, 9], [0, 9]))
    assert results == [want] * 2


@pytest.mark.parametrize("note", [b"\xff", b"no JSON", b"[" * 10**5])
def test_a_note_that_is_no_json_is_refused_with_the_rank_that_sent_it(note):
    told = SimpleNamespace(first=1, size=2, gather_notes=lambda *_: [b"3", b"4", note])
    with pytest.raises(ValueError, match="documents: the note of rank 2 can't be read"):
        exchange_json(told, "documents", [])
