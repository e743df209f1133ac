"""Draws docs/design/schedules.svg: `python -m docs.draw_schedule`.

Four schedules of one case, as two streams of one rank: what it computes, and what is under way to
it. Steps are those of `ring_attention_pytorch/schedule/steps.py`, lengths of bars the seconds that
`ring_attention_pytorch/schedule/cost.py` predicts. A bar says whose keys or gradients these are.
"""

from pathlib import Path

from ring_attention_pytorch.geometry.layouts import all_segments
from ring_attention_pytorch.geometry.tiles import Mask
from ring_attention_pytorch.plan.picture import Panel
from ring_attention_pytorch.plan.picture import drawing as drawing_of
from ring_attention_pytorch.schedule.hardware import H200
from ring_attention_pytorch.schedule.pieces import (
    KVShape,
    Workload,
    in_two_stages,
    rounds_of,
)
from ring_attention_pytorch.schedule.steps import Block, Schedule, gather, gather_first, ring
from ring_attention_pytorch.schedule.timeline import predicted

HERE = Path(__file__).parent
RANKS, TOKENS, RANK = 4, 2048, 1  # tokens of each rank; the rank that is drawn
SHAPE = KVShape(batch=1, heads=32, key_heads=8, d=128, d_v=128, itemsize=2)
PIXELS = 0.26e6  # of a second


def schedules() -> dict[str, Schedule]:
    """Return the four schedules of a causal zigzag sequence over four ranks."""
    everyone = all_segments("zigzag", RANKS, RANKS * TOKENS)
    work = Workload(everyone, everyone, Mask(causal=True))
    rounds = [Block.of(made) for made in rounds_of(work, at_once=RANKS - 1)]
    return {
        "ring": ring(work),
        "gather": gather(work, rounds),
        "gather, in two stages": gather(work, [Block.of(in_two_stages(work))]),
        "gather first": gather_first(work),
    }


def drawing() -> str:
    panels = []
    for name, both in schedules().items():
        forward = predicted(both.forward, RANK, SHAPE, H200, back=False)
        backward = predicted(both.backward, RANK, SHAPE, H200, back=True)
        panels.append(Panel(name, {"forward": forward, "backward": backward}))
    case = f"rank {RANK} of {RANKS}, {TOKENS} tokens each, zigzag, causal"
    notes = [
        f"{case}; predicted for H200s of one NVLink domain",
        "-1: keys, or gradients, of the owner one place behind",
    ]
    return drawing_of(panels, notes, PIXELS)


if __name__ == "__main__":
    (HERE / "design" / "schedules.svg").write_text(drawing())
