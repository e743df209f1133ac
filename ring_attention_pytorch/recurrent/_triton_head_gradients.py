"""A Triton kernel of the gated delta rule's gradients within chunks.

flash-linear-attention refuses its own where Triton compiles the product with transposed scores in
registers wrongly (Hopper, from 3.4 to before 3.7.1). This one computes scores also transposed, so
that no product has an operand that was turned in registers.
"""

import triton
import triton.language as tl


@triton.jit
def products(
    v, h, do, dh, dv, at, inside, state, channels,
    K: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Return the parts of gradients from a chunk's values and states: sums over columns of values.

    The gradients of q, k and w, of scores and of scores transposed, before gates, and the product
    of the state before the chunk and the gradient of the one after it.
    """
    total = 0.0
    b_dq = tl.zeros([CHUNK, BK], dtype=tl.float32)
    b_dk = tl.zeros([CHUNK, BK], dtype=tl.float32)
    b_dw = tl.zeros([CHUNK, BK], dtype=tl.float32)
    scores = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    turned = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    for column in range(0, V, BV):
        columns = column + tl.arange(0, BV)
        values = inside[:, None] & (columns < V)[None, :]
        of_values = at[:, None] * V + columns[None, :]
        b_v = tl.load(v + of_values, mask=values, other=0.0)
        b_do = tl.load(do + of_values, mask=values, other=0.0)
        b_dv = tl.load(dv + of_values, mask=values, other=0.0)
        of_state = state + channels[None, :] * V + columns[:, None]
        states = (columns < V)[:, None] & (channels < K)[None, :]
        b_h = tl.load(h + of_state, mask=states, other=0.0)
        b_dh = tl.load(dh + of_state, mask=states, other=0.0)
        total += tl.sum(b_h.to(tl.float32) * b_dh.to(tl.float32))
        scores = tl.dot(b_do, tl.trans(b_v), scores)
        turned = tl.dot(b_v, tl.trans(b_do), turned)
        b_dq = tl.dot(b_do, b_h, b_dq)
        b_dk = tl.dot(b_v, b_dh, b_dk)
        b_dw = tl.dot(b_dv, b_h, b_dw)
    return b_dq, b_dk, b_dw, scores, turned, total


@triton.jit(do_not_specialize=["tokens"])
def head_gradients_kernel(
    q, k, v, g, h, do, dh, dv, dq, dk, dw, dg, chunks, borders, scale, tokens: tl.int32,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    CHUNK: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Store the gradients of q, k, w and sums of gates: one chunk, key head, block of channels.

    Value heads that share the key head are summed for q and k. Gradients of sums of gates are of
    this block alone: `[blocks, n, h]`.
    """
    program, blocks = tl.program_id(0), tl.cdiv(K, BK)
    count = tl.num_programs(0) // (blocks * KEY_HEADS)  # of chunks
    block, chunk, key_head = program % blocks, program // blocks % count, program // blocks // count
    run, number = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    start, end = tl.load(borders + run) + number * CHUNK, tl.load(borders + run + 1)
    t = start + tl.arange(0, CHUNK)
    inside, last = t < end, tl.minimum(start + CHUNK, end) - 1
    channels = block * BK + tl.arange(0, BK)
    here = inside[:, None] & (channels < K)[None, :]
    both = inside[:, None] & inside[None, :]
    key = ((t * KEY_HEADS + key_head).to(tl.int64) * K)[:, None] + channels[None, :]
    all_dq = tl.zeros([CHUNK, BK], dtype=tl.float32)
    all_dk = tl.zeros([CHUNK, BK], dtype=tl.float32)
    for shared in range(HEADS // KEY_HEADS):
        head = key_head * (HEADS // KEY_HEADS) + shared
        at = (t * HEADS + head).to(tl.int64)
        state = (chunk * HEADS + head).to(tl.int64) * K * V
        b_dq, b_dk, b_dw, scores, turned, total = products(
            v, h, do, dh, dv, at, inside, state, channels, K, V, CHUNK, BK, BV
        )
        tl.store(dw + at[:, None] * K + channels[None, :], -b_dw, mask=here)
        b_q = tl.load(q + key, mask=here, other=0.0)
        b_k = tl.load(k + key, mask=here, other=0.0)
        b_g = tl.load(g + at, mask=inside, other=0.0)
        whole = tl.load(g + (last * HEADS + head).to(tl.int64))
        b_dq *= tl.exp2(b_g)[:, None] * scale
        b_dk *= tl.where(inside, tl.exp2(whole - b_g), 0.0)[:, None]
        total = total * tl.exp2(whole) + tl.sum(b_dk * b_k)
        since = b_g[:, None] - b_g[None, :]  # from a column's token to a row's
        seen = (t[:, None] >= t[None, :]) & both
        scores = tl.where(seen, scores * tl.exp2(since), 0.0) * scale
        seen = (t[:, None] <= t[None, :]) & both
        turned = tl.where(seen, turned * tl.exp2(-since), 0.0) * scale
        b_dq = tl.dot(scores.to(b_k.dtype), b_k, b_dq)
        b_dk = tl.dot(turned.to(b_q.dtype), b_q, b_dk)
        b_dg = tl.sum(b_dq * b_q, axis=1) - tl.sum(b_dk * b_k, axis=1)
        b_dg = tl.where(t == last, b_dg + total, b_dg)
        tl.store(dg + block.to(tl.int64) * tokens * HEADS + at, b_dg, mask=inside)
        all_dq += b_dq
        all_dk += b_dk
    tl.store(dq + key, all_dq, mask=here)
    tl.store(dk + key, all_dk, mask=here)
