"""Draws docs/speed.svg, the chart of the README: `python -m docs.draw_speed`.

It shows attention over four H200 as a share of the same kernel alone on one GPU over the whole
sequence, by tokens a GPU, from benchmarks/results/ring.json. What is in a graph is compared with
the kernel in a graph. Where there are several runs it shows their median.
"""

import json
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from ring_attention_pytorch.svg import COLOURS, FAINT, line, page, text

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks" / "results" / "ring.json"
TOKENS = (2048, 4096, 8192, 16384, 32768)  # of one GPU
KERNEL = "sdpa-cudnn"
ALONE = "theory"  # the subject that is the kernel alone
LEFT, TOP, WIDE, HIGH = 60, 60, 500, 300
MOST = 1.1  # share at the top


class Line(NamedTuple):
    """A line of the chart: its rows, and how it looks."""

    name: str
    subject: str
    mode: str
    colour: str
    dashes: str = ""


LINES = (
    Line("gather, all in one CUDA graph", "gather", "graph", COLOURS[0]),
    Line("gather, replayed: plan.in_graphs()", "gather", "replayed", COLOURS[0], "2 4"),
    Line("gather, launched one by one", "gather", "one by one", COLOURS[0], "9 5"),
    Line("ring, launched one by one", "ring", "one by one", COLOURS[3], "9 5"),
    Line("yunchang (Ulysses), one by one", "yunchang, Ulysses 4 x ring 1",
         "one by one", COLOURS[1], "9 5"),
    Line("PyTorch context_parallel, one by one", "torch context_parallel, cudnn, allgather",
         "one by one", COLOURS[2], "9 5"),
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
    for of in LINES:
        found[of.name] = {}
        for tokens in TOKENS:
            each = [
                share(row, measured)
                for row in measured
                if (row["tokens"], row["subject"], row["mode"]) == (tokens, of.subject, of.mode)
                and row["kernel"] in (KERNEL, None)  # peers bring their own
            ]
            if each:
                found[of.name][tokens] = median(each)
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
    parts = [text(LEFT, 24, "Four H200, causal, bf16, 32 query and 8 key heads of 128", size=16)]
    parts.append(text(LEFT, 44, "forward and backward: share of cuDNN's kernel alone on one GPU"))
    for percent in range(0, 101, 20):
        y = height(percent / 100)
        parts.append(line([(LEFT, y), (LEFT + WIDE, y)], FAINT, width=1))
        parts.append(text(LEFT - 8, y + 4, f"{percent} %", anchor="end"))
    for tokens in TOKENS:
        parts.append(text(place(tokens), TOP + HIGH + 20, f"{tokens // 1024}k", anchor="middle"))
    parts.append(text(LEFT + WIDE / 2, TOP + HIGH + 42, "tokens a GPU", anchor="middle"))
    for number, of in enumerate(LINES):
        points = [(place(tokens), height(part)) for tokens, part in found[of.name].items()]
        y = TOP + 20 + 26 * number
        sample = [(LEFT + WIDE + 30.0, float(y)), (LEFT + WIDE + 70.0, float(y))]
        parts += [line(each, of.colour, 2.5, of.dashes) for each in (points, sample)]
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{of.colour}"/>' for x, y in points
        ]
        parts.append(text(LEFT + WIDE + 80, y + 4, of.name))
    for number, note in enumerate(NOTES):
        parts.append(text(LEFT, TOP + HIGH + 70 + 18 * number, note, size=12))
    return page(LEFT + WIDE + 340, TOP + HIGH + 140, *parts)


def place(tokens: int) -> float:
    step = WIDE / len(TOKENS)
    return LEFT + step * (TOKENS.index(tokens) + 0.5)


def height(part: float) -> float:
    return TOP + HIGH * (1 - part / MOST)


if __name__ == "__main__":
    (HERE / "speed.svg").write_text(drawing(shares(rows())))
