"""Triton kernels of states: the maps of runs, and the gradients of the states before them.

They read the chunks that flash-linear-attention made: w and u are such that a chunk maps a state S
to decay S + k^T (u - w S), rows decayed to the chunk's end. Gates are base 2 logarithms, summed
from each chunk's first token. A program follows one run of one head, for some columns of a state.
"""

import triton
import triton.language as tl


@triton.jit
def maps_kernel(
    k, w, u, g, spans, maps,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    CHUNK: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Store U, from a state of 0, and M, from the states of I without values: `[K, V + K]`."""
    program, blocks = tl.program_id(0), tl.cdiv(V, BV) + tl.cdiv(K, BV)
    block, head, run = program % blocks, program // blocks % HEADS, program // blocks // HEADS
    first, end = tl.load(spans + 2 * run), tl.load(spans + 2 * run + 1)
    of_u = block < tl.cdiv(V, BV)
    rows = tl.arange(0, BK)
    columns = tl.where(of_u, block, block - tl.cdiv(V, BV)) * BV + tl.arange(0, BV)
    in_rows, in_values = rows < K, (columns < V) & of_u
    state = tl.where((rows[:, None] == columns[None, :]) & (of_u == 0), 1.0, 0.0)
    for start in range(first, end, CHUNK):
        t = start + tl.arange(0, CHUNK)
        inside = t < end
        last = tl.minimum(start + CHUNK, end) - 1
        at = (t * HEADS + head).to(tl.int64)
        last_at = (last * HEADS + head).to(tl.int64)
        here = inside[:, None] & in_rows[None, :]
        b_w = tl.load(w + at[:, None] * K + rows[None, :], mask=here, other=0.0)
        values = inside[:, None] & in_values[None, :]
        b_u = tl.load(u + at[:, None] * V + columns[None, :], mask=values, other=0.0)
        value = b_u - tl.dot(b_w, state.to(b_w.dtype))
        if CHANNELS:
            decay = tl.exp2(tl.load(g + last_at * K + rows, mask=in_rows, other=0.0))
            state *= decay[:, None]
        else:
            b_g = tl.load(g + at, mask=inside, other=0.0)
            whole = tl.load(g + last_at)
            value *= tl.where(inside, tl.exp2(whole - b_g), 0.0)[:, None]
            state *= tl.exp2(whole)
        key = (t * KEY_HEADS + head // (HEADS // KEY_HEADS)).to(tl.int64) * K
        there = in_rows[:, None] & inside[None, :]
        b_k = tl.load(k + key[None, :] + rows[:, None], mask=there, other=0.0)
        state += tl.dot(b_k, value.to(b_k.dtype))
    shift = tl.where(of_u, 0, V)
    limit = tl.where(of_u, V, K)
    to = maps + ((run * HEADS + head).to(tl.int64) * K + rows[:, None]) * (V + K)
    kept = in_rows[:, None] & (columns < limit)[None, :]
    tl.store(to + shift + columns[None, :], state, mask=kept)


@triton.jit
def adjoint_kernel(
    q, k, w, do, dv, g, spans, grads, scale,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    CHUNK: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Store the gradients of the states before runs, of the outputs of these runs alone.

    `dv` are the gradients of values by the outputs of their own chunks.
    """
    program, blocks = tl.program_id(0), tl.cdiv(V, BV)
    block, head, run = program % blocks, program // blocks % HEADS, program // blocks // HEADS
    first, end = tl.load(spans + 2 * run), tl.load(spans + 2 * run + 1)
    rows = tl.arange(0, BK)
    columns = block * BV + tl.arange(0, BV)
    in_rows, in_columns = rows < K, columns < V
    state = tl.zeros([BK, BV], dtype=tl.float32)
    chunks = tl.cdiv(end - first, CHUNK)
    for number in range(0, chunks):
        start = first + (chunks - 1 - number) * CHUNK
        t = start + tl.arange(0, CHUNK)
        inside = t < end
        last = tl.minimum(start + CHUNK, end) - 1
        at = (t * HEADS + head).to(tl.int64)
        last_at = (last * HEADS + head).to(tl.int64)
        key = (t * KEY_HEADS + head // (HEADS // KEY_HEADS)).to(tl.int64) * K
        here = inside[:, None] & in_rows[None, :]
        there = in_rows[:, None] & inside[None, :]
        values = inside[:, None] & in_columns[None, :]
        b_k = tl.load(k + key[:, None] + rows[None, :], mask=here, other=0.0)
        b_w = tl.load(w + at[None, :] * K + rows[:, None], mask=there, other=0.0)
        b_q = tl.load(q + key[None, :] + rows[:, None], mask=there, other=0.0)
        b_do = tl.load(do + at[:, None] * V + columns[None, :], mask=values, other=0.0)
        value = tl.dot(b_k, state.to(b_k.dtype))
        if CHANNELS:
            decay = tl.exp2(tl.load(g + last_at * K + rows, mask=in_rows, other=0.0))
            state *= decay[:, None]
        else:
            b_g = tl.load(g + at, mask=inside, other=0.0)
            whole = tl.load(g + last_at)
            value *= tl.where(inside, tl.exp2(whole - b_g), 0.0)[:, None]
            b_q *= tl.exp2(b_g)[None, :]
            state *= tl.exp2(whole)
        value += tl.load(dv + at[:, None] * V + columns[None, :], mask=values, other=0.0)
        state = tl.dot((b_q * scale).to(b_do.dtype), b_do, state)
        state = tl.dot(b_w, (-value).to(b_w.dtype), state)
    to = grads + ((run * HEADS + head).to(tl.int64) * K + rows[:, None]) * V
    tl.store(to + columns[None, :], state, mask=in_rows[:, None] & in_columns[None, :])
