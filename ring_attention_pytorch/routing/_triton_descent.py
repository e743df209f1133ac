"""Triton kernels for passes over scores `[rows, n]`: one program for one block of one row."""

import triton
import triton.language as tl


@triton.jit
def partition_kernel(s, bound, count, top, total, per_eps, n, blocks, BLOCK: tl.constexpr):
    """Count a block's scores >= bound; compute the others' max and sum of exp, over eps."""
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    cols = block * BLOCK + tl.arange(0, BLOCK)
    held = cols < n
    scores = tl.load(s + row * n + cols, mask=held, other=-float("inf"))
    above = scores >= tl.load(bound + row)
    scaled = scores * tl.load(per_eps)
    others = tl.where(above, -float("inf"), scaled)
    highest = tl.max(others, 0)
    base = tl.where(highest == -float("inf"), 0.0, highest)
    at_least = (above & held).to(tl.float64)
    powers = tl.exp(others - base)
    place = row * blocks + block
    tl.store(count + place, tl.sum(at_least, 0))
    tl.store(top + place, highest)
    tl.store(total + place, tl.sum(powers, 0))


@triton.jit
def slope_kernel(
    s, slopes, window, coef, bound, shift, e, n, windows, steps, BLOCK: tl.constexpr
):  # fmt: skip
    """Compute for each score s the sum over steps of coef * exp((s + shift) / e), if s < bound."""
    blocks = tl.cdiv(n, BLOCK)
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    cols = block * BLOCK + tl.arange(0, BLOCK)
    held = cols < n
    scores = tl.load(s + row * n + cols, mask=held, other=0.0)
    of_row = tl.load(window + cols, mask=held, other=0)
    term = (row * windows + of_row) * steps
    sums = tl.zeros([BLOCK], tl.float64)
    for t in range(steps):
        weight = tl.load(coef + term + t)
        below = scores < tl.load(bound + term + t)
        shown = below & (weight != 0)
        shifted = scores + tl.load(shift + term + t)
        x = shifted / tl.load(e + t)
        power = tl.exp(tl.where(shown, x, 0.0))
        sums += tl.where(shown, weight * power, 0.0)
    tl.store(slopes + row * n + cols, sums, mask=held)
