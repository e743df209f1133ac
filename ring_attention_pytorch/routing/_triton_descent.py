# ruff: noqa: PLR0913 - a kernel takes every pointer by itself
"""Triton kernels for passes over scores `[rows, n]`: one program for one block of one row."""

import triton
import triton.language as tl


@triton.jit
def partition_kernel(s, bound, count, top, total, per_eps, n, blocks, BLOCK: tl.constexpr):
    """Count a block's scores >= bound; compute the others' max and sum of exp, over eps."""
    row, block = tl.program_id(0), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    held = at < n
    scores = tl.load(s + row.to(tl.int64) * n + at, mask=held, other=-float("inf"))
    above = scores >= tl.load(bound + row)
    others = tl.where(above, -float("inf"), scores * tl.load(per_eps))
    highest = tl.max(others, 0)
    base = tl.where(highest == -float("inf"), 0.0, highest)
    place = row.to(tl.int64) * blocks + block
    tl.store(count + place, tl.sum((above & held).to(tl.float64), 0))
    tl.store(top + place, highest)
    tl.store(total + place, tl.sum(tl.exp(others - base), 0))


@triton.jit
def slope_kernel(
    s, slopes, window, coef, bound, at, e, n, windows, steps, BLOCK: tl.constexpr
):  # fmt: skip
    """Compute for each score s the sum over steps of coef * exp((s + at) / e) where s < bound."""
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = place < n
    scores = tl.load(s + row * n + place, mask=held, other=0.0)
    of_window = (row * windows + tl.load(window + place, mask=held, other=0)) * steps
    sums = tl.zeros([BLOCK], tl.float64)
    for t in range(steps):
        weight = tl.load(coef + of_window + t)
        shown = (scores < tl.load(bound + of_window + t)) & (weight != 0)
        x = (scores + tl.load(at + of_window + t)) / tl.load(e + t)
        sums += tl.where(shown, weight * tl.exp(tl.where(shown, x, 0.0)), 0.0)
    tl.store(slopes + row * n + place, sums, mask=held)
