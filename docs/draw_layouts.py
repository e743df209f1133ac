"""Draws docs/layouts.svg: `python docs/draw_layouts.py`.

Left, which of 4 ranks holds which of 16 tokens; right, the causal scores, each row in the
colour of the rank that computes it, so that uneven work is uneven ink.
"""

from pathlib import Path

from ring_attention_pytorch.geometry.layouts import LAYOUTS, all_segments
from ring_attention_pytorch.geometry.tiles import Mask, tiles, visible_pairs
from ring_attention_pytorch.svg import COLOURS, FAINT, box, page, text

RANKS, TOKENS, CELL, PANEL = 4, 16, 14, 300


def drawing() -> str:
    panels = (panel(name, PANEL * i + 20) for i, name in enumerate(LAYOUTS))
    return page(PANEL * 3, 360, *panels)


def panel(layout: str, x: int) -> str:
    segments = all_segments(layout, RANKS, TOKENS)
    owner = {
        s.start + s.stride * i: rank
        for rank, held in enumerate(segments)
        for s in held
        for i in range(s.length)
    }
    parts = [text(x, 24, layout, size=16, weight="bold")]
    parts += [cell(x + CELL * t, 36, COLOURS[owner[t]]) for t in range(TOKENS)]
    parts.append(text(x, 70, "16 tokens in order, coloured by rank"))
    for query in range(TOKENS):
        for key in range(TOKENS):
            colour = COLOURS[owner[query]] if key <= query else FAINT
            parts.append(cell(x + CELL * key, 84 + CELL * query, colour))
    work = [
        sum(visible_pairs(tiles(mine, keys, Mask(causal=True))) for keys in segments)
        for mine in segments
    ]
    parts.append(text(x, 330, "visible pairs of each rank:"))
    for rank, pairs in enumerate(work):
        parts.append(text(x + 55 * rank, 350, str(pairs), COLOURS[rank], weight="bold"))
    return "".join(parts)


def cell(x: int, y: int, colour: str) -> str:
    return box(x, y, CELL - 1, CELL - 1, colour)


if __name__ == "__main__":
    Path(__file__).with_name("layouts.svg").write_text(drawing())
