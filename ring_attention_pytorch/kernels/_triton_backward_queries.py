"""Flash attention backward to queries, over all tiles of a block, added to the running dq."""

import triton
import triton.language as tl

from ring_attention_pytorch.kernels._triton_parts import (
    VARYING,
    add_rows,
    alibi_of,
    block_of,
    draws_of_rows,
    kept_of,
    lse_of_rows,
    masked_block,
    packed,
    place,
    places_of_rows,
    probabilities,
    rows_of,
    seen,
    span,
    tile_at,
)
from ring_attention_pytorch.runtime._triton_early import end_after_the_last


@triton.jit
def _queries_step(
    dq, j, stop, tile, queries, keys, places, draws, inner, factor,
    COLS: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr,  # sizes
    # forks
    EDGE: tl.constexpr, STEPPED: tl.constexpr, EVEN: tl.constexpr, EVEN_V: tl.constexpr,
    MASK: tl.constexpr, CLAMP: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
    WIDE: tl.constexpr, ALIBI: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    """Add columns j to stop to dq of one block of queries. EDGE: some scores may be hidden."""
    q_block, do_block, lse, delta, row = queries
    k, k_strides, v, v_strides, mask, mask_b, mask_m, batch, head, d, d_v = keys
    k_block = rows_of(k, k_strides, batch, head, j, stop, d, COLS, D, EDGE, EVEN, TMA, WIDE)
    v_block = rows_of(v, v_strides, batch, head, j, stop, d_v, COLS, D_V, EDGE, EVEN_V, TMA, WIDE)
    col = j + tl.arange(0, COLS)
    shown = None
    if EDGE:
        shown = seen(row[:, None], col[None, :], tile, STEPPED)
    if MASK:
        at = place(mask, batch, head, mask_b, 0) + col.to(tl.int64) * mask_m
        kept = (tl.load(at, mask=col < stop, other=0) != 0)[None, :]
        shown = shown & kept if EDGE else kept
    scores = tl.dot(q_block, tl.trans(k_block), input_precision=PRECISION)
    bias = None
    if ALIBI:
        slope_at, row_at, cols_at = places
        col_at = tl.load(cols_at + col, mask=col < stop, other=0)
        bias = alibi_of(slope_at[:, None], row_at[:, None], col_at[None, :])
    p, slope = probabilities(scores, lse, shown, bias, inner, factor, EDGE or MASK, CLAMP, ALIBI)
    dp = tl.dot(do_block, tl.trans(v_block), input_precision=PRECISION)
    if DROPS:
        marks, col_numbers, bar, inverse = draws
        number = tl.load(col_numbers + col, mask=col < stop, other=0)[None, :]
        kept = kept_of(marks[0][:, None], marks[1][:, None], number, bar)
        dp = tl.where(kept, dp * inverse, 0.0)
    ds = p * (dp - delta)
    if CLAMP:
        ds = ds * slope
    return tl.dot(ds.to(k_block.dtype), k_block, dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=VARYING)
def queries_kernel(
    q, k, v, mask,
    alibi, rows_at, cols_at,  # ALiBi
    row_numbers, col_numbers, word, other_word, bar, inverse, sample, first_head,  # dropout
    dout, lse, delta, before, dq,  # residuals and results
    tiles, blocks, count, at_once,  # the table of tiles
    n, m, heads, group, d, d_v, inner, factor, scale,  # sizes and factors
    # strides
    q_strides, k_strides, v_strides, mask_b, mask_m, do_strides, lse_b, lse_h, lse_n, delta_b,
    delta_h, delta_n, dq_strides,
    # sizes of blocks
    ROWS: tl.constexpr, COLS: tl.constexpr, PACK: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr,
    # forks
    STEPPED: tl.constexpr, EVEN: tl.constexpr, EVEN_V: tl.constexpr, MASK: tl.constexpr,
    CLAMP: tl.constexpr, NEGATE: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
    WIDE: tl.constexpr, FRESH: tl.constexpr, ALIBI: tl.constexpr, DROPS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Compute dq of a block of queries."""
    TOKENS: tl.constexpr = ROWS // PACK
    block, pack, looks = block_of(blocks, count, at_once)
    first_tile, last_tile = tl.load(looks), tl.load(looks + 1)
    start = block * TOKENS
    batch, head = pack * PACK // heads, pack * PACK % heads
    key_head = head // group
    row, head_of_row = packed(start, head, ROWS, PACK)
    held = row < n
    q_block = rows_of(q, q_strides, batch, head, start, n, d, ROWS, D, True, EVEN, TMA, WIDE, PACK)
    if NEGATE:
        q_block = -q_block
    do_block = rows_of(
        dout, do_strides, batch, head, start, n, d_v, ROWS, D_V, True, EVEN_V, TMA, WIDE, PACK
    )
    lse_at = place(lse, batch, head_of_row, lse_b, lse_h)
    delta_at = place(delta, batch, head_of_row, delta_b, delta_h)
    delta_rows = tl.load(delta_at + row.to(tl.int64) * delta_n, mask=held, other=0.0)[:, None]
    slope, row_at = places_of_rows(alibi, rows_at, head_of_row, row, held, ALIBI)
    marks = draws_of_rows(
        word, other_word, sample + batch, first_head + head_of_row, row_numbers, row, held, DROPS
    )
    places, draws = (slope, row_at, cols_at), (marks, col_numbers, bar, inverse)
    keys = k, k_strides, v, v_strides, mask, mask_b, mask_m, batch, key_head, d, d_v
    dq_sum = tl.zeros([ROWS, D], tl.float32)
    for t in range(first_tile, last_tile):
        tile = tile_at(tiles, t)
        r0, r1, c0, c1, left, right, _no_step, step = tile
        # rows of another tile have p = 0 by their lse, so they never need masking
        lse_rows = lse_of_rows(lse_at, lse_n, row, r0, r1)[:, None]
        queries = q_block, do_block, lse_rows, delta_rows, row
        a, z = tl.maximum(start, r0), tl.minimum(tl.minimum(start + TOKENS, n), r1)
        first, early, masked, full, full_end = span(
            a, z, 1, r0, c0, c1, left, right, COLS, 1, 1, step, STEPPED
        )
        for j in range(full, full_end, COLS):
            dq_sum = _queries_step(
                dq_sum, j, m, tile, queries, keys, places, draws, inner, factor,
                COLS, D, D_V, False, False,
                EVEN, EVEN_V, MASK, CLAMP, PRECISION, TMA, WIDE, ALIBI, DROPS,
            )  # fmt: skip
        for i in range(masked):
            j = masked_block(i, first, early, full, full_end, COLS)
            dq_sum = _queries_step(
                dq_sum, j, c1, tile, queries, keys, places, draws, inner, factor,
                COLS, D, D_V, True, STEPPED,
                EVEN, EVEN_V, MASK, CLAMP, PRECISION, TMA, WIDE, ALIBI, DROPS,
            )  # fmt: skip
    dq_sum = dq_sum * scale
    add_rows(before, dq, dq_strides, batch, head, start, n, d, dq_sum, ROWS, D, WIDE, FRESH, PACK)
    end_after_the_last(EARLY)
