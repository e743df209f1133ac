# ruff: noqa: PLR0913 - a kernel takes every stride by itself
"""Flash attention backward over all tiles of a block, added to the running dq, dk and dv.

One kernel makes dk and dv, the other dq. So scores are computed twice, but every program owns what
it adds to, and results repeat to the bit. One kernel for all three, adding to dq by the tensor
memory accelerator, was slower on an H200.
"""

import triton
import triton.language as tl

from ring_attention_pytorch.kernels._triton_parts import (
    VARYING,
    alibi_of,
    block_of,
    kept_of,
    lse_of_rows,
    marks_of_head,
    marks_of_rows,
    masked_block,
    matrix,
    place,
    rows_of,
    seen,
    span,
    tanh,
    tile_at,
)


@triton.jit
def _probabilities(
    scores, lse, shown, bias, inner, factor,
    MASKED: tl.constexpr, CLAMP: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """Return p, and the slope of softclamping. lse is in base 2."""
    slope = 1.0
    if CLAMP:
        scores, slope = tanh(scores * inner)
    exponent = scores * factor - lse
    if BIASED:
        exponent += bias
    if MASKED:
        exponent = tl.where(shown, exponent, -float("inf"))
    return tl.exp2(exponent), slope


@triton.jit
def _add(before, total, at, value, inside, FRESH: tl.constexpr):
    """Store value in total, added to `before` unless FRESH."""
    if not FRESH:
        value += tl.load(before + at, mask=inside)
    tl.store(total + at, value, mask=inside)


@triton.jit
def _keys_step(
    dk, dv, i, k_block, v_block, col, shown, alibi, rows_at, col_at,
    first_mark, second_mark, row_numbers, col_number, bar, inverse,
    q, dout, lse_at, delta_at, batch, head,
    r0, r1, c0, c1, left, right, d, d_v, inner, factor,
    q_b, q_n, q_h, q_d, do_b, do_n, do_h, do_d, lse_n, delta_n,
    ROWS: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr, EVEN: tl.constexpr,
    EVEN_V: tl.constexpr, EDGE: tl.constexpr, MASKED: tl.constexpr, CLAMP: tl.constexpr,
    NEGATE: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, WIDE: tl.constexpr,
    ALIBI: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    """Add rows i and on to dk, dv of one block of keys. EDGE: the tile may not show all of it."""
    row = i + tl.arange(0, ROWS)
    q_block = rows_of(q, batch, head, i, r1, d, q_b, q_n, q_h, q_d, ROWS, D, EDGE, EVEN, TMA, WIDE)
    if NEGATE:
        q_block = -q_block
    do_block = rows_of(
        dout, batch, head, i, r1, d_v, do_b, do_n, do_h, do_d, ROWS, D_V, EDGE, EVEN_V, TMA, WIDE
    )
    if EDGE:
        shown = shown & seen(col[:, None], row[None, :], c0, c1, r0, r1, right, left)
    # products first: lse and delta in their layout take many registers, so they come late
    scores = tl.dot(k_block, tl.trans(q_block), input_precision=PRECISION)
    dp = tl.dot(v_block, tl.trans(do_block), input_precision=PRECISION)
    if TMA:
        lse = tl.reshape(lse_at.load([batch, head, i]), [ROWS])
        delta = tl.reshape(delta_at.load([batch, head, i]), [ROWS])
    else:
        lse = tl.load(lse_at + row.to(tl.int64) * lse_n, mask=row < r1, other=0.0)
        delta = tl.load(delta_at + row.to(tl.int64) * delta_n, mask=row < r1, other=0.0)
    # a row that sees nothing has lse = -inf, but then all of it is masked
    bias = None
    if ALIBI:
        row_at = tl.load(rows_at + row, mask=row < r1, other=0)
        bias = alibi_of(tl.load(alibi + head), row_at[None, :], col_at[:, None])
    p, slope = _probabilities(
        scores, lse[None, :] * 1.4426950408889634, shown, bias, inner, factor, MASKED, CLAMP, ALIBI
    )
    left = p
    if DROPS:
        number = tl.load(row_numbers + row, mask=row < r1, other=0)
        first_mark, second_mark = marks_of_rows(first_mark, second_mark, number)
        kept = kept_of(first_mark[None, :], second_mark[None, :], col_number[:, None], bar)
        left, dp = tl.where(kept, p, 0.0), tl.where(kept, dp * inverse, 0.0)
    ds = p * (dp - delta[None, :])
    if CLAMP:
        ds = ds * slope
    dv = tl.dot(left.to(do_block.dtype), do_block, dv, input_precision=PRECISION)
    dk = tl.dot(ds.to(q_block.dtype), q_block, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=VARYING)
def keys_kernel(
    q, k, v, mask, alibi, rows_at, cols_at,
    row_numbers, col_numbers, word, other_word, bar, inverse, sample, first_head,
    dout, lse, delta, dk_before, dk, dv_before, dv, tiles, blocks, count, beside,
    m, key_heads, group, d, d_v, inner, factor, scale,
    q_b, q_n, q_h, q_d, k_b, k_m, k_h, k_d, v_b, v_m, v_h, v_d, mask_b, mask_m,
    do_b, do_n, do_h, do_d, lse_b, lse_h, lse_n, delta_b, delta_h, delta_n,
    dk_b, dk_m, dk_h, dk_d, dv_b, dv_m, dv_h, dv_d,
    ROWS: tl.constexpr, COLS: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr,
    EVEN: tl.constexpr, EVEN_V: tl.constexpr, MASK: tl.constexpr, CLAMP: tl.constexpr,
    NEGATE: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, WIDE: tl.constexpr,
    FRESH: tl.constexpr, FRESH_V: tl.constexpr, ALIBI: tl.constexpr,
    DROPS: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of a block of keys, from every query head that uses it."""
    block, of, first_tile, last_tile = block_of(blocks, count, beside)
    start = block * COLS
    batch, key_head = of // key_heads, of % key_heads
    col = start + tl.arange(0, COLS)
    held = col < m
    k_block = rows_of(
        k, batch, key_head, start, m, d, k_b, k_m, k_h, k_d, COLS, D, True, EVEN, TMA, WIDE
    )
    v_block = rows_of(
        v, batch, key_head, start, m, d_v, v_b, v_m, v_h, v_d, COLS, D_V, True, EVEN_V,
        TMA, WIDE,
    )  # fmt: skip
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
    dk_sum = tl.zeros([COLS, D], tl.float32)
    dv_sum = tl.zeros([COLS, D_V], tl.float32)
    for g in range(group):
        head = key_head * group + g
        first_mark, second_mark = head, head
        if DROPS:
            marks = marks_of_head(word, other_word, sample + batch, first_head + head)
            first_mark, second_mark = marks[0], marks[1]
        lse_at, delta_at = lse, delta
        if not TMA:
            lse_at = place(lse, batch, head, lse_b, lse_h)
            delta_at = place(delta, batch, head, delta_b, delta_h)
        for t in range(first_tile, last_tile):
            r0, r1, c0, c1, left, right = tile_at(tiles, t)
            # columns beyond the last are not stored, whatever comes of them
            stop = tl.minimum(start + COLS, m)
            a, z = tl.maximum(start, c0), tl.minimum(stop, c1)
            whole = (start >= c0) & (stop <= c1)
            first, early, masked, full, full_end = span(a, z, whole, c0, r0, r1, right, left, ROWS)
            for i in range(masked):
                dk_sum, dv_sum = _keys_step(
                    dk_sum, dv_sum, masked_block(i, first, early, full, full_end, ROWS),
                    k_block, v_block, col, shown, alibi, rows_at, col_at,
                    first_mark, second_mark, row_numbers, col_number, bar, inverse,
                    q, dout, lse_at, delta_at, batch, head,
                    r0, r1, c0, c1, left, right, d, d_v, inner, factor,
                    q_b, q_n, q_h, q_d, do_b, do_n, do_h, do_d, lse_n, delta_n, ROWS, D,
                    D_V, EVEN, EVEN_V, True, True, CLAMP, NEGATE, PRECISION, TMA, WIDE, ALIBI,
                    DROPS,
                )  # fmt: skip
            for i in range(full, full_end, ROWS):
                dk_sum, dv_sum = _keys_step(
                    dk_sum, dv_sum, i,
                    k_block, v_block, col, shown, alibi, rows_at, col_at,
                    first_mark, second_mark, row_numbers, col_number, bar, inverse,
                    q, dout, lse_at, delta_at, batch, head,
                    r0, r1, c0, c1, left, right, d, d_v, inner, factor,
                    q_b, q_n, q_h, q_d, do_b, do_n, do_h, do_d, lse_n, delta_n, ROWS, D,
                    D_V, EVEN, EVEN_V, False, MASK, CLAMP, NEGATE, PRECISION, TMA, WIDE, ALIBI,
                    DROPS,
                )  # fmt: skip
    if DROPS:
        dv_sum = dv_sum * inverse
    if NEGATE:  # dk was made from the negated q
        scale = -scale
    at = place(0, batch, key_head, dk_b, dk_h) + matrix(start, dk_m, dk_d, COLS, D, WIDE)
    inside = held[:, None] & (tl.arange(0, D) < d)[None, :]
    _add(dk_before, dk, at, dk_sum * scale, inside, FRESH)
    at = place(0, batch, key_head, dv_b, dv_h) + matrix(start, dv_m, dv_d, COLS, D_V, WIDE)
    inside = held[:, None] & (tl.arange(0, D_V) < d_v)[None, :]
    _add(dv_before, dv, at, dv_sum, inside, FRESH_V)


@triton.jit
def _queries_step(
    dq, j, stop, q_block, do_block, lse, delta, row, col, slope_at, row_at, cols_at,
    first_mark, second_mark, col_numbers, bar, inverse, k, v, mask_at,
    batch, key_head, r0, r1, c0, c1, left, right, d, d_v, inner, factor,
    k_b, k_m, k_h, k_d, v_b, v_m, v_h, v_d, mask_m,
    COLS: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr, EVEN: tl.constexpr,
    EVEN_V: tl.constexpr, EDGE: tl.constexpr, MASK: tl.constexpr, CLAMP: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, WIDE: tl.constexpr, ALIBI: tl.constexpr,
    DROPS: tl.constexpr,
):  # fmt: skip
    """Add columns j to stop to dq of one block of queries. EDGE: not all of it is seen."""
    k_block = rows_of(
        k, batch, key_head, j, stop, d, k_b, k_m, k_h, k_d, COLS, D, EDGE, EVEN, TMA, WIDE
    )
    v_block = rows_of(
        v, batch, key_head, j, stop, d_v, v_b, v_m, v_h, v_d, COLS, D_V, EDGE, EVEN_V, TMA, WIDE
    )
    shown = None
    if EDGE:
        shown = seen(row[:, None], (j + col)[None, :], r0, r1, c0, c1, left, right)
    if MASK:
        at = mask_at + (j + col).to(tl.int64) * mask_m
        kept = (tl.load(at, mask=j + col < stop, other=0) != 0)[None, :]
        shown = shown & kept if EDGE else kept
    scores = tl.dot(q_block, tl.trans(k_block), input_precision=PRECISION)
    bias = None
    if ALIBI:
        col_at = tl.load(cols_at + j + col, mask=j + col < stop, other=0)
        bias = alibi_of(slope_at, row_at[:, None], col_at[None, :])
    p, slope = _probabilities(
        scores, lse, shown, bias, inner, factor, EDGE or MASK, CLAMP, ALIBI
    )  # fmt: skip
    dp = tl.dot(do_block, tl.trans(v_block), input_precision=PRECISION)
    if DROPS:
        number = tl.load(col_numbers + j + col, mask=j + col < stop, other=0)[None, :]
        kept = kept_of(first_mark[:, None], second_mark[:, None], number, bar)
        dp = tl.where(kept, dp * inverse, 0.0)
    ds = p * (dp - delta)
    if CLAMP:
        ds = ds * slope
    return tl.dot(ds.to(k_block.dtype), k_block, dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=VARYING)
def queries_kernel(
    q, k, v, mask, alibi, rows_at, cols_at,
    row_numbers, col_numbers, word, other_word, bar, inverse, sample, first_head,
    dout, lse, delta, before, dq,
    tiles, blocks, count, beside, n, m, heads, group, d, d_v, inner, factor, scale,
    q_b, q_n, q_h, q_d, k_b, k_m, k_h, k_d, v_b, v_m, v_h, v_d, mask_b, mask_m,
    do_b, do_n, do_h, do_d, lse_b, lse_h, lse_n, delta_b, delta_h, delta_n,
    dq_b, dq_n, dq_h, dq_d,
    ROWS: tl.constexpr, COLS: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr,
    EVEN: tl.constexpr, EVEN_V: tl.constexpr, MASK: tl.constexpr, CLAMP: tl.constexpr,
    NEGATE: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, WIDE: tl.constexpr,
    FRESH: tl.constexpr, ALIBI: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    """Compute dq of a block of queries of one head."""
    block, of, first_tile, last_tile = block_of(blocks, count, beside)
    start = block * ROWS
    batch, head = of // heads, of % heads
    key_head = head // group
    row, col = start + tl.arange(0, ROWS), tl.arange(0, COLS)
    held = row < n
    q_block = rows_of(
        q, batch, head, start, n, d, q_b, q_n, q_h, q_d, ROWS, D, True, EVEN, TMA, WIDE
    )
    if NEGATE:
        q_block = -q_block
    do_block = rows_of(
        dout, batch, head, start, n, d_v, do_b, do_n, do_h, do_d, ROWS, D_V, True, EVEN_V,
        TMA, WIDE,
    )  # fmt: skip
    lse_at = place(lse, batch, head, lse_b, lse_h)
    delta_at = place(delta, batch, head, delta_b, delta_h)
    delta_rows = tl.load(delta_at + row.to(tl.int64) * delta_n, mask=held, other=0.0)[:, None]
    mask_at = mask
    if MASK:
        mask_at = place(mask, batch, key_head, mask_b, 0)
    slope, row_at = 0.0, row
    if ALIBI:
        slope, row_at = tl.load(alibi + head), tl.load(rows_at + row, mask=held, other=0)
    first_mark, second_mark = row, row
    if DROPS:
        number = tl.load(row_numbers + row, mask=held, other=0)
        marks = marks_of_head(word, other_word, sample + batch, first_head + head)
        first_mark, second_mark = marks_of_rows(marks[0], marks[1], number)
    dq_sum = tl.zeros([ROWS, D], tl.float32)
    for t in range(first_tile, last_tile):
        r0, r1, c0, c1, left, right = tile_at(tiles, t)
        # rows of another tile have p = 0 by their lse, so they never need masking
        lse_rows = lse_of_rows(lse_at, lse_n, row, r0, r1)[:, None]
        a, z = tl.maximum(start, r0), tl.minimum(tl.minimum(start + ROWS, n), r1)
        first, early, masked, full, full_end = span(a, z, 1, r0, c0, c1, left, right, COLS)
        for j in range(full, full_end, COLS):
            dq_sum = _queries_step(
                dq_sum, j, m, q_block, do_block, lse_rows, delta_rows, row, col,
                slope, row_at, cols_at, first_mark, second_mark, col_numbers, bar, inverse,
                k, v, mask_at,
                batch, key_head, r0, r1, c0, c1, left, right, d, d_v, inner, factor,
                k_b, k_m, k_h, k_d, v_b, v_m, v_h, v_d, mask_m, COLS, D, D_V, EVEN, EVEN_V,
                False, MASK, CLAMP, PRECISION, TMA, WIDE, ALIBI, DROPS,
            )  # fmt: skip
        for i in range(masked):
            dq_sum = _queries_step(
                dq_sum, masked_block(i, first, early, full, full_end, COLS), c1,
                q_block, do_block, lse_rows, delta_rows, row, col,
                slope, row_at, cols_at, first_mark, second_mark, col_numbers, bar, inverse,
                k, v, mask_at,
                batch, key_head, r0, r1, c0, c1, left, right, d, d_v, inner, factor,
                k_b, k_m, k_h, k_d, v_b, v_m, v_h, v_d, mask_m, COLS, D, D_V, EVEN, EVEN_V,
                True, MASK, CLAMP, PRECISION, TMA, WIDE, ALIBI, DROPS,
            )  # fmt: skip
    at = place(0, batch, head, dq_b, dq_h) + matrix(start, dq_n, dq_d, ROWS, D, WIDE)
    inside = held[:, None] & (tl.arange(0, D) < d)[None, :]
    _add(before, dq, at, dq_sum * scale, inside, FRESH)
