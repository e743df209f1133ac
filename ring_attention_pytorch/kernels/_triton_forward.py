# ruff: noqa: C901, PLR0913, PLR0915 - a kernel takes every stride and forks when compiled
"""Flash attention forward over all tiles of a block, merging into the running out and lse.

The algorithm is that of Dao et al. 2022; the online softmax goes on from what the rows have seen
before.
"""

import triton
import triton.language as tl

from ring_attention_pytorch.kernels._triton_parts import (
    VARYING,
    alibi_of,
    block_of,
    kept_of,
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
def _attend(
    acc, top, total, q, k, v, shown, bias, kept, inner, factor,
    MASKED: tl.constexpr, CLAMP: tl.constexpr, BIASED: tl.constexpr, DROPS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend to one more block of keys. top is in base 2, total the sum of 2 ** (score - top)."""
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


@triton.jit(do_not_specialize=VARYING)
def forward_kernel(
    q, k, v, mask, alibi, rows_at, cols_at,
    row_numbers, col_numbers, word, other_word, bar, inverse, sample, first_head,
    before, out, lse, tiles, blocks, count, beside, n, m, heads, group, d, d_v, inner, factor,
    q_b, q_n, q_h, q_d, k_b, k_m, k_h, k_d, v_b, v_m, v_h, v_d, mask_b, mask_m,
    out_b, out_n, out_h, out_d, lse_b, lse_h, lse_n,
    ROWS: tl.constexpr, COLS: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr,
    EVEN: tl.constexpr, EVEN_V: tl.constexpr, MASK: tl.constexpr, CLAMP: tl.constexpr,
    NEGATE: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, WIDE: tl.constexpr,
    FRESH: tl.constexpr, MOVES: tl.constexpr, ALIBI: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    """Compute out and lse of a block of queries of one head.

    MOVES: out is other memory than what was before; lse is in place.
    """
    block, of, first_tile, last_tile = block_of(blocks, count, beside)
    start = block * ROWS
    batch, head = of // heads, of % heads
    key_head = head // group
    row, col = start + tl.arange(0, ROWS), tl.arange(0, COLS)
    q_block = rows_of(
        q, batch, head, start, n, d, q_b, q_n, q_h, q_d, ROWS, D, True, EVEN, TMA, WIDE
    )
    if NEGATE:
        q_block = -q_block
    mask_at = mask
    if MASK:
        mask_at = place(mask, batch, key_head, mask_b, 0)
    lse_at = place(lse, batch, head, lse_b, lse_h) + row.to(tl.int64) * lse_n
    held = row < n
    slope, row_at = 0.0, row
    if ALIBI:
        slope, row_at = tl.load(alibi + head), tl.load(rows_at + row, mask=held, other=0)
    first_mark, second_mark = row, row
    if DROPS:
        row_number = tl.load(row_numbers + row, mask=held, other=0)
        marks = marks_of_head(word, other_word, sample + batch, first_head + head)
        first_mark, second_mark = marks_of_rows(marks[0], marks[1], row_number)
    within = held[:, None] & (tl.arange(0, D_V) < d_v)[None, :]
    before_lse = tl.full([ROWS], -float("inf"), tl.float32)
    if not FRESH:
        before_lse = tl.load(lse_at, mask=held, other=-float("inf"))
    before_top = before_lse * 1.4426950408889634
    before_total = tl.where(before_lse == -float("inf"), 0.0, 1.0)
    top, total, acc = before_top, before_total, tl.zeros([ROWS, D_V], tl.float32)
    if not FRESH:  # noqa: SIM102 - decided when compiled
        if tl.max(before_lse, 0) > -float("inf"):
            at = place(before, batch, head, out_b, out_h)
            at += matrix(start, out_n, out_d, ROWS, D_V, WIDE)
            acc = tl.load(at, mask=within, other=0.0)
            if DROPS:  # all of acc is multiplied at the end
                acc = acc / inverse

    for t in range(first_tile, last_tile):
        r0, r1, c0, c1, left, right = tile_at(tiles, t)
        a, z = tl.maximum(start, r0), tl.minimum(tl.minimum(start + ROWS, n), r1)
        whole = (start >= r0) & (tl.minimum(start + ROWS, n) <= r1)
        first, early, masked, full, full_end = span(a, z, whole, r0, c0, c1, left, right, COLS)
        for j in range(full, full_end, COLS):
            k_block = rows_of(
                k, batch, key_head, j, m, d, k_b, k_m, k_h, k_d, COLS, D, False, EVEN, TMA, WIDE
            )
            v_block = rows_of(
                v, batch, key_head, j, m, d_v, v_b, v_m, v_h, v_d, COLS, D_V, False, EVEN_V, TMA,
                WIDE,
            )  # fmt: skip
            shown = None
            if MASK:
                shown = (tl.load(mask_at + (j + col).to(tl.int64) * mask_m) != 0)[None, :]
            bias = None
            if ALIBI:
                bias = alibi_of(slope, row_at[:, None], tl.load(cols_at + j + col)[None, :])
            kept = None
            if DROPS:
                number = tl.load(col_numbers + j + col)[None, :]
                kept = kept_of(first_mark[:, None], second_mark[:, None], number, bar)
            acc, top, total = _attend(
                acc, top, total, q_block, k_block, v_block, shown, bias, kept, inner, factor,
                MASK, CLAMP, ALIBI, DROPS, PRECISION,
            )  # fmt: skip
        for i in range(masked):
            j = masked_block(i, first, early, full, full_end, COLS)
            k_block = rows_of(
                k, batch, key_head, j, c1, d, k_b, k_m, k_h, k_d, COLS, D, True, EVEN, TMA, WIDE
            )
            v_block = rows_of(
                v, batch, key_head, j, c1, d_v, v_b, v_m, v_h, v_d, COLS, D_V, True, EVEN_V, TMA,
                WIDE,
            )  # fmt: skip
            shown = seen(row[:, None], (j + col)[None, :], r0, r1, c0, c1, left, right)
            if MASK:
                at = mask_at + (j + col).to(tl.int64) * mask_m
                shown = shown & (tl.load(at, mask=j + col < c1, other=0) != 0)[None, :]
            bias = None
            if ALIBI:
                col_at = tl.load(cols_at + j + col, mask=j + col < c1, other=0)
                bias = alibi_of(slope, row_at[:, None], col_at[None, :])
            kept = None
            if DROPS:
                number = tl.load(col_numbers + j + col, mask=j + col < c1, other=0)[None, :]
                kept = kept_of(first_mark[:, None], second_mark[:, None], number, bar)
            acc, top, total = _attend(
                acc, top, total, q_block, k_block, v_block, shown, bias, kept, inner, factor,
                True, CLAMP, ALIBI, DROPS, PRECISION,
            )  # fmt: skip

    if DROPS:
        acc = acc * inverse
    some = total != 0.0
    if not FRESH:  # a row that has seen no key stays as it was
        held = held & ((top != before_top) | (total != before_total))
        if not MOVES:
            within = within & held[:, None]
    tl.store(lse_at, (top + tl.log2(total)) * 0.6931471805599453, mask=held)
    out_at = place(out, batch, head, out_b, out_h) + matrix(start, out_n, out_d, ROWS, D_V, WIDE)
    tl.store(out_at, acc / tl.where(some, total, 1.0)[:, None], mask=within)
