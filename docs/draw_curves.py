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
from ring_attention_pytorch.svg import COLOURS, FAINT, PALE, box, line, page, text

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks" / "results" / "curves.json"
LEFT, TOP, WIDE, HIGH, GAP = 48, 34, 420, 160, 64
STEPS = 5  # of which a point is the median
ABREAST = 3  # runs that are explained in a line
DECADES = 6  # below 1, of differences
# wide and light below, thin on it: curves that lie on one another can all be seen
STROKES = {  # colour, width, dashes
    ("ring", 1): (COLOURS[1], 7.0, ""), ("ring", 2): (COLOURS[3], 3.5, ""),
    ("ring", 4): (COLOURS[0], 1.3, ""), ("context_parallel", 1): (COLOURS[2], 1.3, "5 4"),
    ("context_parallel", 2): (COLOURS[2], 1.3, "5 4"),
    ("context_parallel", 4): (COLOURS[2], 1.3, "5 4"),
}  # fmt: skip


def smooth(losses: Sequence[float]) -> list[float]:
    """Return the medians of some steps each.

    >>> smooth([5.0, 3.0, 4.0, 9.0, 1.0, 2.0])
    [4.0, 2.0]
    """
    return [median(losses[at : at + STEPS]) for at in range(0, len(losses), STEPS)]


def curve(
    values: Sequence[float], corner: tuple[float, float], high: float, row: Any, steps: int
) -> str:
    """Draw values between 0 and `high` in a panel of so many steps, by the stroke of a run."""
    x0, y0 = corner
    step = WIDE / max(1, -(-steps // STEPS) - 1)
    points = [(x0 + i * step, y0 + HIGH * (1 - value / high)) for i, value in enumerate(values)]
    return line(points, *STROKES[row["subject"], row["ranks"]])


def panel(corner: tuple[float, float], title: str, labels: Sequence[str], steps: int) -> list[str]:
    """Draw a ground with its title, lines across, and labels of these from below to the top."""
    x0, y0 = corner
    parts = [
        box(x0, y0, WIDE, HIGH, PALE),
        text(x0, y0 - 9, title),
        text(x0 + WIDE, y0 + HIGH + 15, f"step {steps}", anchor="end"),
    ]
    for i, label in enumerate(labels):
        y = y0 + HIGH * (1 - i / (len(labels) - 1))
        parts.append(line([(x0, y), (x0 + WIDE, y)], FAINT, width=1))
        parts.append(text(x0 - 6, y + 4, label, anchor="end"))
    return parts


def decades(difference: float) -> float:
    """Return how high a difference is drawn, from 0 to 1.

    >>> decades(1.0), decades(1e-3), decades(0.0)
    (1.0, 0.5, 0.0)
    """
    return max(0.0, 1 + log10(max(difference, 1e-12)) / DECADES)


def drawing(rows: Sequence[dict[str, Any]]) -> str:
    """Draw all runs: the losses, and beside them the differences from a single rank."""
    parts, shown, y = [], dict[str, tuple[str, float, str]](), TOP
    for title, runs in groups(rows).items():
        steps, left, right = len(runs[0]["losses"]), (LEFT, y), (LEFT + WIDE + GAP, y)
        lines = [smooth(run["losses"]) for run in runs]
        high = max(map(max, lines))
        parts += panel(left, f"loss: {title}", ("0", f"{high / 2:.1f}", f"{high:.1f}"), steps)
        parts += [curve(each, left, high, run, steps) for each, run in zip(lines, runs)]
        parts += panel(right, "difference from one rank", ("1e-6", "1e-4", "1e-2", "1"), steps)
        for run in runs[1:]:
            far = smooth(differences(run["losses"], runs[0]["losses"]))
            parts.append(curve([decades(each) for each in far], right, 1.0, run, steps))
        shown |= {name(run): STROKES[run["subject"], run["ranks"]] for run in runs}
        y += HIGH + GAP
    for number, (words, stroke) in enumerate(shown.items()):
        x, y_here = LEFT + number % ABREAST * 300, y + number // ABREAST * 20
        parts += [line([(x, y_here), (x + 24, y_here)], *stroke), text(x + 32, y_here + 4, words)]
    return page(LEFT + 2 * WIDE + GAP + 16, y + 20 * -(-len(shown) // ABREAST), *parts)


if __name__ == "__main__":
    (HERE / "curves.svg").write_text(drawing(json.loads(RESULTS.read_text())))
