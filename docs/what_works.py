"""Writes docs/what-works.md and docs/what-works-layouts.md from what it measures.

TRITON_INTERPRET=1 python -m docs.what_works

Every feature of `tests/support/features.py` in every layout with every kernel that runs without a
GPU, over rings of threads in every way that `OVER` names, against dense attention in float64. The
first page has the worst of all layouts and ways, the second each by itself. With `--summary` the
first page is written from the second, and nothing is measured.
"""

import sys
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.support import threads
from tests.support.features import EVERY, LAYOUTS, Problem

HERE = Path(__file__).parent
SUMMARY_AT, PAGE_AT = HERE / "what-works.md", HERE / "what-works-layouts.md"
Rows = dict[tuple[str, str], list[str]]  # by feature and layout: a field for each column


class Column(NamedTuple):
    """A kernel, and how many ranks exchange keys how."""

    kernel: str
    size: int
    how: dict[str, Any]
    dtype: torch.dtype = torch.float64


OVER = {
    "ring": (3, dict(transport="ring")),
    "gather": (3, dict(transport="gather")),
    "ulysses": (4, dict(transport="ring", ulysses=2)),
}
COLUMNS = {f"{k}, {over}": Column(k, *OVER[over]) for k in ("eager", "sdpa") for over in OVER}
COLUMNS["triton"] = Column("triton", 1, {}, torch.float32)  # an interpreter is slow
SUMMARY = """# What works

```
a field   3e-16 / 5e-16     worst error forward (out, lse) / backward (dq, dk, dv, learned options)
          has no softclamp  refused with this text, on all ranks, before anything is sent
```

Each number is the largest relative error against dense attention in float64, over all layouts
(contiguous, striped, zigzag, balanced), transports (`"ring"`, `"gather"`, `ulysses=2`) and ranks.
The precision of float64 is about 1e-16, of float32 about 1e-7.

{table}

[A table of each layout and transport](what-works-layouts.md). `eager` and `sdpa` run in float64 on
three or four ranks, `triton` in float32 on one rank through Triton's interpreter. Kernels that need
a GPU are tested on GPUs (`tests/gpu`); [Kernels](kernels.md) lists the features of each.
`tests/stories/test_features.py` also checks every pair of features. The last two rows are
[attention in parts](guide/parts-of-attention.md): `shared_keys`, and three calls that are merged by
`merge_attention`. [Recurrent layers](what-works-recurrent.md) have a table of their own.

Written by `TRITON_INTERPRET=1 python -m docs.what_works`.
"""
PAGE = """# What works, in each layout

```
a field   3e-16 / 5e-16     worst error forward (out, lse) / backward (dq, dk, dv, learned options)
```

The errors of [What works](what-works.md), separately for each layout and transport. `eager` and
`sdpa` run in float64. Keys travel by `transport="ring"` or `transport="gather"` over three ranks,
or by a ring between pairs of four ranks that swap heads for sequence (`ulysses=2`). `triton` runs
in float32 on one rank, where all layouts are the same.

{table}
"""


@lru_cache
def measured(feature: str, layout: str, column: str) -> str:
    """One field of the table."""
    kernel, size, how, dtype = COLUMNS[column]
    try:
        errors = Problem(EVERY[feature], dtype).errors(size, layout, kernel, **how)
    except ValueError as error:
        return reason(str(error), kernel)
    forward = max(error for name, error in errors.items() if name in ("out", "lse"))
    backward = max(error for name, error in errors.items() if name not in ("out", "lse"))
    return f"{forward:.0e} / {backward:.0e}"


def reason(error: str, kernel: str) -> str:
    """Return the part of an error that is about this kernel, or all of it."""
    said = error.removeprefix("ring attention: ")
    own = f"kernel={kernel!r} "
    return next((s.removeprefix(own) for s in said.split("; ") if s.startswith(own)), said)


def all_measured() -> Rows:
    """Each feature in each layout."""
    rows = {}
    for feature in EVERY:
        for layout in LAYOUTS:
            places = [layout if column.size > 1 else "contiguous" for column in COLUMNS.values()]
            rows[feature, layout] = [measured(feature, *at) for at in zip(places, COLUMNS)]
    return rows


def read(page: str) -> Rows:
    """The rows of the page of layouts."""
    lines = [line.strip("|").split(" | ") for line in page.splitlines() if line[:1] == "|"]
    cells = [[cell.strip() for cell in line] for line in lines]
    return {(feature, layout): found for feature, layout, *found in cells[2:]}


def worst(fields: list[str]) -> str:
    """The worst of some fields; a reason if one is refused.

    >>> worst(["3e-16 / 5e-16", "4e-16 / 4e-16"]), worst(["has no dropout", "3e-16 / 5e-16"])
    ('4e-16 / 5e-16', 'has no dropout')
    """
    for field in fields:
        if " / " not in field:
            return field
    errors = [[float(error) for error in field.split(" / ")] for field in fields]
    return " / ".join(f"{max(each):.0e}" for each in zip(*errors))


def summary(rows: Rows) -> str:
    """A row for each feature, a column for each kernel."""
    kernels = dict.fromkeys(column.kernel for column in COLUMNS.values())
    lines = [" | ".join(["feature", *kernels]), " | ".join(["---"] * (1 + len(kernels)))]
    for feature in EVERY:
        found = []
        for kernel in kernels:
            fields = []
            for layout in LAYOUTS:
                for column, field in zip(COLUMNS.values(), rows[feature, layout]):
                    if column.kernel == kernel:
                        fields.append(field)
            found.append(worst(fields))
        lines.append(" | ".join([feature, *found]))
    return "\n".join(f"| {line} |" for line in lines)


def table(rows: Rows) -> str:
    """A row for each feature in each layout."""
    lines = [" | ".join(["feature", "layout", *COLUMNS])]
    lines.append(" | ".join(["---"] * (2 + len(COLUMNS))))
    for (feature, layout), found in rows.items():
        lines.append(" | ".join([feature, layout, *found]))
    return "\n".join(f"| {line} |" for line in lines)


if __name__ == "__main__":
    torch.set_num_threads(1)
    threads.PATIENCE = 900.0
    found = read(PAGE_AT.read_text()) if "--summary" in sys.argv else all_measured()
    PAGE_AT.write_text(PAGE.format(table=table(found)))
    SUMMARY_AT.write_text(SUMMARY.format(table=summary(found)))
