"""Doubling: which maps travel, counted. Its results are tested with the scan's."""

import torch

from ring_attention_pytorch.recurrent import ring_scan
from tests.support import threads
from tests.support.recurrent_cases import Spread


def test_more_ranks_than_16_get_few_maps_each() -> None:
    size, shape = 18, (1, 2, 2)
    spread = Spread(size, 72, 1, "zigzag", None)  # 36 runs, 6 doublings

    def main(ring):
        plan = spread.plan(ring)
        m = torch.full((len(plan.mine), *shape), 0.25)
        sent = ring.hub.sent_bytes[ring.rank]
        state, _ = ring_scan(m, torch.ones(len(plan.mine), *shape), plan=plan)
        maps = (ring.hub.sent_bytes[ring.rank] - sent) / (2 * m[0].nbytes)
        first = min(run.position for run in plan.mine) // 2
        # S = S / 2 + 1 in each number
        assert torch.allclose(state[0], torch.full(shape, 2.0 - 2.0 ** (1 - first)))
        return maps

    of_ranks, _ = threads.run(size, main)
    assert max(of_ranks) <= 2 * 7  # each run for each doubling, and to the one after it
