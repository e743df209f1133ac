"""Draws docs/layouts.svg: `python docs/draw_layouts.py`.

Left, which of 4 ranks holds which of 16 tokens; right, the causal scores, each row in the
colour of the rank that computes it, so that uneven work is uneven ink.
"""

from pathlib import Path

from ring_attention_pytorch.geometry.layouts import LAYOUTS, all_segments
from ring_attention_pytorch.geometry.tiles import Mask, tiles, visible_pairs

RANKS, TOKENS, CELL, PANEL = 4, 16, 14, 300
COLOURS = ("#4269d0", "#efb118", "#ff725c", "#3ca951")
INK, FAINT = "#57606a", "#d8dee4"


def drawing() -> str:
    panels = "".join(panel(name, PANEL * i + 20) for i, name in enumerate(LAYOUTS))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{PANEL * 3}" height="360" '
        f'font-family="system-ui, sans-serif" font-size="13">{panels}</svg>\n'
    )


def panel(layout: str, x: int) -> str:
    segments = all_segments(layout, RANKS, TOKENS)
    owner = {
        s.start + s.stride * i: rank
        for rank, held in enumerate(segments)
        for s in held
        for i in range(s.length)
    }
    parts = [text(x, 24, layout, "bold", 16)]
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
        parts.append(text(x + 55 * rank, 350, str(pairs), "bold", 13, COLOURS[rank]))
    return "".join(parts)


def cell(x: int, y: int, colour: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{CELL - 1}" height="{CELL - 1}" fill="{colour}"/>'


def text(
    x: int, y: int, words: str, weight: str = "normal", size: int = 13, colour: str = INK
) -> str:
    style = f'font-weight="{weight}" font-size="{size}" fill="{colour}"'
    return f'<text x="{x}" y="{y}" {style}>{words}</text>'


if __name__ == "__main__":
    Path(__file__).with_name("layouts.svg").write_text(drawing())
