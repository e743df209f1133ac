"""Pictures of calls: the schedule, and beside it what was measured."""

from xml.etree import ElementTree

import torch

from ring_attention_pytorch import RingPlan, explain_plan, observe, ring_attn
from ring_attention_pytorch.ranks.ring import Ring

SHAPE = (1, 24, 4, 8)


def drawn(folder: str) -> tuple[str, str]:
    """A picture of a plan, before and after a call that was observed."""
    q = torch.randn(SHAPE, requires_grad=True)
    plan = RingPlan.make(q, q, q, causal=True, layout="zigzag", transport="gather")
    file = f"{folder}/{Ring().rank}.svg"
    texts = []
    for _ in range(2):
        said = explain_plan(plan, picture=file)
        assert said == explain_plan(plan)
        with open(file, encoding="utf-8") as written:
            texts.append(written.read())
        with observe():
            ring_attn(q, q, q, plan=plan).sum().backward()
    return texts[0], texts[1]


def test_a_picture_has_the_schedule_and_beside_it_what_was_measured(pools, tmp_path):
    for before, after in pools(3).run(drawn, str(tmp_path)):
        words, more = (
            [e.text for e in ElementTree.fromstring(t).iter() if e.text] for t in (before, after)
        )
        assert "gather, predicted by speeds of H200s" in words
        assert not any(word.startswith("measured") for word in words)
        assert "measured in the last observed call, on cpu" in more
        predicted, both = (text.count("<rect") for text in (before, after))
        bars = predicted - 5 - 4  # the legend, and four streams
        assert both == 5 + 2 * (4 + bars)  # as many again
