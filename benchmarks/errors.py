"""The error table of the README: `python -m benchmarks.errors --write README.md`.

Worst relative error of ring attention against dense attention in float64, over layouts, masks
and heads, on real gloo processes, each result by itself on every rank.
"""

from itertools import product
from pathlib import Path

import click
import torch

from tests.cases import NAMES, Attention, process_case
from tests.ranks import Pool

BEGIN, END = "<!-- errors: begin -->", "<!-- errors: end -->"


def cases(dtype: torch.dtype, ring_size: int) -> list[Attention]:
    lengths = (0, 1, 13, 64) if ring_size < 8 else (5, 32)
    return [
        Attention(
            length=length, layout=layout, causal=causal, window=window, masked=masked,
            key_heads=key_heads, dtype=dtype, seed=number,
        )
        for number, (layout, causal, window, masked, key_heads, length) in enumerate(
            product(
                ("contiguous", "striped", "zigzag"), (False, True), (None, 0, 9), (False, True),
                (1, 2, 4), lengths,
            )
        )
    ]  # fmt: skip


def table(ring_sizes: list[int]) -> str:
    head = "| processes | cases | dtype | " + " | ".join(NAMES) + " |"
    lines = [head, "|" + " --- |" * (3 + len(NAMES))]
    for size in ring_sizes:
        pool = Pool(size, timeout=300)
        for dtype in (torch.float64, torch.float32):
            todo = cases(dtype, size)
            click.echo(f"{size} processes, {dtype}, {len(todo)} cases", err=True)
            ranks = pool.run(process_case, todo)
            worst = " | ".join(
                f"{max(case[name] for rank in ranks for case in rank):.0e}" for name in NAMES
            )
            lines.append(f"| {size} | {len(todo)} | {str(dtype)[6:]} | {worst} |")
        pool.stop()
    return "\n".join(lines)


@click.command(help=__doc__)
@click.option("--write", type=click.Path(exists=True, path_type=Path), help="put it in this file")
@click.option("--ring-size", "ring_sizes", multiple=True, default=[1, 2, 3, 4, 8])
def main(write: Path | None, ring_sizes: list[int]) -> None:
    text = table(list(ring_sizes))
    print(text)
    if write is not None:
        before, rest = write.read_text().split(BEGIN)
        _, after = rest.split(END)
        write.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


if __name__ == "__main__":
    main()
