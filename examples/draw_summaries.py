"""Draws what `train_summaries.py --history` measured: losses against what was spent.

    python examples/draw_summaries.py history.jsonl curves.svg

It also prints each model's loss where all have spent the same: as much as the one that spent least.
"""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from ring_attention_pytorch.svg import COLOURS, PALE, box, line, page, text

SPENT = {"steps": "steps", "flops": "FLOPs", "bytes": "bytes to a rank", "seconds": "seconds"}
MODELS = dict(zip(("exact", "window", "summaries"), COLOURS))
WIDE, HIGH, GAP = 220, 150, 40

Points = list[dict[str, Any]]


def read(files: Sequence[str]) -> dict[str, Points]:
    """The measurements of each model, in the order of steps."""
    found: dict[str, Points] = {name: [] for name in MODELS}
    for file in files:
        for row in Path(file).read_text().splitlines():
            point = json.loads(row)
            found[point["name"]].append(point)
    return {name: points for name, points in found.items() if points}


def loss_at(points: Points, of: str, spent: float) -> float:
    """The loss of a model when it has spent so much, between two measurements on a line.

    >>> loss_at([{"steps": 0, "loss": 5.0}, {"steps": 4, "loss": 3.0}], "steps", 1)
    4.5
    """
    for a, b in pairwise(points):
        if spent <= b[of]:
            share = (spent - a[of]) / max(b[of] - a[of], 1e-9)
            return a["loss"] + share * (b["loss"] - a["loss"])
    return points[-1]["loss"]


def table(found: dict[str, Points]) -> str:
    """Losses where all have spent the same, a column for each currency."""
    least = {of: min(points[-1][of] for points in found.values()) for of in SPENT}
    head = "".join(f"{f'{least[of]:.3g} {unit}':>26}" for of, unit in SPENT.items())
    lines = [f"{'loss at':<10}{head}"]
    for name, points in found.items():
        losses = (loss_at(points, of, least[of]) for of in SPENT)
        lines.append(f"{name:<10}" + "".join(f"{loss:>26.3f}" for loss in losses))
    return "\n".join(lines)


def drawing(found: dict[str, Points]) -> str:
    """A panel for each currency, a line for each model. Beginnings, which are steep, are cut."""
    losses = [p["loss"] for points in found.values() for p in points[len(points) // 5 :]]
    low, high, left, top = min(losses), max(losses), 36, 24
    parts = []
    for number, (of, unit) in enumerate(SPENT.items()):
        x0, most = left + number * (WIDE + GAP), max(points[-1][of] for points in found.values())
        parts.append(box(x0, top, WIDE, HIGH, PALE))
        parts.append(text(x0, top - 8, f"{unit}, up to {most:.3g}"))
        for name, points in found.items():
            curve = (
                (x0 + WIDE * p[of] / most, top + HIGH * (high - p["loss"]) / max(high - low, 1e-9))
                for p in points
                if p["loss"] <= high
            )
            parts.append(line(curve, MODELS[name]))
    for loss, y in ((high, top + 8), (low, top + HIGH)):
        parts.append(text(left - 4, y, f"{loss:.2f}", anchor="end"))
    for number, name in enumerate(found):
        parts.append(text(left + number * 110, top + HIGH + 20, name, MODELS[name]))
    return page(left + len(SPENT) * (WIDE + GAP), top + HIGH + 32, *parts)


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False))
@click.argument("svg", type=click.Path(dir_okay=False))
def main(files: tuple[str, ...], svg: str) -> None:
    """Print losses where all models have spent the same, and draw them into SVG."""
    found = read(files)
    print(table(found))
    Path(svg).write_text(drawing(found))


if __name__ == "__main__":
    main()
