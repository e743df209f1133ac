"""The plan of near and far."""

from dataclasses import replace

import pytest

from ring_attention_pytorch.schedule.hardware import H200
from ring_attention_pytorch.schedule.policy import is_few
from ring_attention_pytorch.summaries import SummaryPlan
from tests.support import threads
from tests.support.summary_cases import CASES

LAYOUTS = ("contiguous", "striped", "zigzag")


@pytest.mark.parametrize("name", CASES)
def test_how_long_the_far_part_takes_is_told_by_its_documents(name: str) -> None:
    """Whose tokens its rows and cells are not."""

    def main(ring: threads.ThreadRing) -> bool:
        for layout in LAYOUTS:
            case = replace(CASES[name], layout=layout)
            at, data = case.at(ring.rank, ring.size), case.data()
            masks = {mask: t[:, at] for mask, t in case.masks().items()}
            mine = [data[each][:, at] for each in "qkv"]
            far = SummaryPlan.make(*mine, **case.rule, **masks, layout=layout, group=ring).far
            if far is not None and not is_few(far.blocks, far.chosen.shape, H200):
                return False
        return True

    assert all(threads.run(2, main)[0])
