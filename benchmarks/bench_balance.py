"""How evenly layouts spread the work of packed documents: `python -m benchmarks.bench_balance`.

By how much the slowest rank passes the mean in visible pairs under a causal mask, the worst of
five draws of 8192 tokens a rank.
"""

import random
from collections.abc import Callable

from ring_attention_pytorch import balanced
from ring_attention_pytorch.geometry.balance import visible_keys
from ring_attention_pytorch.geometry.documents import of_borders
from ring_attention_pytorch.geometry.layouts import Layout, all_segments, segment_positions

TOKENS, DRAWS = 8192, 5
KINDS: dict[str, Callable[[random.Random, int, bool], int]] = {
    "log-normal around 4k": lambda draw, total, first: max(1, int(draw.lognormvariate(8.3, 1))),
    "one long, many short": lambda draw, total, first: (
        total // 2 if first else draw.randint(1, 999)
    ),
    "of 1 to 999 tokens": lambda draw, total, first: draw.randint(1, 999),
    "of 1 to 60 tokens": lambda draw, total, first: draw.randint(1, 60),
}


def borders(kind: str, total: int, draw: random.Random) -> list[int]:
    found = [0]
    while found[-1] < total:
        found.append(min(total, found[-1] + KINDS[kind](draw, total, len(found) == 1)))
    return found


def excess(layout: Layout, cut: list[int], ranks: int) -> float:
    """By what part the rank with most visible pairs passes the mean."""
    work = visible_keys(of_borders(cut), causal=True, window=None)
    held = all_segments(layout, ranks, cut[-1])
    loads = [int(work[segment_positions(segments)].sum()) for segments in held]
    return max(loads) * ranks / sum(loads) - 1


def main() -> None:
    print("| documents | ranks | contiguous | zigzag | balanced |")
    print("| --- | --- | --- | --- | --- |")
    for kind in KINDS:
        draw = random.Random(0)
        for ranks in (2, 4, 8, 16, 64):
            cuts = [borders(kind, ranks * TOKENS, draw) for _ in range(DRAWS)]
            worst = [
                max(excess(layout or balanced(cut, ranks), cut, ranks) for cut in cuts)
                for layout in ("contiguous", "zigzag", None)
            ]
            print(f"| {kind} | {ranks} | " + " | ".join(f"{w:.1%}" for w in worst) + " |")


if __name__ == "__main__":
    main()
