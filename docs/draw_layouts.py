"""Draws docs/layouts.svg, as narrow as a phone can show: `python docs/draw_layouts.py`.

On top, which of 4 ranks holds which of 16 tokens; below, the causal scores, each row in the colour
of the rank that computes it, so that uneven work is uneven ink, and how many each rank computes.
"""

from pathlib import Path

from ring_attention_pytorch.geometry.layouts import LAYOUTS, all_segments
from ring_attention_pytorch.geometry.tiles import Mask, tiles, visible_pairs
from ring_attention_pytorch.svg import COLOURS, FAINT, box, page, text

RANKS, TOKENS, CELL, PANEL = 4, 16, 10, 180


def drawing() -> str:
    panels = (panel(name, PANEL * i + 10) for i, name in enumerate(LAYOUTS))
    return page(PANEL * 3, 244, *panels)


def panel(layout: str, x: int) -> str:
    segments = all_segments(layout, RANKS, TOKENS)
    owner = {
        s.start + s.stride * i: rank
        for rank, held in enumerate(segments)
        for s in held
        for i in range(s.length)
    }
    parts = [text(x, 20, layout, size=17, weight="bold")]
    parts += [cell(x + CELL * t, 32, COLOURS[owner[t]]) for t in range(TOKENS)]
    for query in range(TOKENS):
        for key in range(TOKENS):
            colour = COLOURS[owner[query]] if key <= query else FAINT
            parts.append(cell(x + CELL * key, 52 + CELL * query, colour))
    work = [
        sum(visible_pairs(tiles(mine, keys, Mask(causal=True))) for keys in segments)
        for mine in segments
    ]
    for rank, pairs in enumerate(work):
        parts.append(text(x + 42 * rank, 234, str(pairs), COLOURS[rank], size=16, weight="bold"))
    return "".join(parts)


def cell(x: int, y: int, colour: str) -> str:
    return box(x, y, CELL - 1, CELL - 1, colour)


if __name__ == "__main__":
    Path(__file__).with_name("layouts.svg").write_text(drawing())
