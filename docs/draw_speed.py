"""Draws docs/speed.svg, the chart of the README: `python -m docs.draw_speed`.

It shows attention over four H200 as a share of the same kernel alone on one GPU over the whole
sequence, by tokens a GPU, from benchmarks/results/ring.json. What is in a graph is compared with
the kernel in a graph. Where there are several runs it shows their median.
"""

import json
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks" / "results" / "ring.json"
TOKENS = (2048, 4096, 8192, 16384, 32768)  # of one GPU
KERNEL = "sdpa-cudnn"
ALONE = "theory"  # the subject that is the kernel alone
LEFT, TOP, WIDE, HIGH = 60, 60, 500, 300
MOST = 1.1  # share at the top
INK, FAINT = "#57606a", "#d8dee4"


class Line(NamedTuple):
    """A line of the chart: its rows, and how it looks."""

    name: str
    subject: str
    mode: str
    colour: str
    dashes: str = ""


LINES = (
    Line("gather, all in one CUDA graph", "gather", "graph", "#4269d0"),
    Line("gather, replayed: plan.in_graphs()", "gather", "replayed", "#4269d0", "2 4"),
    Line("gather, launched one by one", "gather", "one by one", "#4269d0", "9 5"),
    Line("ring, launched one by one", "ring", "one by one", "#3ca951", "9 5"),
    Line("yunchang (Ulysses), one by one", "yunchang, Ulysses 4 x ring 1",
         "one by one", "#efb118", "9 5"),
    Line("PyTorch context_parallel, one by one", "torch context_parallel, cudnn, allgather",
         "one by one", "#b04a4a", "9 5"),
)  # fmt: skip
NOTES = (
    "yunchang runs flash-attn 2. context_parallel gets its 8 key heads repeated to 32.",
    "ring_flash_attn (zhuzilin) is missing: it did not import beside the libraries there.",
    "Shares above 100 % are drifting clocks.",
)


def rows() -> list[dict[str, Any]]:
    """The measurements of four H200 under a causal mask, forward and backward together."""
    wanted = {"device": "NVIDIA H200", "gpus": 4, "mask": "causal", "pass": "both"}
    wanted |= {"heads": [32, 8], "head_dim": 128}
    measured = json.loads(RESULTS.read_text())
    return [row for row in measured if wanted.items() <= row.items() and "load" not in row]


def shares(measured: list[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """By line and tokens, the median share of the runs."""
    found: dict[str, dict[int, float]] = {}
    for line in LINES:
        found[line.name] = {}
        for tokens in TOKENS:
            each = [
                share(row, measured)
                for row in measured
                if (row["tokens"], row["subject"], row["mode"]) == (tokens, line.subject, line.mode)
                and row["kernel"] in (KERNEL, None)  # peers bring their own
            ]
            if each:
                found[line.name][tokens] = median(each)
    return found


def share(row: dict[str, Any], measured: list[dict[str, Any]]) -> float:
    """The share that was noted, or else that of the kernel alone in the same run."""
    if "share" in row:
        return row["share"]
    alone = {"subject": ALONE, "kernel": KERNEL}
    alone |= {name: row[name] for name in ("command", "revision", "tokens", "mode")}
    (whole,) = (each for each in measured if alone.items() <= each.items())
    return row["tflops"] / whole["tflops"]


def drawing(found: dict[str, dict[int, float]]) -> str:
    """The chart, its legend and what is to be known of it."""
    parts = [text(LEFT, 24, "Four H200, causal, bf16, 32 query and 8 key heads of 128", INK, 16)]
    parts.append(text(LEFT, 44, "forward and backward: share of cuDNN's kernel alone on one GPU"))
    for percent in range(0, 101, 20):
        y = height(percent / 100)
        parts.append(f'<path d="M{LEFT} {y:.1f}h{WIDE}" stroke="{FAINT}"/>')
        parts.append(text(LEFT - 8, y + 4, f"{percent} %", INK, 13, "end"))
    for tokens in TOKENS:
        name = f"{tokens // 1024}k"
        parts.append(text(place(tokens), TOP + HIGH + 20, name, INK, 13, "middle"))
    parts.append(text(LEFT + WIDE / 2, TOP + HIGH + 42, "tokens a GPU", INK, 13, "middle"))
    for number, line in enumerate(LINES):
        points = [(place(tokens), height(part)) for tokens, part in found[line.name].items()]
        at = TOP + 20 + 26 * number
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        for stroke in (path, f"{LEFT + WIDE + 30},{at} {LEFT + WIDE + 70},{at}"):
            parts.append(
                f'<polyline points="{stroke}" fill="none" stroke="{line.colour}" '
                f'stroke-width="2.5" stroke-dasharray="{line.dashes}"/>'
            )
        for x, y in points:
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{line.colour}"/>')
        parts.append(text(LEFT + WIDE + 80, at + 4, line.name))
    for number, note in enumerate(NOTES):
        parts.append(text(LEFT, TOP + HIGH + 70 + 18 * number, note, INK, 12))
    size = f'viewBox="0 0 {LEFT + WIDE + 340} {TOP + HIGH + 140}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} '
        'font-family="system-ui, sans-serif" font-size="13">'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


def place(tokens: int) -> float:
    step = WIDE / len(TOKENS)
    return LEFT + step * (TOKENS.index(tokens) + 0.5)


def height(part: float) -> float:
    return TOP + HIGH * (1 - part / MOST)


def text(
    x: float, y: float, words: str, colour: str = INK, size: int = 13, anchor: str = "start"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" font-size="{size}" '
        f'text-anchor="{anchor}">{words}</text>'
    )


if __name__ == "__main__":
    (HERE / "speed.svg").write_text(drawing(shares(rows())))
