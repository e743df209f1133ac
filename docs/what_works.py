"""Writes docs/what-works.md from what it measures: `TRITON_INTERPRET=1 python -m docs.what_works`.

Every feature of `tests/features.py` in every layout with every kernel that runs without a GPU,
over rings of threads against dense attention in float64.
"""

from functools import lru_cache
from pathlib import Path

import torch

from tests import threads
from tests.features import FEATURES, LAYOUTS, Problem

PAGE_AT = Path(__file__).parent / "what-works.md"
KINDS = {"eager": torch.float64, "sdpa": torch.float64, "triton": torch.float32}
SIZES = {"eager": 3, "sdpa": 3, "triton": 1}  # an interpreter is slow
PAGE = """# What works

Worst relative error against dense attention in float64, forward (out, lse) / backward (dq, dk, dv
and the gradients of what is learned), each result by itself, on every rank of a ring by send/recv;
or why it is refused, on all ranks alike and before anything is sent. `triton` in float32 on one
rank, where layouts are alike, through Triton's interpreter; the others in float64 over three. By
`TRITON_INTERPRET=1 python -m docs.what_works`; `tests/test_features.py` checks every pair of
features besides.

{table}
"""


@lru_cache
def measured(feature: str, layout: str, kernel: str) -> str:
    """One field of the table."""
    try:
        errors = Problem(FEATURES[feature], KINDS[kernel]).errors(SIZES[kernel], layout, kernel)
    except ValueError as error:
        why = str(error).removeprefix("ring attention: ").split("; ")
        return next(part for part in why if part.startswith(f"kernel={kernel!r}"))
    forward = max(error for name, error in errors.items() if name in ("out", "lse"))
    backward = max(error for name, error in errors.items() if name not in ("out", "lse"))
    return f"{forward:.0e} / {backward:.0e}"


def table() -> str:
    """A row for each feature in each layout."""
    lines = [" | ".join(["feature", "layout", *KINDS])]
    lines.append(" | ".join(["---"] * (2 + len(KINDS))))
    for feature in FEATURES:
        for layout in LAYOUTS:
            places = [layout if SIZES[kernel] > 1 else "contiguous" for kernel in KINDS]
            found = [measured(feature, *at) for at in zip(places, KINDS)]
            lines.append(" | ".join([feature, layout, *found]))
    return "\n".join(f"| {line} |" for line in lines)


if __name__ == "__main__":
    torch.set_num_threads(1)
    threads.PATIENCE = 900.0
    PAGE_AT.write_text(PAGE.format(table=table()))
