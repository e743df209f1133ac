"""Kernels that wait at a barrier (`_triton_guard`), and then copy or add in one launch.

Each program waits by itself. Its results are NaN if a rank has been out of step since.
"""

import triton
import triton.language as tl

from ring_attention_pytorch.ranks._triton_guard import MET, leave, out_of_step, wait_at_barrier
from ring_attention_pytorch.runtime._triton_early import let_next_begin


@triton.jit(do_not_specialize=["purpose", "rank", "patience", "n", "heads", "lines"])
def write_kernel(
    state, purpose: tl.int32, rank: tl.int32, patience: tl.int64, k, v, k_strides, v_strides, place,
    n: tl.int32, heads: tl.int32, table, lines: tl.int32,
    RANKS: tl.constexpr, LANES: tl.constexpr, WAITS: tl.constexpr, D: tl.constexpr,
    D_V: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write k and v [b, n, h, d] to `place` [b, m, h, d + d_v], which peers read.

    With `WAITS` it waits at the barrier first; if that fails, NaN is written. A line of the table
    is: first row of all heads here, first row there, number of rows.
    """
    number = tl.load(state + MET) + 1
    gone = number < 0  # never
    if WAITS:
        gone = wait_at_barrier(state, number, purpose, rank, patience, RANKS, LANES)
        tl.debug_barrier()
    col = tl.arange(0, WIDTH).to(tl.int64)
    nothing = tl.full((ROWS, WIDTH), float("nan"), tl.float32).to(place.dtype.element_ty)
    for line in range(tl.program_id(0), lines, tl.num_programs(0)):
        here, there = tl.load(table + 3 * line), tl.load(table + 3 * line + 1)
        rows = tl.load(table + 3 * line + 2)
        for first in range(0, rows, ROWS):
            at = first + tl.arange(0, ROWS)
            held, row = (at < rows)[:, None], here + at
            batch, token, head = row // heads // n, row // heads % n, row % heads
            to = place + (there + at)[:, None] * (D + D_V) + col[None, :]
            of_k, of_v = held & (col < D)[None, :], held & (col < D_V)[None, :]
            found = _rows(k, k_strides, batch, token, head, col, of_k)
            other = _rows(v, v_strides, batch, token, head, col, of_v)
            tl.store(to, tl.where(gone, nothing, found), mask=of_k)
            tl.store(to + D, tl.where(gone, nothing, other), mask=of_v)
    if WAITS:
        leave(state, number)


@triton.jit
def _rows(x, strides, batch, token, head, col, within):
    x_b, x_n, x_h, x_d = strides
    row = batch * x_b + token * x_n + head * x_h
    return tl.load(x + row[:, None] + col[None, :] * x_d, mask=within)


@triton.jit(do_not_specialize=["purpose", "rank", "patience", "lines"])
def pull_kernel(
    state, purpose: tl.int32, rank: tl.int32, patience: tl.int64, out, table, lines: tl.int32,
    RANKS: tl.constexpr, LANES: tl.constexpr, WORD: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Wait at the barrier, then copy to `out` by the table.

    A line is: address, offset in `out` and length, these two in words. All are multiples of
    `ALIGNED` bytes.
    """
    STEP: tl.constexpr = ALIGNED * 8 // WORD.primitive_bitwidth
    number = tl.load(state + MET) + 1
    place = out.to(tl.pointer_type(WORD), bitcast=True)
    gone = wait_at_barrier(state, number, purpose, rank, patience, RANKS, LANES)
    tl.debug_barrier()
    if not gone:
        for line in range(tl.program_id(0), lines, tl.num_programs(0)):
            address = tl.load(table + 3 * line).to(tl.pointer_type(WORD))
            source = tl.multiple_of(address, ALIGNED)
            to = place + tl.multiple_of(tl.load(table + 3 * line + 1), STEP)
            words = tl.multiple_of(tl.load(table + 3 * line + 2), STEP)
            for first in range(0, words, BLOCK):
                at = first + tl.arange(0, BLOCK)
                tl.store(to + at, tl.load(source + at, mask=at < words), mask=at < words)
    tl.debug_barrier()
    if out_of_step(state, rank, RANKS, LANES):
        for line in range(tl.program_id(0), lines, tl.num_programs(0)):
            to = place + tl.load(table + 3 * line + 1)
            words = tl.load(table + 3 * line + 2)
            for first in range(0, words, BLOCK):
                at = first + tl.arange(0, BLOCK)
                tl.store(to + at, tl.full((BLOCK,), -1, WORD), mask=at < words)
    leave(state, number)


@triton.jit(do_not_specialize=["purpose", "rank", "patience", "lines"])
def take_kernel(
    state, purpose: tl.int32, rank: tl.int32, patience: tl.int64, outs, table, lines: tl.int32,
    RANKS: tl.constexpr, LANES: tl.constexpr, WORD: tl.constexpr, ALIGNED: tl.constexpr,
    OUTS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Wait at the barrier, then copy to `OUTS` tensors by the table.

    A line is: index of the tensor, address, offset in the tensor, row pitch there and here, width
    of a row, number of rows. Offset, pitches and width are in words, the width at most `WIDTH`.
    They, the address and the tensors' addresses are multiples of `ALIGNED` bytes.
    """
    STEP: tl.constexpr = ALIGNED * 8 // WORD.primitive_bitwidth
    number = tl.load(state + MET) + 1
    gone = wait_at_barrier(state, number, purpose, rank, patience, RANKS, LANES)
    tl.debug_barrier()
    row, col = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    if not gone:
        for line in range(tl.program_id(0), lines, tl.num_programs(0)):
            at = table + 7 * line
            address = tl.load(at + 1).to(tl.pointer_type(WORD))
            source = tl.multiple_of(address, ALIGNED) + col
            place = _place(outs, at, WORD, ALIGNED, OUTS) + col
            there = tl.multiple_of(tl.load(at + 3), STEP)
            here = tl.multiple_of(tl.load(at + 4), STEP)
            width, rows = tl.multiple_of(tl.load(at + 5), STEP), tl.load(at + 6)
            for first in range(0, rows, ROWS):
                within = (first + row < rows) & (col < width)
                found = tl.load(source + (first + row) * there, mask=within)
                tl.store(place + (first + row) * here, found, mask=within)
    tl.debug_barrier()
    if out_of_step(state, rank, RANKS, LANES):
        nothing = tl.full((ROWS, WIDTH), -1, WORD)
        for line in range(tl.program_id(0), lines, tl.num_programs(0)):
            at = table + 7 * line
            place, here = _place(outs, at, WORD, ALIGNED, OUTS) + col, tl.load(at + 4)
            width, rows = tl.load(at + 5), tl.load(at + 6)
            for first in range(0, rows, ROWS):
                within = (first + row < rows) & (col < width)
                tl.store(place + (first + row) * here, nothing, mask=within)
    leave(state, number)


@triton.jit
def _place(outs, line, WORD: tl.constexpr, ALIGNED: tl.constexpr, OUTS: tl.constexpr):
    """Return the target of a line's piece."""
    STEP: tl.constexpr = ALIGNED * 8 // WORD.primitive_bitwidth
    which, start = tl.load(line), outs[0].to(tl.int64)
    for other in tl.static_range(1, OUTS):
        start = tl.where(which == other, outs[other].to(tl.int64), start)
    out = tl.multiple_of(start.to(tl.pointer_type(WORD)), ALIGNED)
    return out + tl.multiple_of(tl.load(line + 2), STEP)


@triton.jit(do_not_specialize=["purpose", "rank", "patience", "lines"])
def sum_kernel(
    state, purpose: tl.int32, rank: tl.int32, patience: tl.int64, dk, dv, table, lines: tl.int32,
    RANKS: tl.constexpr, LANES: tl.constexpr, TYPE: tl.constexpr, WIDE: tl.constexpr,
    ALIGNED: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, MOST: tl.constexpr, FRESH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Wait at the barrier, then add peers' gradients to dk, dv [b, n, h, d]; `FRESH` overwrites.

    A line is: first row, number of rows, number of ranks, and `MOST` addresses. At each address are
    these rows of d + d_v numbers; addresses are multiples of `ALIGNED`. Sums are rounded once. If
    `EARLY`, the next kernel may run at the same time.
    """
    let_next_begin(EARLY)
    number = tl.load(state + MET) + 1
    gone = wait_at_barrier(state, number, purpose, rank, patience, RANKS, LANES)
    tl.debug_barrier()
    if not gone:
        for line in range(tl.program_id(0), lines, tl.num_programs(0)):
            at = table + line * (3 + MOST)
            _sum(dk, at, 0, D, D + D_V, TYPE, WIDE, ALIGNED, WIDTH, ROWS, MOST, FRESH)
            _sum(dv, at, D, D_V, D + D_V, TYPE, WIDE, ALIGNED, WIDTH, ROWS, MOST, FRESH)
    tl.debug_barrier()
    if out_of_step(state, rank, RANKS, LANES):
        for line in range(tl.program_id(0), lines, tl.num_programs(0)):
            at = table + line * (3 + MOST)
            _fill_nan(dk, at, D, WIDE, WIDTH, ROWS)
            _fill_nan(dv, at, D_V, WIDE, WIDTH, ROWS)
    leave(state, number)


@triton.jit
def _sum(
    total, line,
    FIRST: tl.constexpr, D: tl.constexpr, PITCH: tl.constexpr, TYPE: tl.constexpr,
    WIDE: tl.constexpr, ALIGNED: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    MOST: tl.constexpr, FRESH: tl.constexpr,
):  # fmt: skip
    """Sum columns of a line's rows, `D` columns from `FIRST` on, in `total`."""
    to, rows, ranks = total + tl.load(line) * D, tl.load(line + 1), tl.load(line + 2)
    col = tl.arange(0, WIDTH)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)
        within = (row < rows)[:, None] & (col < D)[None, :]
        place = to + row[:, None] * D + col[None, :]
        if FRESH:
            found = tl.zeros((ROWS, WIDTH), WIDE)
        else:
            found = tl.load(place, mask=within, other=0.0).to(WIDE)
        for number in tl.static_range(MOST):  # all loads are in flight at once
            address = tl.load(line + 3 + number).to(tl.pointer_type(TYPE))
            source = tl.multiple_of(address, ALIGNED) + FIRST
            there = within & (number < ranks)
            part = tl.load(source + row[:, None] * PITCH + col[None, :], mask=there, other=0.0)
            found += part.to(WIDE)
        tl.store(place, found.to(total.dtype.element_ty), mask=within)


@triton.jit
def _fill_nan(
    total, line, D: tl.constexpr, WIDE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr
):
    to, rows = total + tl.load(line) * D, tl.load(line + 1)
    col = tl.arange(0, WIDTH)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)
        within = (row < rows)[:, None] & (col < D)[None, :]
        nothing = tl.full((ROWS, WIDTH), float("nan"), WIDE).to(total.dtype.element_ty)
        tl.store(to + row[:, None] * D + col[None, :], nothing, mask=within)
