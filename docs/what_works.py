"""Writes docs/what-works.md from what it measures: `TRITON_INTERPRET=1 python -m docs.what_works`.

Every feature of `tests/features.py` in every layout with every kernel that runs without a GPU, over
rings of threads in every way that `OVER` names, against dense attention in float64.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests import threads
from tests.features import FEATURES, LAYOUTS, Problem

PAGE_AT = Path(__file__).parent / "what-works.md"


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
PAGE = """# What works

Worst relative error against dense attention in float64, forward (out, lse) / backward (dq, dk, dv
and the gradients of what is learned), each result by itself, on every rank; or why it is refused,
on all ranks alike and before anything is sent. Kernels `eager` and `sdpa` in float64, whose keys
travel by `transport="ring"` or `transport="gather"` over three ranks, or by the ring between pairs
of four that swap heads for sequence, `ulysses=2`. `triton` in float32 on one rank, where layouts
are alike, through Triton's interpreter. By `TRITON_INTERPRET=1 python -m docs.what_works`;
`tests/test_features.py` checks every pair of features besides.

{table}
"""


@lru_cache
def measured(feature: str, layout: str, column: str) -> str:
    """One field of the table."""
    kernel, size, how, dtype = COLUMNS[column]
    try:
        errors = Problem(FEATURES[feature], dtype).errors(size, layout, kernel, **how)
    except ValueError as error:
        return reason(str(error), kernel)
    forward = max(error for name, error in errors.items() if name in ("out", "lse"))
    backward = max(error for name, error in errors.items() if name not in ("out", "lse"))
    return f"{forward:.0e} / {backward:.0e}"


def reason(error: str, kernel: str) -> str:
    """Of what is said, what this kernel lacks; or else all of it."""
    said = error.removeprefix("ring attention: ")
    own = f"kernel={kernel!r} "
    return next((s.removeprefix(own) for s in said.split("; ") if s.startswith(own)), said)


def table() -> str:
    """A row for each feature in each layout."""
    lines = [" | ".join(["feature", "layout", *COLUMNS])]
    lines.append(" | ".join(["---"] * (2 + len(COLUMNS))))
    for feature in FEATURES:
        for layout in LAYOUTS:
            places = [layout if column.size > 1 else "contiguous" for column in COLUMNS.values()]
            found = [measured(feature, *at) for at in zip(places, COLUMNS)]
            lines.append(" | ".join([feature, layout, *found]))
    return "\n".join(f"| {line} |" for line in lines)


if __name__ == "__main__":
    torch.set_num_threads(1)
    threads.PATIENCE = 900.0
    PAGE_AT.write_text(PAGE.format(table=table()))
