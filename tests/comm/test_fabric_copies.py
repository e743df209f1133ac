"""Copy engines: who pulls from whom, and by how many copies."""

from itertools import product, zip_longest
from types import SimpleNamespace

import pytest
import torch

from ring_attention_pytorch.comm import fabric_copies
from ring_attention_pytorch.comm.fabric_copies import CopyEngines
from ring_attention_pytorch.functional import ring_attn
from ring_attention_pytorch.geometry.layouts import all_segments
from ring_attention_pytorch.geometry.tiles import Mask
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.schedule.pieces import Workload, rounds_of
from tests.support import threads
from tests.support.cases import Attention, over_shared_memory


class Place(Ring):
    """A rank of a ring that sends nothing."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size


@pytest.mark.parametrize("size", range(2, 10))
@pytest.mark.parametrize(("layout", "causal"), [*product(("zigzag", "contiguous"), (False, True))])
def test_no_two_ranks_pull_from_one_at_a_time(size, layout, causal):
    held = all_segments(layout, size, 8 * size)
    work, by_rank = Workload(held, held, Mask(causal)), []
    (group,) = rounds_of(work, size)
    for rank in range(size):
        ranks = tuple(range(size))
        (sources,) = CopyEngines(Place(rank, size), None, ranks)._sources([8] * size, group)
        assert {m[0].stop - m[0].start for s in sources for m in s.moves} <= {4, 8}
        by_rank.append([s.rank for s in sources for _ in s.moves])
    for asked in zip_longest(*by_rank):
        readers = [owner for owner in asked if owner is not None]
        assert len(readers) == len({*readers})


@pytest.mark.parametrize(("masked", "copies"), [(False, 18), (True, 36)])
def test_keys_and_values_of_a_piece_come_by_one_copy(masked, copies, monkeypatch):
    """And the mask by another, for each takes some time to begin.

    Of their eight chunks the four ranks need 6, 5, 4 and 3 of one another.
    """
    case, size, copied = Attention(64, "zigzag", causal=True, transport="gather"), 4, []

    def main(ring: threads.ThreadRing) -> None:
        (q, k, v), _, _, _ = case.data()
        at, _ = case.places(ring.rank, size)
        mine = [t[:, at] for t in (q, k, v)]
        mask = torch.ones(mine[0].shape[:2], dtype=torch.bool) if masked else None
        plan = RingPlan.make(*mine, causal=True, layout="zigzag", key_mask=mask, group=ring)
        ring_attn(*mine, plan=over_shared_memory(plan, mine, ring, size))

    monkeypatch.setattr(fabric_copies, "_copy", lambda place, t: copied.append(place.copy_(t)))
    threads.run(size, main)
    assert len(copied) == copies


def test_a_gathers_graphs_are_of_the_buffers_at_hand():
    told = []
    space = SimpleNamespace(follow_stream=lambda: told.append("waits"))
    space.keys, space.grads, space.swaps = "keys", "grads", "swaps"
    assert CopyEngines(Ring.alone(), space, (0,)).follow_stream() == ("keys", "grads", "swaps")
    assert told == ["waits"]
