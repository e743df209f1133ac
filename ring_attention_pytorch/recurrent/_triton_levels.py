"""Triton kernels that follow chains of maps, forward and backward.

A program follows one chain of maps, for one head and some columns of the state, in float32.
"""

import triton
import triton.language as tl


@triton.jit
def follow_kernel(
    m, u, first, states, places, offsets,
    M_RUN: tl.constexpr, M_HEAD: tl.constexpr, M_ROW: tl.constexpr,
    U_RUN: tl.constexpr, U_HEAD: tl.constexpr, U_ROW: tl.constexpr,
    HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Store the states of each chain: S, M S + U, and so on."""
    program, blocks = tl.program_id(0), tl.cdiv(V, BV)
    block, head, chain = program % blocks, program // blocks % HEADS, program // blocks // HEADS
    rows, columns = tl.arange(0, BK), block * BV + tl.arange(0, BV)
    square = (rows < K)[:, None] & (rows < K)[None, :]
    inside = (rows < K)[:, None] & (columns < V)[None, :]
    of_state = rows[:, None] * V + columns[None, :]
    size: tl.constexpr = K * V
    at = (chain * HEADS + head).to(tl.int64) * size
    state = tl.load(first + at + of_state, mask=inside, other=0.0)
    begin, end = tl.load(offsets + chain), tl.load(offsets + chain + 1)
    to = (begin * HEADS + head).to(tl.int64) * size
    tl.store(states + to + of_state, state, mask=inside)
    for number in range(begin + 1, end):
        place = tl.load(places + number - 1 - chain).to(tl.int64)
        of_m = place * M_RUN + head * M_HEAD + rows[:, None] * M_ROW + rows[None, :]
        of_u = place * U_RUN + head * U_HEAD + rows[:, None] * U_ROW + columns[None, :]
        b_m = tl.load(m + of_m, mask=square, other=0.0)
        b_u = tl.load(u + of_u, mask=inside, other=0.0)
        state = tl.dot(b_m, state, input_precision="tf32x3") + b_u
        to = (number * HEADS + head).to(tl.int64) * size
        tl.store(states + to + of_state, state, mask=inside)


@triton.jit
def return_kernel(
    m, grads, du, dfirst, places, offsets,
    M_RUN: tl.constexpr, M_HEAD: tl.constexpr, M_ROW: tl.constexpr,
    HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Store the gradients of U of the maps that are followed, and of the first states."""
    program, blocks = tl.program_id(0), tl.cdiv(V, BV)
    block, head, chain = program % blocks, program // blocks % HEADS, program // blocks // HEADS
    rows, columns = tl.arange(0, BK), block * BV + tl.arange(0, BV)
    square = (rows < K)[:, None] & (rows < K)[None, :]
    inside = (rows < K)[:, None] & (columns < V)[None, :]
    of_state = rows[:, None] * V + columns[None, :]
    size: tl.constexpr = K * V
    total = tl.zeros([BK, BV], dtype=tl.float32)
    begin, end = tl.load(offsets + chain), tl.load(offsets + chain + 1)
    for back in range(0, end - 1 - begin):
        number = end - 1 - back
        place = tl.load(places + number - 1 - chain).to(tl.int64)
        of = (number * HEADS + head).to(tl.int64) * size
        total += tl.load(grads + of + of_state, mask=inside, other=0.0)
        to = (place * HEADS + head) * size
        tl.store(du + to + of_state, total, mask=inside)
        of_m = place * M_RUN + head * M_HEAD + rows[:, None] + rows[None, :] * M_ROW  # transposed
        b_m = tl.load(m + of_m, mask=square, other=0.0)
        total = tl.dot(b_m, total, input_precision="tf32x3")
    of = (begin * HEADS + head).to(tl.int64) * size
    total += tl.load(grads + of + of_state, mask=inside, other=0.0)
    at = (chain * HEADS + head).to(tl.int64) * size
    tl.store(dfirst + at + of_state, total, mask=inside)
