"""Draws docs/speed.svg, the chart of the README: `python -m docs.draw_speed`.

It shows the TF/s of attention over four H200, forward and backward, by tokens a GPU, from
benchmarks/results/ring.json and peers.json. Where there are several runs it shows their median;
of TransformerEngine the fastest of its modes at each length.
"""

import json
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from ring_attention_pytorch.svg import COLOURS, FAINT, INK, line, page, text

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks" / "results"
TOKENS = (2048, 4096, 8192, 16384, 32768)  # of one GPU
KERNEL = "sdpa-cudnn"
LEFT, TOP, WIDE, HIGH = 44, 60, 490, 300
LEGEND, ROW = TOP + HIGH + 80, 24  # its first line, and how far the next one is; for a phone below
MOST = 650  # TF/s at the top


class Line(NamedTuple):
    """A line of the chart: its rows, whose subject begins so, and how it looks."""

    name: str
    subject: str
    mode: str
    colour: str
    dashes: str = ""
    kernel: str | None = None  # that it brings itself


LINES = (
    Line("flash-attn 4, gather, one by one", "gather", "one by one",
         COLOURS[4], "9 5", "flash-attn-4"),
    Line("cuDNN alone on one GPU, all tokens", "theory", "one by one", INK, "1 4", KERNEL),
    Line("cuDNN, gather, all in one CUDA graph", "gather", "graph", COLOURS[0], "", KERNEL),
    Line("cuDNN, gather, one by one", "gather", "one by one", COLOURS[0], "9 5", KERNEL),
    Line("Triton, gather, one by one", "gather", "one by one", COLOURS[3], "9 5", "triton"),
    Line("TransformerEngine, cuDNN, best mode", "TransformerEngine", "one by one",
         COLOURS[2], "9 5"),
    Line("yunchang (Ulysses), flash-attn 2", "yunchang, Ulysses 4 x ring 1", "one by one",
         COLOURS[1], "9 5"),
    Line("PyTorch context_parallel, cuDNN", "torch context_parallel, cudnn, allgather, repeated",
         "one by one", COLOURS[5], "9 5"),
)  # fmt: skip


def rows() -> list[dict[str, Any]]:
    """The measurements of four H200 under a causal mask, forward and backward together."""
    wanted = {"device": "NVIDIA H200", "gpus": 4, "mask": "causal", "pass": "both"}
    wanted |= {"heads": [32, 8], "head_dim": 128}
    files = (RESULTS / "ring.json", RESULTS / "peers.json")
    measured = [row for file in files for row in json.loads(file.read_text())]
    return [row for row in measured if wanted.items() <= row.items() and "load" not in row]


def speeds(measured: list[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """By line and tokens: the fastest subject's median of the runs, in TF/s."""
    found: dict[str, dict[int, float]] = {}
    for of in LINES:
        found[of.name] = {}
        for tokens in TOKENS:
            each: dict[str, list[float]] = {}
            wanted = dict(tokens=tokens, mode=of.mode, kernel=of.kernel)
            for row in measured:
                if wanted.items() <= row.items() and row["subject"].startswith(of.subject):
                    each.setdefault(row["subject"], []).append(row["tflops"])
            exact = each.get(of.subject)  # "gather", not "gather, Ulysses 2"
            if each:
                found[of.name][tokens] = median(exact) if exact else max(map(median, each.values()))
    return found


def drawing(found: dict[str, dict[int, float]]) -> str:
    """The chart, and its legend."""
    parts = [text(LEFT, 24, "Four H200, causal, bf16, 32 query and 8 key heads of 128", size=17)]
    parts.append(text(LEFT, 44, "forward and backward, TF/s of each GPU", size=15))
    for speed in range(0, MOST, 100):
        y = height(speed)
        parts.append(line([(LEFT, y), (LEFT + WIDE, y)], FAINT, width=1))
        parts.append(text(LEFT - 8, y + 4, f"{speed}", size=15, anchor="end"))
    for tokens in TOKENS:
        at = place(tokens)
        parts.append(text(at, TOP + HIGH + 20, f"{tokens // 1024}k", size=15, anchor="middle"))
    middle = LEFT + WIDE / 2
    parts.append(text(middle, TOP + HIGH + 42, "tokens a GPU", size=15, anchor="middle"))
    for number, of in enumerate(LINES):
        points = [(place(tokens), height(speed)) for tokens, speed in found[of.name].items()]
        at = LEGEND + ROW * number
        sample = [(float(LEFT), at), (LEFT + 50.0, at)]
        parts += [line(each, of.colour, 2.5, of.dashes) for each in (points, sample)]
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{of.colour}"/>' for x, y in points
        ]
        parts.append(text(LEFT + 62, at + 5, of.name, size=15))
    return page(LEFT + WIDE + 6, LEGEND + ROW * len(LINES), *parts)


def place(tokens: int) -> float:
    step = WIDE / len(TOKENS)
    return LEFT + step * (TOKENS.index(tokens) + 0.5)


def height(speed: float) -> float:
    return TOP + HIGH * (1 - speed / MOST)


if __name__ == "__main__":
    (HERE / "speed.svg").write_text(drawing(speeds(rows())))
