"""Writes docs/what-works-recurrent.md: errors of recurrent layers in each layout.

python -m docs.what_works_recurrent

Rings of three and four threads, with documents that begin at a run's start and others, against a
loop over tokens in float64 that knows nothing of ranks.
"""

from pathlib import Path

import torch

from ring_attention_pytorch.geometry.balance import balanced
from ring_attention_pytorch.recurrent import ring_gated_delta_rule, ring_kda
from tests.support import threads
from tests.support.recurrent_cases import D_K, D_V, HEADS, Spread, data, delta, errors_of, mamba_2

PAGE_AT = Path(__file__).parent / "what-works-recurrent.md"
LAYOUTS = "contiguous", "zigzag", "balanced"
BORDERS = [[0, 12, 13, 30, 48], [0, 48]]  # 12 is the start of a run on three and on four ranks
ROWS = "gated delta rule", "KDA", "Mamba 2", "with initial states"
PAGE = """# What works: recurrent layers

```
a field   3e-16 / 5e-16     worst error forward (outputs, last states) / backward (all gradients)
```

Each number is the largest relative error against a loop over tokens in float64, over rings of three
and of four ranks, with packed documents. The kernel is the eager one. Key heads are fewer than
value heads, queries and keys normalized, and some gates 0 and 1.

{table}

The striped layout is refused: its runs are one token each. Convolutions, modules, random documents
and other numbers of ranks are in `tests/recurrent`, models of transformers in
`tests/integrations/test_recurrent.py`, and kernels for GPUs in `tests/gpu/test_recurrent_gpu.py`.

Written by `python -m docs.what_works_recurrent`.
"""


def measured(row: str, layout: str) -> str:
    """One field of the table."""
    worst = [0.0, 0.0]
    for size in (3, 4):
        made = balanced(BORDERS, size) if layout == "balanced" else layout
        spread = Spread(size, 48, 2, made, BORDERS)
        if row == "Mamba 2":
            sharded, same, *pair = mamba_2(spread, size)
        else:
            rule = ring_kda if row == "KDA" else ring_gated_delta_rule
            sharded, normal = data(spread, row == "KDA", size)
            initial = {"initial": normal(spread.batch, HEADS, D_K, D_V)}
            same = initial if row == "with initial states" else {}
            pair = delta(rule, normalize=True)
        for name, error in errors_of(spread, sharded, same, *pair).items():
            back = name.startswith("gradient")
            worst[back] = max(worst[back], error)
    return f"{worst[0]:.0e} / {worst[1]:.0e}"


def table() -> str:
    """A row for each layer, a column for each layout."""
    lines = [["layer", *LAYOUTS], ["---"] * (1 + len(LAYOUTS))]
    lines += [[row, *(measured(row, layout) for layout in LAYOUTS)] for row in ROWS]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    torch.set_num_threads(1)
    threads.PATIENCE = 900.0
    PAGE_AT.write_text(PAGE.format(table=table()))
