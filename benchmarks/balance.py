"""Compare how evenly layouts spread the work of packed documents.

    python -m benchmarks balance

Work is pairs that a causal mask shows. A cell says by how much the rank with most of it passes the
mean, at the worst of some draws.
"""

import random
from collections.abc import Sequence

from benchmarks.lib.options import parser
from benchmarks.lib.results import markdown
from benchmarks.lib.sequences import KINDS, borders
from ring_attention_pytorch import balanced
from ring_attention_pytorch.geometry.balance import visible_keys
from ring_attention_pytorch.geometry.documents import of_borders
from ring_attention_pytorch.geometry.layouts import Layout, all_segments, segment_positions

LAYOUTS = ("contiguous", "zigzag", "balanced")


def excess(layout: Layout, cut: list[int], ranks: int) -> float:
    """Return by what part the rank with most visible pairs passes the mean."""
    work = visible_keys(of_borders(cut), causal=True, window=None)
    held = all_segments(layout, ranks, cut[-1])
    loads = [int(work[segment_positions(segments)].sum()) for segments in held]
    return max(loads) * ranks / sum(loads) - 1


def worst(layout: str, cuts: list[list[int]], ranks: int) -> float:
    """Return the largest excess of a layout in any draw."""
    dealt = layout == "balanced"
    return max(excess(balanced(cut, ranks) if dealt else layout, cut, ranks) for cut in cuts)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    options = parser("balance", __doc__)
    options.add_argument("--tokens", type=int, default=8192, help="of one rank")
    options.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16, 64])
    options.add_argument("--draws", type=int, default=5)
    asked = options.parse_args(argv)
    table = []
    for kind in KINDS:
        draw = random.Random(0)
        for ranks in asked.ranks:
            cuts = [borders(kind, ranks * asked.tokens, draw) for _ in range(asked.draws)]
            cells = [f"{worst(layout, cuts, ranks):.1%}" for layout in LAYOUTS]
            table.append([kind, str(ranks), *cells])
    print(markdown(["documents", "ranks", *LAYOUTS], table))
