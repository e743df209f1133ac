"""A number of what a cache holds: the same after the same deeds, another after others."""

import random

from ring_attention_pytorch.inference.lineage import Lineage


def test_new_tokens_add_up_to_what_is_counted_anew() -> None:
    """After random deeds the number depends on lengths, order and padding alone."""
    draw, seen = random.Random(0), {}
    for _ in range(400):
        lineage, lengths = Lineage(3, 1), [0, 0, 0]
        order, starts = [0, 1, 2], [0, 0, 0]
        for _ in range(draw.randint(0, 3)):
            n = draw.randint(0, 2)
            lineage.advance(0, n)
            lengths = [length + n for length in lengths]
            which = draw.randrange(4)
            if which == 0:
                beams = draw.sample(range(3), 3)
                lineage.reorder(beams)
                order, lengths = [order[i] for i in beams], [lengths[i] for i in beams]
                lineage.count([lengths])
            elif which == 1:
                starts = [draw.randint(0, 1) for _ in range(3)]
                lineage.pad(starts)
            elif which == 2:
                lengths = [draw.randint(0, length) for length in lengths]
                lineage.count([lengths])
        state = *lengths, *order, *starts
        assert seen.setdefault(state, lineage.mark(0)) == lineage.mark(0)
    assert len({*seen.values()}) == len(seen) > 100


def test_what_was_forked_is_told_apart() -> None:
    one, other = Lineage(2, 1), Lineage(2, 1)
    for each in (one, other):
        each.reorder([0, 0])
    other.reorder([1, 0])  # each has had other tokens since
    assert one.mark(0) != other.mark(0)
