"""Writes docs/compile-matrix.md: what torch.compile makes of each feature, as it is measured.

python -m docs.write_compile 1 2 4

Every row of `tests/support/compile_cases.py` over rings of so many processes, in ten lengths. It
takes some minutes for each ring.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.compile_cases import LENGTHS, ROWS, Row, measured
from tests.support.ranks import Pool

PAGE_AT = Path(__file__).parent / "compile-matrix.md"
PAGE = """# What is compiled

Which features `torch.compile` puts into one graph, and how far compiled results are from eager
ones. [How to compile](guide/compile.md).

```
a field   2, 3e-16     graphs of {lengths} lengths; worst error of the loss and of all gradients
```

Each row is compiled for forward and backward (`aot_eager`, float64, zigzag, causal), and runs steps
of {lengths} lengths, each with its own plan. Errors are relative to the same step without
`torch.compile`. A step of one graph was compiled with `fullgraph=True`; the others have a graph
break where plans are made.

{table}

Written by `python -m docs.write_compile {sizes}`.
"""


def field(row: Row) -> str:
    """Write a field of the table."""
    return f"{row.graphs}, {row.error:.0e}"


def page(found: dict[tuple[str, str], list[Row]], sizes: Sequence[int]) -> str:
    """Write the page: a row for each feature, a column for each ring."""
    rings = [f"ring of {size}" for size in sizes]
    lines = [" | ".join(["what", "with", "a step is", *rings])]
    lines.append(" | ".join(["---"] * (3 + len(sizes))))
    for (subject, feature), rows in found.items():
        step = "one graph" if rows[0].whole else "two"
        lines.append(" | ".join([f"`{subject}`", feature, step, *map(field, rows)]))
    table = "\n".join(f"| {line} |" for line in lines)
    return PAGE.format(lengths=len(LENGTHS), table=table, sizes=" ".join(map(str, sizes)))


def main(sizes: Sequence[int]) -> None:
    """Measure, and write the page."""
    found: dict[tuple[str, str], list[Row]] = {row: [] for row in ROWS}
    for size in sizes:
        pool = Pool(size, timeout=600.0)
        for row in ROWS:
            of_ranks = pool.run(measured, *row)
            worst = max(each.error for each in of_ranks)
            found[row].append(of_ranks[0]._replace(error=worst))
        pool.stop()
    PAGE_AT.write_text(page(found, sizes))


if __name__ == "__main__":
    main([*map(int, sys.argv[1:])] or [1, 2, 4])
