"""Writes docs/compile-matrix.md: what torch.compile makes of each feature, as it is measured.

python -m docs.write_compile

Every row of `tests/support/compile_cases.py` over rings of processes, in ten lengths.
"""

from pathlib import Path

from tests.support.compile_cases import LENGTHS, ROWS, Row, measured
from tests.support.ranks import Pool

PAGE_AT = Path(__file__).parent / "compile-matrix.md"
SIZES = (1, 2, 4)
PAGE = """# What is compiled

```
a field   2, 3e-16     graphs of {lengths} lengths; worst error of the loss and of all gradients
```

Each row is compiled for forward and backward (`aot_eager`, float64, zigzag, causal). It takes steps
of {lengths} lengths, each with a plan of its own. Errors are relative to the same step without
`torch.compile`. A step of one graph was compiled with `fullgraph=True`; others break where plans
are made. [How to compile](guide/compile.md).

{table}

Written by `python -m docs.write_compile`.
"""


def field(row: Row) -> str:
    """Write a field of the table."""
    return f"{row.graphs}, {row.error:.0e}"


def table(found: dict[tuple[str, str], list[Row]]) -> str:
    """Write a row for each feature, a column for each ring."""
    rings = [f"ring of {size}" for size in SIZES]
    lines = [" | ".join(["what", "with", "a step is", *rings])]
    lines.append(" | ".join(["---"] * (3 + len(SIZES))))
    for (subject, feature), rows in found.items():
        step = "one graph" if rows[0].whole else "two"
        lines.append(" | ".join([f"`{subject}`", feature, step, *map(field, rows)]))
    return "\n".join(f"| {line} |" for line in lines)


def main() -> None:
    """Measure, and write the page."""
    found: dict[tuple[str, str], list[Row]] = {row: [] for row in ROWS}
    for size in SIZES:
        pool = Pool(size, timeout=600.0)
        for row in ROWS:
            of_ranks = pool.run(measured, *row)
            worst = max(each.error for each in of_ranks)
            found[row].append(of_ranks[0]._replace(error=worst))
        pool.stop()
    PAGE_AT.write_text(PAGE.format(lengths=len(LENGTHS), table=table(found)))


if __name__ == "__main__":
    main()
