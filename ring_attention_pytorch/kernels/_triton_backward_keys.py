"""Flash attention backward to keys and values, over all tiles of a block: dk and dv.

`_triton_backward_queries.py` has dq. Scores are computed twice, but every program owns the memory
that it adds to, and results repeat to the bit. One kernel for all three, adding to dq by the tensor
memory accelerator, was slower on an H200.
"""

import triton
import triton.language as tl

from ring_attention_pytorch.kernels._triton_parts import (
    VARYING,
    add_rows,
    alibi_of,
    block_of,
    kept_of,
    marks_of_head,
    marks_of_rows,
    masked_block,
    packed,
    place,
    probabilities,
    rows_of,
    seen,
    span,
    tile_at,
)
from ring_attention_pytorch.runtime._triton_early import let_next_begin


@triton.jit
def _keys_step(
    running, i, tile, keys, queries, places, draws, inner, factor,
    ROWS: tl.constexpr, PACK: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr,  # sizes
    # forks
    EDGE: tl.constexpr, STEPPED: tl.constexpr, OF_K: tl.constexpr, OF_V: tl.constexpr,
    EVEN: tl.constexpr, EVEN_V: tl.constexpr, MASKED: tl.constexpr, CLAMP: tl.constexpr,
    NEGATE: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, WIDE: tl.constexpr,
    ALIBI: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    """Add rows from i on to dk, dv of one block of keys. EDGE: the tile may hide some scores.

    Without OF_K or OF_V the compiler leaves out all that only the other one needs.
    """
    dk, dv = running
    r0, r1, c0, c1, left, right, no_step, step = tile
    k_block, v_block, col, shown = keys
    q, q_strides, dout, do_strides, lse_at, lse_n, delta_at, delta_n, batch, head, d, d_v = queries
    row, _ = packed(i, head, ROWS, PACK)
    q_block = rows_of(q, q_strides, batch, head, i, r1, d, ROWS, D, EDGE, EVEN, TMA, WIDE, PACK)
    if NEGATE:
        q_block = -q_block
    do_block = rows_of(
        dout, do_strides, batch, head, i, r1, d_v, ROWS, D_V, EDGE, EVEN_V, TMA, WIDE, PACK
    )
    if EDGE:
        shown = shown & seen(
            col[:, None], row[None, :], (c0, c1, r0, r1, right, left, step, no_step), STEPPED
        )
    # products first: lse and delta in their layout take many registers, so they are loaded late
    scores = tl.dot(k_block, tl.trans(q_block), input_precision=PRECISION)
    dp = tl.dot(v_block, tl.trans(do_block), input_precision=PRECISION)
    if TMA:
        lse = tl.reshape(lse_at.load([batch, head, i]), [ROWS])
        delta = tl.reshape(delta_at.load([batch, head, i]), [ROWS])
    else:
        lse = tl.load(lse_at + row.to(tl.int64) * lse_n, mask=row < r1, other=0.0)
        delta = tl.load(delta_at + row.to(tl.int64) * delta_n, mask=row < r1, other=0.0)
    # a row that sees no key has lse = -inf, but then all of it is masked
    bias = None
    if ALIBI:
        slope_at, rows_at, col_at = places
        row_at = tl.load(rows_at + row, mask=row < r1, other=0)
        bias = alibi_of(slope_at[None, :], row_at[None, :], col_at[:, None])
    p, slope = probabilities(
        scores, lse[None, :] * 1.4426950408889634, shown, bias, inner, factor, MASKED, CLAMP, ALIBI
    )
    left = p
    if DROPS:
        marks, row_numbers, col_number, bar, inverse = draws
        number = tl.load(row_numbers + row, mask=row < r1, other=0)
        marks = marks_of_rows(marks, number)
        kept = kept_of(marks[0][None, :], marks[1][None, :], col_number[:, None], bar)
        left, dp = tl.where(kept, p, 0.0), tl.where(kept, dp * inverse, 0.0)
    ds = p * (dp - delta[None, :])
    if CLAMP:
        ds = ds * slope
    if OF_V:
        dv = tl.dot(left.to(do_block.dtype), do_block, dv, input_precision=PRECISION)
    if OF_K:
        dk = tl.dot(ds.to(q_block.dtype), q_block, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def _of_heads(
    head_of_row, alibi, word, other_word, sample, first_head,
    ALIBI: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    """Return each row's ALiBi slope and its head's two marks; placeholders if not ALIBI, DROPS."""
    slope, marks = head_of_row, (head_of_row, head_of_row)
    if ALIBI:
        slope = tl.load(alibi + head_of_row)
    if DROPS:
        marks = marks_of_head(word, other_word, sample, first_head + head_of_row)
    return slope, marks


@triton.jit(do_not_specialize=VARYING)
def keys_kernel(
    q, k, v, mask,
    alibi, rows_at, cols_at,  # ALiBi
    row_numbers, col_numbers, word, other_word, bar, inverse, sample, first_head,  # dropout
    dout, lse, delta, dk_before, dk, dv_before, dv,  # residuals and results
    tiles, blocks, count, at_once,  # the table of tiles
    m, key_heads, group, d, d_v, inner, factor, scale,  # sizes and factors
    # strides
    q_strides, k_strides, v_strides, mask_b, mask_m, do_strides, lse_b, lse_h, lse_n, delta_b,
    delta_h, delta_n, dk_strides, dv_strides,
    # sizes of blocks
    ROWS: tl.constexpr, COLS: tl.constexpr, PACK: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr,
    # forks
    STEPPED: tl.constexpr, OF_K: tl.constexpr, OF_V: tl.constexpr, EVEN: tl.constexpr,
    EVEN_V: tl.constexpr, MASK: tl.constexpr, CLAMP: tl.constexpr, NEGATE: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, WIDE: tl.constexpr, FRESH: tl.constexpr,
    FRESH_V: tl.constexpr, ALIBI: tl.constexpr, DROPS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute dk (OF_K) and dv (OF_V) of a block of keys, from every query head that uses it."""
    let_next_begin(EARLY)
    block, of, looks = block_of(blocks, count, at_once)
    first_tile, last_tile = tl.load(looks), tl.load(looks + 1)
    start = block * COLS
    batch, key_head = of // key_heads, of % key_heads
    col = start + tl.arange(0, COLS)
    held = col < m
    k_block = rows_of(k, k_strides, batch, key_head, start, m, d, COLS, D, True, EVEN, TMA, WIDE)
    v_block = rows_of(
        v, v_strides, batch, key_head, start, m, d_v, COLS, D_V, True, EVEN_V, TMA, WIDE
    )
    col_at = col
    if ALIBI:
        col_at = tl.load(cols_at + col, mask=held, other=0)
    col_number = col
    if DROPS:
        col_number = tl.load(col_numbers + col, mask=held, other=0)
    shown = held[:, None]
    if MASK:
        at = place(mask, batch, key_head, mask_b, 0) + col.to(tl.int64) * mask_m
        shown = (tl.load(at, mask=held, other=0) != 0)[:, None]
    keys = k_block, v_block, col, shown
    running = tl.zeros([COLS, D], tl.float32), tl.zeros([COLS, D_V], tl.float32)
    for g in range(0, group, PACK):
        head = key_head * group + g
        _, head_of_row = packed(0, head, ROWS, PACK)
        slope, marks = _of_heads(
            head_of_row, alibi, word, other_word, sample + batch, first_head, ALIBI, DROPS
        )
        places, draws = (slope, rows_at, col_at), (marks, row_numbers, col_number, bar, inverse)
        lse_at, delta_at = lse, delta
        if not TMA:
            lse_at = place(lse, batch, head_of_row, lse_b, lse_h)
            delta_at = place(delta, batch, head_of_row, delta_b, delta_h)
        queries = (
            q, q_strides, dout, do_strides, lse_at, lse_n, delta_at, delta_n, batch, head, d, d_v,
        )  # fmt: skip
        for t in range(first_tile, last_tile):
            tile = tile_at(tiles, t)
            r0, r1, c0, c1, left, right, _no_step, step = tile
            # columns beyond the last are computed, but not stored
            stop = tl.minimum(start + COLS, m)
            a, z = tl.maximum(start, c0), tl.minimum(stop, c1)
            whole = (start >= c0) & (stop <= c1)
            # TMA loads lse and delta 16 bytes at a time
            first, early, masked, full, full_end = span(
                a, z, whole, c0, r0, r1, right, left, ROWS // PACK, 4, step, 1, STEPPED
            )
            for j in range(masked):
                i = masked_block(j, first, early, full, full_end, ROWS // PACK)
                running = _keys_step(
                    running, i, tile, keys, queries, places, draws, inner, factor,
                    ROWS, PACK, D, D_V, True, STEPPED, OF_K, OF_V, EVEN, EVEN_V, True,
                    CLAMP, NEGATE, PRECISION, TMA, WIDE, ALIBI, DROPS,
                )  # fmt: skip
            for i in range(full, full_end, ROWS // PACK):
                running = _keys_step(
                    running, i, tile, keys, queries, places, draws, inner, factor,
                    ROWS, PACK, D, D_V, False, False, OF_K, OF_V, EVEN, EVEN_V, MASK,
                    CLAMP, NEGATE, PRECISION, TMA, WIDE, ALIBI, DROPS,
                )  # fmt: skip
    dk_sum, dv_sum = running
    if OF_K:
        if NEGATE:  # dk was computed from the negated q
            scale = -scale
        dk_sum = dk_sum * scale
        add_rows(
            dk_before, dk, dk_strides, batch, key_head, start, m, d, dk_sum, COLS, D, WIDE, FRESH
        )
    if OF_V:
        dv_sum = dv_sum * inverse  # dropout's; 1 without
        add_rows(
            dv_before, dv, dv_strides, batch, key_head, start, m, d_v, dv_sum,
            COLS, D_V, WIDE, FRESH_V,
        )  # fmt: skip
