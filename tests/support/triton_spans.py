"""Which blocks `_triton_parts.span` names, by Triton's interpreter: imported where that is on."""

import random

import torch
import triton
import triton.language as tl

from ring_attention_pytorch.kernels._triton_parts import masked_block, span

BLOCK = 16


@triton.jit
def _blocks(
    found,
    start,
    stop,
    whole,
    a0,
    b0,
    b1,
    back,
    ahead,
    back_step,
    ahead_step,
    SIZE: tl.constexpr,
    ALIGNED: tl.constexpr,
    STEPPED: tl.constexpr,
):
    first, early, masked, full, full_end = span(
        start, stop, whole, a0, b0, b1, back, ahead, SIZE, ALIGNED, back_step, ahead_step, STEPPED
    )
    tl.store(found, masked)
    tl.store(found + 1, full)
    tl.store(found + 2, full_end)
    for i in range(masked):
        tl.store(found + 3 + i, masked_block(i, first, early, full, full_end, SIZE))


def wrong_spans(count: int) -> list[tuple[int, ...]]:
    """Bands of which a seen pair is in no block, a full block shows less, or that start oddly."""
    draw, wrong = random.Random(0), []
    for _ in range(count):
        a0, b0 = draw.randint(0, 40), draw.randint(0, 40)
        a1, b1 = a0 + draw.randint(1, 70), b0 + draw.randint(1, 70)
        back, ahead = (draw.choice([0, draw.randint(0, 70), 70]) for _ in range(2))
        start = draw.randint(0, 6) * BLOCK
        at, end = max(start, a0), min(start + BLOCK, a1)
        band = at, end, int(start >= a0 and start + BLOCK <= a1), a0, b0, b1, back, ahead
        found = torch.zeros(64, dtype=torch.int32)
        aligned = draw.choice([1, 4])
        up, down = draw.choice([(1, 1), (1, 3), (1, 32), (5, 1), (24, 1)])
        stepped = (up, down) != (1, 1)
        sizes = dict(SIZE=BLOCK, ALIGNED=aligned, STEPPED=stepped)
        _blocks[(1,)](found, *band, up, down, **sizes)
        masked, full, full_end, *starts = found.tolist()
        whole = range(full, full_end, BLOCK)
        held = {j for s in (*starts[:masked], *whole) for j in range(s, s + BLOCK)}
        seen = [
            set(
                range(
                    b0 + -(-max(0, i - a0 - back) // up) * up,
                    min(b1, (i - a0) // down * down + b0 + ahead + 1),
                )
            )
            for i in range(at, end)
        ]
        shown = all(set(range(s, s + BLOCK)) <= each for s in whole for each in seen)
        even = all(s % aligned == 0 for s in (*starts[:masked], *whole))
        if not (shown and even and all(each <= held for each in seen)):
            wrong.append((*band, up, down))
    return wrong
