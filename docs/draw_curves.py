"""Draws docs/curves.svg: `python -m docs.draw_curves`. Losses of benchmarks/results/curves.json.

A row of two panels for each model and mask: the losses, a median of some steps each, and how far
they are from those of a single rank. Colours follow a reader's light or dark mode.
"""

import json
from collections.abc import Sequence
from math import log10
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.lib.training import differences, groups, name

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks" / "results" / "curves.json"
LEFT, TOP, WIDE, HIGH, GAP = 48, 34, 420, 160, 64
STEPS = 5  # of which a point is the median
DECADES = 6  # below 1, of differences
# wide and light below, thin on it: curves that lie on one another can all be seen
STROKES = {
    ("ring", 1): ("one", 7.0), ("ring", 2): ("two", 3.5), ("ring", 4): ("four", 1.3),
    ("context_parallel", 2): ("peer", 1.3), ("context_parallel", 4): ("peer", 1.3),
}  # fmt: skip
STYLE = """\
<style>
text { fill: #1f2328; } .grid { stroke: #d8dee4; } .panel { fill: #ffffff; stroke: #d8dee4; }
polyline { fill: none; stroke-linejoin: round; }
.one { stroke: #e8c891; } .two { stroke: #3ca951; } .four { stroke: #1f4e9c; }
.peer { stroke: #c03030; stroke-dasharray: 5 4; }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; } .grid { stroke: #30363d; } .panel { fill: #0d1117; stroke: #30363d; }
.one { stroke: #7d6334; } .two { stroke: #4fc767; } .four { stroke: #8ab4ff; }
.peer { stroke: #ff7b72; }
}
</style>"""


def smooth(losses: Sequence[float]) -> list[float]:
    """Return the medians of some steps each.

    >>> smooth([5.0, 3.0, 4.0, 9.0, 1.0, 2.0])
    [4.0, 2.0]
    """
    return [median(losses[at : at + STEPS]) for at in range(0, len(losses), STEPS)]


def polyline(values: Sequence[float], box: tuple[float, float], high: float, row: Any) -> str:
    """Draw values between 0 and `high` in a box, by the style of a run."""
    kind, width = STROKES[row["subject"], row["ranks"]]
    x0, y0 = box
    points = " ".join(
        f"{x0 + WIDE * i / max(1, len(values) - 1):.1f},{y0 + HIGH * (1 - value / high):.1f}"
        for i, value in enumerate(values)
    )
    return f'<polyline class="{kind}" stroke-width="{width}" points="{points}"/>'


def panel(box: tuple[float, float], title: str, labels: Sequence[str], steps: int) -> list[str]:
    """Draw a frame with its title, lines across, and labels of these from below to the top."""
    x0, y0 = box
    parts = [
        f'<rect class="panel" x="{x0}" y="{y0}" width="{WIDE}" height="{HIGH}"/>',
        f'<text x="{x0}" y="{y0 - 9}">{title}</text>',
        f'<text x="{x0 + WIDE}" y="{y0 + HIGH + 15}" text-anchor="end">step {steps}</text>',
    ]
    for i, label in enumerate(labels):
        y = y0 + HIGH * (1 - i / (len(labels) - 1))
        parts.append(f'<line class="grid" x1="{x0}" x2="{x0 + WIDE}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{x0 - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    return parts


def decades(difference: float) -> float:
    """Return how high a difference is drawn, from 0 to 1.

    >>> decades(1.0), decades(1e-3), decades(0.0)
    (1.0, 0.5, 0.0)
    """
    return max(0.0, 1 + log10(max(difference, 1e-12)) / DECADES)


def drawing(rows: Sequence[dict[str, Any]]) -> str:
    """Draw all runs: the losses, and beside them the differences from a single rank."""
    parts, shown, y = [], dict[str, str](), TOP
    for title, runs in groups(rows).items():
        steps, left, right = len(runs[0]["losses"]), (LEFT, y), (LEFT + WIDE + GAP, y)
        lines = [smooth(run["losses"]) for run in runs]
        high = max(max(line) for line in lines)
        parts += panel(left, f"loss: {title}", ("0", f"{high / 2:.1f}", f"{high:.1f}"), steps)
        parts += [polyline(line, left, high, run) for line, run in zip(lines, runs)]
        parts += panel(right, "difference from one rank", ("1e-6", "1e-4", "1e-2", "1"), steps)
        for run in runs[1:]:
            far = smooth(differences(run["losses"], runs[0]["losses"]))
            parts.append(polyline([decades(each) for each in far], right, 1.0, run))
        shown |= {name(run): STROKES[run["subject"], run["ranks"]][0] for run in runs}
        y += HIGH + GAP
    widths = dict(STROKES.values())
    for number, (words, kind) in enumerate(shown.items()):
        x, ends = LEFT + number * 205, f"{LEFT + number * 205},{y} {LEFT + number * 205 + 24},{y}"
        parts.append(f'<polyline class="{kind}" stroke-width="{widths[kind]}" points="{ends}"/>')
        parts.append(f'<text x="{x + 32}" y="{y + 4}">{words}</text>')
    size = f"0 0 {LEFT + 2 * WIDE + GAP + 16} {y + 20}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" font-family="system-ui, '
        f'sans-serif" font-size="13">{STYLE}' + "".join(parts) + "</svg>\n"
    )


if __name__ == "__main__":
    (HERE / "curves.svg").write_text(drawing(json.loads(RESULTS.read_text())))
