# ruff: noqa: C901 - a kernel takes every size by itself, forks early
"""Merge partial results: of splits, and of ranks that share memory, in one kernel.

The formula is `rowwise.merge`, repeated here because the same launch also exchanges rows, counts
tokens and checks which ranks have arrived.

Each rank writes its rows to all ranks' memory and waits for theirs. A word of 64 bits has the
call's number and a value, so that the value needs no separate signal: a reader that sees the call's
number has the value, too.

    | 63 .. 32: the call | 31 .. 0: a number in float32 |

A program merges a unit: some columns of a row, in consecutive words, and one more word for lse. It
is one warp, whose threads all see the same values; several warps could disagree, and wait forever.

A rank's memory serves all calls of a group; in words:

    | units of rank 0, 1, ... | units of the next call | purposes of ranks, twice | failed ranks |

It is a double buffer: calls use its two slots in turn. A rank that writes a slot again has received
all rows of the call in between from all ranks, hence all ranks have read the slot.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer

from ring_attention_pytorch.ranks._triton_guard import BOARDS, FAILED, MET, WRONG, report_first

# the state is a guard's, in words; two fields have another use: the number of the call, and the
# addresses of all ranks' memory
CALL, MEMORY = MET, BOARDS


@triton.jit
def _merged(acc_of, lse_of, row, col, held, strides, parts, PARTS: tl.constexpr):
    """Merge columns of a row over all parts; return them and the row's lse `[1]`."""
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
    """Return out and lse of a sum of exponentials; 0 and -inf if it is empty."""
    some = tl.where(total == 0.0, 1.0, total)
    return acc / some, tl.where(total == 0.0, -float("inf"), top + tl.log(some))


@triton.jit
def _finish(out, out_lse, sinks, acc, lse, row, col, held, bad, HEADS, D, SINKS: tl.constexpr):
    """Add the head's sink to columns of a row and write them; NaN if the row is `bad`."""
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
    """Add a cache's lengths, order and padding to a purpose: `Lineage.mark`."""
    which = tl.arange(0, SEQUENCES)
    weights = tl.load(lineage + 1 + which, mask=which < sequences, other=0).to(tl.int64)
    counts = tl.load(lengths + which, mask=which < sequences, other=0) * weights
    return (purpose + tl.load(lineage) + tl.sum(counts)) & 0x7FFFFFFF


@triton.jit
def _word(x, mark):
    """Pack float32 numbers and a mark into words."""
    return (mark << 32) | (x.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def _number(word):
    return word.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit(
    do_not_specialize=[
        "parts", "rows", "sequences", "patience", "purpose", "slot",
        "acc_split", "acc_row", "lse_split", "lse_row",
    ]
)  # fmt: skip
def merge_kernel(
    out, out_lse, sinks, lengths, acc_of, lse_of, purpose: tl.int64,
    # the same in all calls of a plan
    next_lengths, overflown, lineage, state, acc_split: tl.int64, acc_row: tl.int64,
    lse_split: tl.int64, lse_row: tl.int64, parts: tl.int32, rows: tl.int32, sequences: tl.int32,
    patience: tl.int64, slot: tl.int64,
    ROWS_EACH: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, COLS: tl.constexpr,
    PARTS: tl.constexpr, SEQUENCES: tl.constexpr, RANKS: tl.constexpr, RANK: tl.constexpr,
    ADVANCE: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge rows `[parts, rows, D]` to out `[rows, D]`; with several RANKS also the other ranks'.

    Each sequence has ROWS_EACH consecutive rows. If it has overflown, they become NaN.
    """
    if PDL:  # launched early; the next kernel waits until all of this one's programs run
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
        mark = call << 32 >> 32  # sign-extended, as in the comparison of words
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
