"""TF/s of every kernel on one block, beside the same kernels called by themselves.

    python -m benchmarks.bench_kernels                                 # a table
    python -m benchmarks.bench_kernels --save FILE.json                # and what was measured
    python -m benchmarks.bench_kernels --draw FILE.json [FILE.json]    # the page of results

Batch 1; FLOPs are those of the visible pairs, backward 2.5 times forward. A kernel's time is that
of one block from nothing to a result in the inputs' dtype, as on one GPU; with --block that of
one more block of a ring, merged into running results. The direct calls alternate with ours.
The two flash-attn can't both be installed: save twice, draw both files.
"""

import argparse
import datetime
import itertools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.direct import DIRECT, Runs
from ring_attention_pytorch.geometry.layouts import Segment
from ring_attention_pytorch.geometry.tiles import Mask, Tile, tiles, visible_pairs
from ring_attention_pytorch.kernels import KERNELS, problem
from ring_attention_pytorch.runtime.accumulate import GradAccumulator, OutputAccumulator
from ring_attention_pytorch.runtime.interfaces import (
    Grads,
    KernelRequest,
    KVBlock,
    Residuals,
    ScoreMods,
    Tiles,
)

WINDOW = 4096
Row = dict[str, Any]  # a shape, and by kernel and direction TF/s and the share of the direct call


@dataclass(frozen=True)
class Shape:
    """One block: n queries and keys, and which of them are visible."""

    n: int = 8192
    d: int = 128
    mask: str = "causal"
    dtype: str = "bfloat16"
    heads: int = 32
    key_heads: int = 8

    def tiles(self) -> tuple[Tile, ...]:
        window = min(WINDOW, self.n // 2) if self.mask == "window" else None
        whole = (Segment(0, 1, self.n),)
        return tiles(whole, whole, Mask(self.mask != "full", window))

    def flops(self) -> float:
        return 4.0 * self.heads * self.d * visible_pairs(self.tiles())


class Block:
    """The tensors of a shape, and what to time on them."""

    def __init__(self, shape: Shape) -> None:
        self.shape, n, d = shape, shape.n, shape.d
        kinds = dict(device="cuda", dtype=getattr(torch, shape.dtype))
        self.q, self.dout = (torch.randn(1, n, shape.heads, d, **kinds) for _ in range(2))
        self.k, self.v = (torch.randn(1, n, shape.key_heads, d, **kinds) for _ in range(2))
        self.found, self.terms = Tiles(shape.tiles()), ScoreMods(d**-0.5, None, 1024)

    def kernel(self, name: str, more: bool) -> Runs:
        """`more`: one more block for running results, not the only one."""
        impl, keys = KERNELS[name], KVBlock(self.k, self.v, None, (Segment(0, 1, self.shape.n),))

        def result() -> OutputAccumulator:
            return OutputAccumulator(self.q, self.v, calls=None if more else 1)

        def grads() -> Grads:
            return Grads(
                *(GradAccumulator(t, calls=None if more else 1) for t in (self.q, self.k, self.v))
            )

        first, sums = result(), grads()
        impl.forward(self.q, keys, self.found, self.terms, first)
        out, lse = (t.clone() for t in first.finalize())

        def forward() -> None:
            whole = first if more else result()
            impl.forward(self.q, keys, self.found, self.terms, whole)
            (whole.begin_update if more else whole.finalize)()

        def backward() -> None:
            saved = Residuals(self.q, out, lse, self.dout, None)  # its delta is made anew
            whole = sums if more else grads()
            impl.backward(saved, keys, self.found, self.terms, whole)
            for total in whole:
                (total.begin_update if more else total.finalize)()

        return {"forward": forward, "backward": backward}

    def direct(self, name: str) -> Runs:
        (tile,) = self.found
        return DIRECT[name]((self.q, self.k, self.v, self.dout, tile))


def seconds(runs: list[Callable[[], object]], budget: float = 0.02, rounds: int = 5) -> list[float]:
    """The median batch of each, taken in turn, by the device's clock."""

    def batch(run: Callable[[], object], times: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(times):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / times

    for run in runs:
        run()
    times = [max(1, int(budget / max(batch(run, 1), 1e-6))) for run in runs]
    found = [[batch(run, n) for run, n in zip(runs, times)] for _ in range(rounds)]
    return [median(each) for each in zip(*found)]


def measured(shape: Shape, names: list[str], more: bool) -> Row:
    """These kernels where they can do the shape, and their share of the direct call's speed."""
    block, row = Block(shape), asdict(shape) | {"kernels": {}}
    case = KernelRequest.of(block.q, block.v, window=WINDOW if shape.mask == "window" else None)
    for name in (n for n in names if problem(n, case) is None):
        ours, theirs = block.kernel(name, more), block.direct(name) if name in DIRECT else {}
        row["kernels"][name] = {}
        for direction, factor in (("forward", 1.0), ("backward", 2.5)):
            runs = [ours[direction], *([theirs[direction]] if theirs else [])]
            mine, *direct = seconds(runs)
            row["kernels"][name][direction] = dict(
                speed=factor * shape.flops() / mine / 1e12,
                of_direct=direct[0] / mine if direct else None,
            )
    return row


def table(rows: list[Row]) -> str:
    """Forward / backward, and in brackets the percentage of the direct call's speed."""
    names = [n for n in KERNELS if any(n in row["kernels"] for row in rows)]
    lines = [["d", "mask", "tokens", *names], ["---"] * (3 + len(names))]
    for row in rows:
        lines.append([str(row["d"]), row["mask"], f"{row['n'] // 1024}k"])
        for name in names:
            found = row["kernels"].get(name)
            lines[-1].append("-" if found is None else " / ".join(map(cell, found.values())))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(found: dict[str, float | None]) -> str:
    share = "" if found["of_direct"] is None else f" ({100 * found['of_direct']:.0f} %)"
    return f"{found['speed']:.0f}{share}"


def merged(pages: list[dict]) -> list[Row]:
    """The rows of several files, each kernel from the first that has it."""
    rows: dict[tuple, Row] = {}
    for row in (row for page in pages for row in page["rows"]):
        key = tuple(row[name] for name in Shape.__dataclass_fields__)
        kept = rows.setdefault(key, row | {"kernels": {}})
        kept["kernels"] = row["kernels"] | kept["kernels"]
    return sorted(rows.values(), key=lambda row: (row["d"], row["mask"], row["n"]))


def draw(pages: list[dict]) -> Path:
    """benchmarks/results/DATE-kernels.md and .png from what --save kept."""
    from matplotlib.figure import Figure

    rows, page = merged(pages), pages[0]
    sizes, masks = (sorted({row[x] for row in rows}) for x in ("d", "mask"))
    figure = Figure(figsize=(4.2 * len(masks), 5.2 * len(sizes)), layout="constrained")
    axes = figure.subplots(2 * len(sizes), len(masks), sharex=True, squeeze=False)
    for (i, d), (half, direction), (j, mask) in itertools.product(
        enumerate(sizes), enumerate(("forward", "backward")), enumerate(masks)
    ):
        panel = axes[2 * i + half][j]
        for colour, name in enumerate(KERNELS):
            mine = [r for r in rows if (r["d"], r["mask"]) == (d, mask) and name in r["kernels"]]
            if mine:
                speeds = [r["kernels"][name][direction]["speed"] for r in mine]
                panel.plot(
                    [r["n"] / 1024 for r in mine], speeds, "o-", label=name, color=f"C{colour}"
                )
        panel.set(title=f"{direction}, d {d}, {mask}", xscale="log", ylim=(0, 720))
        panel.set_xticks([2, 8, 32, 64], ["2k", "8k", "32k", "64k"])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    axes[0][0].set_ylabel("TF/s")
    axes[0][0].legend(fontsize=8)
    path = Path(__file__).parent / "results" / f"{page['date']}-kernels.md"
    figure.savefig(path.with_suffix(".png"), dpi=110)
    commands = "\n".join(f"    python -m benchmarks.bench_kernels {p['arguments']}" for p in pages)
    path.write_text(
        f"# Kernels, {page['date']}\n\n{page['machine']}. TF/s forward / backward of one block, in "
        f"brackets the share of calling the same kernel directly in the same run. {page['what']} "
        f"Of several runs a kernel's figure is from the first that has it.\n"
        f"\n{commands}\n\n{table(rows)}\n\n![TF/s by length]({path.stem}.png)\n"
    )
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--d", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--n", type=int, nargs="+", default=[2048, 8192, 32768, 65536])
    parser.add_argument("--mask", nargs="+", default=["causal", "full", "window"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--heads", type=int, nargs=2, default=[32, 8], metavar=("H", "H_KV"))
    meant = [name for name in KERNELS if name not in ("eager", "flex")]  # not slow, nor for this
    parser.add_argument("--kernels", nargs="+", default=meant, choices=list(KERNELS))
    parser.add_argument("--block", action="store_true", help="one more block of a ring")
    parser.add_argument("--save", type=Path, metavar="FILE.json")
    parser.add_argument("--draw", type=Path, nargs="+", metavar="FILE.json")
    asked = parser.parse_args()
    if asked.draw:
        print(draw([json.loads(path.read_text()) for path in asked.draw]))
        return
    if not torch.cuda.is_available():
        raise SystemExit("bench_kernels needs a CUDA device")
    what = f"{asked.dtype}, heads {asked.heads[0]} / {asked.heads[1]}, window {WINDOW}."
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(f"{machine}; {what}")
    rows = []
    for d in asked.d:
        for mask in asked.mask:
            for n in asked.n:
                shape = Shape(n, d, mask, asked.dtype, *asked.heads)
                rows.append(measured(shape, asked.kernels, asked.block))
                print(table(rows).splitlines()[-1], flush=True)
    print(f"\n{table(rows)}")
    if asked.save:
        arguments = f"--d {' '.join(map(str, asked.d))} --n {' '.join(map(str, asked.n))}"
        arguments += " --block" if asked.block else ""
        page = dict(
            date=str(datetime.date.today()), machine=machine, what=what, arguments=arguments,
            rows=rows,
        )  # fmt: skip
        asked.save.write_text(json.dumps(page))


if __name__ == "__main__":
    main()
