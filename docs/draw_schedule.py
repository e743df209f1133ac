"""Draws docs/design/schedules.svg: `python -m docs.draw_schedule`.

Four schedules of one case, as two streams of one rank: what it computes, and what is under way to
it. Steps are those of `ring_attention_pytorch/schedule/steps.py`, lengths of bars the seconds that
`ring_attention_pytorch/schedule/cost.py` predicts. A bar says whose keys or gradients these are.
"""

from pathlib import Path
from typing import NamedTuple

from ring_attention_pytorch.geometry.layouts import all_segments
from ring_attention_pytorch.geometry.tiles import Mask
from ring_attention_pytorch.schedule import cost
from ring_attention_pytorch.schedule.cost import H200
from ring_attention_pytorch.schedule.pieces import (
    KVShape,
    Workload,
    in_two_stages,
    schedule,
)
from ring_attention_pytorch.schedule.steps import (
    KEYS,
    Block,
    Part,
    Program,
    Schedule,
    Transfer,
    gather,
    gather_first,
    ring,
)

HERE = Path(__file__).parent
RANKS, TOKENS, RANK = 4, 2048, 1  # tokens of each rank; the rank that is drawn
SHAPE = KVShape(batch=1, heads=32, key_heads=8, d=128, d_v=128, itemsize=2)
PIXELS = 0.26  # of a microsecond
LEFT, HIGH, GAP, PANEL = 92, 20, 5, 98
OWN, OTHERS, ALL = "#4269d0", "#b07d00", "#7a5195"
KEYS_COME, GRADS_GO = "#3ca951", "#d0503c"
LEGEND = (
    (LEFT, "computes on own keys", OWN),
    (LEFT + 175, "on others' keys", OTHERS),
    (LEFT + 295, "on all together", ALL),
    (LEFT + 420, "keys come", KEYS_COME),
    (LEFT + 510, "gradients travel", GRADS_GO),
)
INK, FAINT = "#57606a", "#d8dee4"


class Bar(NamedTuple):
    """Something that takes a stream from one microsecond to another."""

    start: float
    stop: float
    colour: str
    words: str


def schedules() -> dict[str, Schedule]:
    """Return the four schedules of a causal zigzag sequence over four ranks."""
    everyone = all_segments("zigzag", RANKS, RANKS * TOKENS)
    work = Workload(everyone, everyone, Mask(causal=True))
    rounds = [Block.of(made) for made in schedule(work, at_once=RANKS - 1)]
    return {
        "ring": ring(work),
        "gather": gather(work, rounds, cut=True),
        "gather, in two stages": gather(work, [Block.of(in_two_stages(work))], cut=True),
        "gather first": gather_first(work),
    }


def bars(program: Program, back: bool) -> tuple[list[Bar], list[Bar]]:
    """Return what is computed and what travels, as `cost.predict` times it."""
    a_flop = 2.5 / H200.backward if back else 1 / H200.forward
    computed, moved, arrived = [], [], {}
    now = link = 0.0
    for wait, start, part in program.steps:
        now = max([now, *(arrived[number] for number in wait)])
        for number in start:
            transfer, begin = program.transfers[number], max(now, link)
            near, far = cost._moved(program, transfer, RANK, H200.domain)
            one = cost._bytes_of(transfer, SHAPE)
            link = begin + 1e6 * cost._transfer_seconds(transfer, near * one, far * one, H200)
            arrived[number] = link
            colour = KEYS_COME if transfer.kind == KEYS else GRADS_GO
            moved.append(Bar(begin, link, colour, _whose(program, transfer)))
        if part is not None:
            seconds = cost._part_seconds(program, part, RANK, SHAPE, H200, a_flop)
            distances = program.blocks[part.block].distances
            colour = OTHERS if part.block else OWN
            colour = ALL if part.block and 0 in distances else colour
            computed.append(Bar(now, now + 1e6 * seconds, colour, _words(program, part)))
            now = computed[-1].stop
    return computed, moved


def _words(program: Program, part: Part) -> str:
    """Return how far behind the rank the owners are whose keys these are."""
    block = program.blocks[part.block]
    if not part.block:
        return ("own", "own, rest")[part.stage]
    stage = block.stages[part.stage]
    distances = sorted(distance for group in stage for distance in group)
    return " ".join("own" if distance == 0 else f"-{distance}" for distance in distances)


def _whose(program: Program, transfer: Transfer) -> str:
    """Return whose keys come, or to whose gradients others' are added."""
    if transfer.kind == KEYS:
        return _words(program, Part(transfer.block, transfer.stage))
    return _words(program, Part(transfer.block)) if transfer.block else "own"


def drawing() -> str:
    parts, y, right = [], 52, 0.0
    for x, words, colour in LEGEND:
        parts.append(f'<rect x="{x}" y="12" width="12" height="12" fill="{colour}"/>')
        parts.append(text(x + 18, 22, words))
    for name, both in schedules().items():
        parts.append(text(LEFT, y, name, "bold"))
        x = LEFT
        for back, program in enumerate((both.forward, both.backward)):
            streams = bars(program, bool(back))
            end = max(bar.stop for stream in streams for bar in stream)
            title = f"{('forward', 'backward')[back]}, {end / 1000:.1f} ms"
            parts.append(text(x, y + 18, title, colour=INK))
            for row, (stream, label) in enumerate(zip(streams, ("computes", "under way"))):
                top = y + 24 + row * (HIGH + GAP)
                if not back:
                    parts.append(text(LEFT - 8, top + 14, label, anchor="end"))
                parts.append(box(x, top, end * PIXELS, FAINT))
                for bar in stream:
                    parts += drawn(bar, x, top)
            x += end * PIXELS + 30
        right, y = max(right, x), y + PANEL
    case = f"rank {RANK} of {RANKS}, {TOKENS} tokens each, zigzag, causal"
    parts.append(text(LEFT, y - 4, case + "; predicted for H200s of one NVLink domain"))
    parts.append(text(LEFT, y + 14, "-1: keys, or gradients, of the owner one place behind"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{right:.0f}" height="{y + 28}" '
        'font-family="system-ui, sans-serif" font-size="12">'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


def drawn(bar: Bar, x: float, top: float) -> list[str]:
    wide = (bar.stop - bar.start) * PIXELS
    left = x + bar.start * PIXELS
    parts = [box(left, top, max(wide - 1, 1), bar.colour)]
    if bar.words and wide > 7 * len(bar.words):
        parts.append(text(left + 4, top + 14, bar.words, colour="white"))
    return parts


def box(x: float, y: float, wide: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{HIGH}" fill="{colour}"/>'


def text(
    x: float, y: float, words: str, weight: str = "normal", colour: str = INK, anchor: str = "start"
) -> str:
    style = f'font-weight="{weight}" fill="{colour}" text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y}" {style}>{words}</text>'


if __name__ == "__main__":
    (HERE / "design" / "schedules.svg").write_text(drawing())
