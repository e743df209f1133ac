"""Flash attention forward over all tiles of a block, merging into the running out and lse.

The algorithm is Dao et al.'s of 2022; the online softmax starts from the rows' running out and lse.
"""

import triton
import triton.language as tl

from ring_attention_pytorch.kernels._triton_parts import (
    VARYING,
    alibi_of,
    block_of,
    draws_of_rows,
    kept_of,
    masked_block,
    matrix,
    numbers_of,
    packed,
    place,
    places_of_rows,
    rows_of,
    seen,
    span,
    tanh,
    tile_at,
)


@triton.jit
def _so_far(
    before, strides, lse_at, batch, head, start, held, within, inverse,
    ROWS: tl.constexpr, D_V: tl.constexpr, WIDE: tl.constexpr, FRESH: tl.constexpr,
    DROPS: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    """Load the running out and lse of these rows as (acc, top, total), as in `_attend`."""
    lse = tl.full([ROWS], -float("inf"), tl.float32)
    acc = tl.zeros([ROWS, D_V], tl.float32)
    if not FRESH:
        lse = tl.load(lse_at, mask=held, other=-float("inf"))
        if tl.max(lse, 0) > -float("inf"):
            at = matrix(before, strides, batch, head, start, ROWS, D_V, WIDE, PACK)
            acc = tl.load(at, mask=within, other=0.0)
            if DROPS:  # all of acc is multiplied at the end
                acc = acc / inverse
    return acc, lse * 1.4426950408889634, tl.where(lse == -float("inf"), 0.0, 1.0)


@triton.jit
def _attend(
    running, q, k, v, shown, bias, kept, inner, factor,
    MASKED: tl.constexpr, CLAMP: tl.constexpr, BIASED: tl.constexpr, DROPS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend to one more block of keys.

    `running` is (acc, top, total): top is in base 2, total the sum of 2 ** (score - top).
    """
    acc, top, total = running
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if CLAMP:
        scores, _ = tanh(scores * inner)
    if BIASED:
        scores = scores * factor + bias
    if MASKED:
        scores = tl.where(shown, scores, -float("inf"))
    highest = tl.max(scores, 1) if BIASED else tl.max(scores, 1) * factor
    new_top = tl.maximum(top, highest)
    base = new_top
    if MASKED:
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
    p = tl.exp2(scores - base[:, None]) if BIASED else tl.exp2(scores * factor - base[:, None])
    fade = tl.exp2(top - base)
    total = total * fade + tl.sum(p, 1)
    if DROPS:
        p = tl.where(kept, p, 0.0)
    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
    return acc, new_top, total


@triton.jit
def _step(
    running, j, stop, tile, q_block, row, keys, places, draws, inner, factor,
    COLS: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr,  # sizes
    # forks
    EDGE: tl.constexpr, STEPPED: tl.constexpr, EVEN: tl.constexpr, EVEN_V: tl.constexpr,
    MASK: tl.constexpr, CLAMP: tl.constexpr, ALIBI: tl.constexpr, DROPS: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Attend to a block of keys from j on, before `stop`. EDGE: the tile may hide some scores."""
    k, k_strides, v, v_strides, mask, mask_b, mask_m, batch, head, d, d_v = keys
    k_block = rows_of(k, k_strides, batch, head, j, stop, d, COLS, D, EDGE, EVEN, TMA, WIDE)
    v_block = rows_of(v, v_strides, batch, head, j, stop, d_v, COLS, D_V, EDGE, EVEN_V, TMA, WIDE)
    col = j + tl.arange(0, COLS)
    shown = None
    if EDGE:
        shown = seen(row[:, None], col[None, :], tile, STEPPED)
    if MASK:
        at = place(mask, batch, head, mask_b, 0) + col.to(tl.int64) * mask_m
        unmasked = (numbers_of(at, col < stop, EDGE) != 0)[None, :]
        shown = shown & unmasked if EDGE else unmasked
    bias = None
    if ALIBI:
        slope, row_at, cols_at = places
        col_at = numbers_of(cols_at + col, col < stop, EDGE)
        bias = alibi_of(slope[:, None], row_at[:, None], col_at[None, :])
    kept = None
    if DROPS:
        marks, col_numbers, bar = draws
        col_number = numbers_of(col_numbers + col, col < stop, EDGE)
        kept = kept_of(marks[0][:, None], marks[1][:, None], col_number[None, :], bar)
    return _attend(
        running, q_block, k_block, v_block, shown, bias, kept, inner, factor,
        EDGE or MASK, CLAMP, ALIBI, DROPS, PRECISION,
    )  # fmt: skip


@triton.jit(do_not_specialize=VARYING)
def forward_kernel(
    q, k, v, mask,
    alibi, rows_at, cols_at,  # ALiBi
    row_numbers, col_numbers, word, other_word, bar, inverse, sample, first_head,  # dropout
    before, out, lse,  # results
    tiles, blocks, count, at_once,  # the table of tiles
    n, m, heads, group, d, d_v, inner, factor,  # sizes and factors
    q_strides, k_strides, v_strides, mask_b, mask_m, out_strides, lse_b, lse_h, lse_n,  # strides
    # sizes of blocks
    ROWS: tl.constexpr, COLS: tl.constexpr, PACK: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr,
    # forks
    STEPPED: tl.constexpr, EVEN: tl.constexpr, EVEN_V: tl.constexpr, MASK: tl.constexpr,
    CLAMP: tl.constexpr, NEGATE: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
    WIDE: tl.constexpr, FRESH: tl.constexpr, MOVES: tl.constexpr, ALIBI: tl.constexpr,
    DROPS: tl.constexpr,
):  # fmt: skip
    """Compute out and lse of a block of queries.

    MOVES: out is other memory than `before`; lse is updated in place.
    """
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
    slope, row_at = places_of_rows(alibi, rows_at, head_of_row, row, held, ALIBI)
    marks = draws_of_rows(
        word, other_word, sample + batch, first_head + head_of_row, row_numbers, row, held, DROPS
    )
    places, draws = (slope, row_at, cols_at), (marks, col_numbers, bar)
    lse_at = place(lse, batch, head_of_row, lse_b, lse_h) + row.to(tl.int64) * lse_n
    within = held[:, None] & (tl.arange(0, D_V) < d_v)[None, :]
    running = _so_far(
        before, out_strides, lse_at, batch, head, start, held, within, inverse,
        ROWS, D_V, WIDE, FRESH, DROPS, PACK,
    )  # fmt: skip
    _, before_top, before_total = running
    keys = k, k_strides, v, v_strides, mask, mask_b, mask_m, batch, key_head, d, d_v

    for t in range(first_tile, last_tile):
        tile = tile_at(tiles, t)
        r0, r1, c0, c1, left, right, _no_step, step = tile
        stop = tl.minimum(start + TOKENS, n)
        a, z = tl.maximum(start, r0), tl.minimum(stop, r1)
        whole = (start >= r0) & (stop <= r1)
        first, early, masked, full, full_end = span(
            a, z, whole, r0, c0, c1, left, right, COLS, 1, 1, step, STEPPED
        )
        for j in range(full, full_end, COLS):
            running = _step(
                running, j, m, tile, q_block, row, keys, places, draws, inner, factor,
                COLS, D, D_V, False, False,
                EVEN, EVEN_V, MASK, CLAMP, ALIBI, DROPS, PRECISION, TMA, WIDE,
            )  # fmt: skip
        for i in range(masked):
            j = masked_block(i, first, early, full, full_end, COLS)
            running = _step(
                running, j, c1, tile, q_block, row, keys, places, draws, inner, factor,
                COLS, D, D_V, True, STEPPED,
                EVEN, EVEN_V, MASK, CLAMP, ALIBI, DROPS, PRECISION, TMA, WIDE,
            )  # fmt: skip

    acc, top, total = running
    if DROPS:
        acc = acc * inverse
    if not FRESH:  # a row that has seen no key keeps its out and lse
        held = held & ((top != before_top) | (total != before_total))
        if not MOVES:
            within = within & held[:, None]
    tl.store(lse_at, (top + tl.log2(total)) * 0.6931471805599453, mask=held)
    out_at = matrix(out, out_strides, batch, head, start, ROWS, D_V, WIDE, PACK)
    tl.store(out_at, acc / tl.where(total != 0.0, total, 1.0)[:, None], mask=within)
