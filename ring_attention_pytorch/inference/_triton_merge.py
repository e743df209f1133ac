# ruff: noqa: C901, PLR0913, PLR0915 - a kernel takes every size by itself, forks early
"""Merge partial results: of splits, and of ranks that share memory, in one kernel.

The formula is that of `rowwise.merge`. It is written again here because the kernel also exchanges
rows, counts tokens and checks who has come: one launch.

Each rank pushes its rows to all ranks and waits for theirs. A word of 64 bits is a number under the
number of the call, so whoever sees that this call has come has the number, too, and nobody need
signal:

    | 63 .. 32: the call | 31 .. 0: a number in float32 |

A program has some columns of a row, a unit: their words lie together, with one more for lse. It is
one warp, whose threads see memory that changes alike; several could disagree, and wait for ever.

A rank's memory is for all calls of a group, in words:

    | units of rank 0, 1, ... | those of the next call | what each came for, twice | who failed |

Calls write the two halves of the memory in turn. A rank that writes a half again has had all rows
of the call between from everyone. So all have read what was there before.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer

from ring_attention_pytorch.ranks._triton_guard import BOARDS, FAILED, MET, WRONG, report_first

# a state, in words, is that of a guard: but for the number of the call, and the addresses of all
# ranks' memory
CALL, MEMORY = MET, BOARDS


@triton.jit
def _merged(acc_of, lse_of, row, col, held, strides, parts, PARTS: tl.constexpr):
    """Merge columns of a row of so many parts; return them and the row's lse `[1]`."""
    acc_split, acc_row, lse_split, lse_row = strides
    acc = tl.zeros([col.shape[0]], tl.float32)
    top = tl.full([1], -float("inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    for first in range(0, parts, PARTS):
        part = (first + tl.arange(0, PARTS)).to(tl.int64)
        there = part < parts
        lse = tl.load(lse_of + part * lse_split + row * lse_row, mask=there, other=-float("inf"))
        at = acc_of + (part * acc_split)[:, None] + (row * acc_row + col)[None, :]
        x = tl.load(at, mask=there[:, None] & held[None, :], other=0.0)
        new_top = tl.maximum(top, tl.max(lse, 0))
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        weight = tl.exp(lse - base)
        fade = tl.exp(top - base)
        acc = acc * fade + tl.sum(x * weight[:, None], 0)
        total = total * fade + tl.sum(weight, 0)
        top = new_top
    return _normalised(acc, top, total)


@triton.jit
def _normalised(acc, top, total):
    """Return out and lse of a sum of exponentials; 0 and -inf of none."""
    some = tl.where(total == 0.0, 1.0, total)
    return acc / some, tl.where(total == 0.0, -float("inf"), top + tl.log(some))


@triton.jit
def _finish(out, out_lse, sinks, acc, lse, row, col, held, bad, HEADS, D, SINKS: tl.constexpr):
    """Write columns of a row, with its head's sink; NaN if it is `bad`."""
    if SINKS:
        sink = tl.load(sinks + row % HEADS).to(tl.float32)
        top = tl.maximum(lse, sink)
        with_sink = top + tl.log(tl.exp(lse - top) + tl.exp(sink - top))
        acc = acc * tl.exp(lse - with_sink)
        lse = with_sink
    nan = float("nan")
    tl.store(out + row * D + col, tl.where(bad, nan, acc), mask=held)
    tl.store(out_lse + row + tl.arange(0, 1), tl.where(bad, nan, lse))


@triton.jit
def _memory(state, rank):
    return tl.load(state + MEMORY + rank).to(tl.pointer_type(tl.int64))


@triton.jit
def _of_cache(purpose, lineage, lengths, sequences, SEQUENCES: tl.constexpr):
    """Return a purpose that is also of a cache's lengths, order and padding: `Lineage.mark`."""
    which = tl.arange(0, SEQUENCES)
    weights = tl.load(lineage + 1 + which, mask=which < sequences, other=0).to(tl.int64)
    counts = tl.load(lengths + which, mask=which < sequences, other=0) * weights
    return (purpose + tl.load(lineage) + tl.sum(counts)) & 0x7FFFFFFF


@triton.jit
def _word(x, mark):
    """Return float32 numbers under a mark."""
    return (mark << 32) | (x.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def _number(word):
    return word.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit(
    do_not_specialize=[
        "parts",
        "rows",
        "sequences",
        "patience",
        "purpose",
        "slot",
        "acc_split",
        "acc_row",
        "lse_split",
        "lse_row",
    ]
)
def merge_kernel(
    out,
    out_lse,
    sinks,
    lengths,
    acc_of,
    lse_of,
    purpose: tl.int64,
    # the same in all calls of a plan
    next_lengths,
    overflown,
    lineage,
    state,
    acc_split: tl.int64,
    acc_row: tl.int64,
    lse_split: tl.int64,
    lse_row: tl.int64,
    parts: tl.int32,
    rows: tl.int32,
    sequences: tl.int32,
    patience: tl.int64,
    slot: tl.int64,
    ROWS_EACH: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    COLS: tl.constexpr,
    PARTS: tl.constexpr,
    SEQUENCES: tl.constexpr,
    RANKS: tl.constexpr,
    RANK: tl.constexpr,
    ADVANCE: tl.constexpr,
    SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge all rows `[parts, rows, D]` to out `[rows, D]`; with other ranks' if RANKS are several.

    A row's sequence is the one of ROWS_EACH rows. Where that has overflown, the row is NaN.
    """
    if PDL:  # launched early; what comes next is not, before all multiprocessors are free for it
        gdc_wait()
        gdc_launch_dependents()
    program = tl.program_id(0)
    if ADVANCE and program == 0:
        for i in range(sequences):
            new = tl.load(next_lengths + i)
            if new >= 0:
                tl.store(lengths + i, new)
            else:
                tl.store(overflown + i, 1)
    blocks = (D + COLS - 1) // COLS
    units = rows * blocks
    one = tl.arange(0, 1)
    zero = tl.full((), 0, tl.int64)
    strides = acc_split, acc_row, lse_split, lse_row
    if RANKS == 1:
        for unit in range(program, units, tl.num_programs(0)):
            row = zero + unit // blocks
            col = unit % blocks * COLS + tl.arange(0, COLS)
            held = col < D
            acc, lse = _merged(acc_of, lse_of, row, col, held, strides, parts, PARTS)
            bad = tl.load(next_lengths + row // ROWS_EACH) < 0
            _finish(out, out_lse, sinks, acc, lse, row, col, held, bad, HEADS, D, SINKS)
    else:
        call = tl.load(state + CALL)
        mark = call << 32 >> 32  # as words are compared, with its sign
        half = call % 2 * (RANKS * slot)
        own = _memory(state, RANK)
        failed = own + RANKS * (2 * slot + 2)
        purposes = RANKS * (2 * slot + call % 2)
        purpose = _of_cache(purpose, lineage, next_lengths, sequences, SEQUENCES)
        wrong = tl.load(state + WRONG) != 0
        lane = tl.arange(0, COLS)
        for unit in range(program, units, tl.num_programs(0)):
            row = zero + unit // blocks
            col = unit % blocks * COLS + lane
            acc, lse = _merged(acc_of, lse_of, row, col, col < D, strides, parts, PARTS)
            place = half + RANK * slot + unit * (COLS + 1)
            for peer in tl.static_range(RANKS):
                there = _memory(state, peer) + place
                tl.store(there + lane, _word(acc, mark))
                tl.store(there + COLS + one, _word(lse, mark))
        if program == 0:
            for peer in tl.static_range(RANKS):
                tl.store(_memory(state, peer) + purposes + RANK, (mark << 32) | purpose)
        begin = globaltimer()
        for unit in range(program, units, tl.num_programs(0)):
            acc = tl.zeros([COLS], tl.float32)
            top = tl.full([1], -float("inf"), tl.float32)
            total = tl.zeros([1], tl.float32)
            for peer in tl.static_range(RANKS):
                here = own + half + peer * slot + unit * (COLS + 1)
                x = tl.zeros([COLS], tl.int64)
                y = tl.zeros([1], tl.int64)
                waiting = wrong == 0
                while waiting:
                    x = tl.load(here + lane, volatile=True)
                    y = tl.load(here + COLS + one, volatile=True)
                    absent = tl.sum((x >> 32 != mark).to(tl.int32))
                    absent += tl.sum((y >> 32 != mark).to(tl.int32))
                    came_for = tl.load(own + purposes + peer, volatile=True)
                    absent += (came_for >> 32 != mark).to(tl.int32)
                    gone = tl.load(failed + peer, volatile=True) == FAILED
                    late = globaltimer() - begin > patience
                    other = (came_for >> 32 == mark) & (came_for != ((mark << 32) | purpose))
                    waiting = (absent > 0) & (gone == 0) & (late == 0) & (other == 0)
                    if other | (gone | late) & (absent > 0):
                        seen = tl.where(gone, FAILED, came_for)
                        report_first(state, peer, (mark << 32) | purpose, seen)
                        wrong = wrong | (absent >= 0)
                lse = _number(y)
                new_top = tl.maximum(top, lse)
                base = tl.where(new_top == -float("inf"), 0.0, new_top)
                weight, fade = tl.exp(lse - base), tl.exp(top - base)
                acc = acc * fade + _number(x) * weight
                total = total * fade + weight
                top = new_top
            row = zero + unit // blocks
            col = unit % blocks * COLS + lane
            bad = wrong | (tl.load(next_lengths + row // ROWS_EACH) < 0)
            acc, lse = _normalised(acc, top, total)
            _finish(out, out_lse, sinks, acc, lse, row, col, col < D, bad, HEADS, D, SINKS)
