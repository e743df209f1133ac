"""Find the worst errors of ring attention: the table of docs/exactness.md.

    python -m benchmarks errors            # print it
    python -m benchmarks errors --write    # and put it into the page

Errors are relative, against dense attention in float64, over layouts, masks and heads, on real gloo
processes, each result by itself on every rank.
"""

import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import torch

from benchmarks.lib.options import parser
from benchmarks.lib.results import markdown
from tests.support.cases import NAMES, Attention, process_case
from tests.support.ranks import Pool

PAGE = Path(__file__).parents[1] / "docs" / "exactness.md"
BEGIN, END = "<!-- errors: begin -->", "<!-- errors: end -->"


def cases(dtype: torch.dtype, ring_size: int) -> list[Attention]:
    """Make the cases of a number of processes."""
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


def table(ring_sizes: Sequence[int]) -> str:
    """Run all cases, and write the worst error of each result."""
    lines = []
    for size in ring_sizes:
        pool = Pool(size, timeout=300)
        for dtype in (torch.float64, torch.float32):
            todo = cases(dtype, size)
            print(f"{size} processes, {dtype}, {len(todo)} cases", file=sys.stderr)
            found = [case for rank in pool.run(process_case, todo) for case in rank]
            worst = [f"{max(case[name] for case in found):.0e}" for name in NAMES]
            lines.append([str(size), str(len(todo)), str(dtype)[6:], *worst])
        pool.stop()
    return markdown(["processes", "cases", "dtype", *NAMES], lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table, and with `--write` put it between its two marks."""
    options = parser("errors", __doc__)
    options.add_argument("--write", type=Path, nargs="?", const=PAGE, metavar="FILE.md")
    options.add_argument("--ring-size", type=int, nargs="+", default=[1, 2, 3, 4, 8])
    asked = options.parse_args(argv)
    text = table(asked.ring_size)
    print(text)
    if asked.write is not None:
        before, rest = asked.write.read_text().split(BEGIN)
        _, after = rest.split(END)
        asked.write.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")
