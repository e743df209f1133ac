"""Functions that the forward and backward Triton kernels share."""

import triton
import triton.language as tl

# arguments whose values don't specialize a kernel
VARYING = [
    "count", "at_once", "n", "m", "lse_b", "lse_h", "delta_b", "delta_h", "mask_b", "word",
    "other_word", "bar", "sample", "first_head",
]  # fmt: skip


@triton.jit
def block_of(blocks, count, at_once):
    """Return this program's block and pack, and the address of its tiles' first number and end.

    A pack is a key head, or query heads of one key head that share a block: each has `count`
    blocks. `at_once` packs take turns: their programs for the same block are adjacent, so that
    programs that run at once read the same keys from the cache.
    """
    turn, place = tl.program_id(0) // (at_once * count), tl.program_id(0) % (at_once * count)
    pack = turn * at_once
    at_once = tl.minimum(tl.num_programs(0) // count - pack, at_once)
    at = blocks + 3 * (place // at_once)
    return tl.load(at), pack + place % at_once, at + 1


@triton.jit
def packed(start, head, ROWS: tl.constexpr, PACK: tl.constexpr):
    """Return the token and the head of each row of a block: `PACK` heads, one after another.

    Query heads that read the same keys share a block, as in flash-attn's `pack_gqa`. It has as many
    rows as tensor cores need, but few tokens, which wastes less at the borders of tiles.
    """
    i = tl.arange(0, ROWS)
    return start + i % (ROWS // PACK), head + i // (ROWS // PACK)


@triton.jit
def tile_at(tiles, t):
    """Load tile t of the table: first row, end of rows, first column, end, left, right, steps.

    Steps come from `right`, and from `left`, which has none.
    """
    at = tiles + 7 * t
    r0, r1 = tl.load(at), tl.load(at + 1)
    c0, c1 = tl.load(at + 2), tl.load(at + 3)
    left, right = tl.load(at + 4), tl.load(at + 5)
    return r0, r1, c0, c1, left, right, 1, tl.load(at + 6)


@triton.jit
def _up(x, step):
    """Round x, at least 0, up to a multiple of step."""
    return (x + step - 1) // step * step


@triton.jit
def alibi_of(slope, a, b):
    """Return the ALiBi bias of scores in base 2, from positions a and b."""
    return -1.4426950408889634 * slope * tl.abs(a - b).to(tl.float32)


@triton.jit
def places_of_rows(alibi, rows_at, head, row, held, ALIBI: tl.constexpr):
    """Load each row's ALiBi slope, by its head, and its position; placeholders without ALIBI."""
    slope, row_at = row, row
    if ALIBI:
        slope = tl.load(alibi + head)
        row_at = tl.load(rows_at + row, mask=held, other=0)
    return slope, row_at


@triton.jit
def mixed(x):
    """Mix 32 bits: each result bit depends on all of x. `dropout.py` has the formulas from here."""
    x ^= x >> 17
    x *= 0xED5AD4BB
    x ^= x >> 11
    x *= 0xAC4C1B51
    x ^= x >> 15
    x *= 0x31848BAB
    return x ^ (x >> 14)


@triton.jit
def marks_of_head(word, other_word, sample, head):
    """Mix both words of the seed with the numbers of sample and head."""
    sample, head = sample.to(tl.uint32, bitcast=True), head.to(tl.uint32, bitcast=True)
    first = mixed(mixed(word.to(tl.uint32, bitcast=True) ^ sample) ^ head)
    return first, mixed(mixed(other_word.to(tl.uint32, bitcast=True) ^ sample) ^ head)


@triton.jit
def marks_of_rows(marks, number):
    """Mix both marks of a head with the number of a row."""
    number = number.to(tl.uint32, bitcast=True)
    return mixed(marks[0] ^ number), mixed(marks[1] ^ number)


@triton.jit
def draws_of_rows(
    word, other_word, sample, head, row_numbers, row, held,
    DROPS: tl.constexpr,
):  # fmt: skip
    """Return both marks of each row, by its head; placeholders without DROPS."""
    marks = row, row
    if DROPS:
        number = tl.load(row_numbers + row, mask=held, other=0)
        marks = marks_of_rows(marks_of_head(word, other_word, sample, head), number)
    return marks


@triton.jit
def kept_of(first, second, number, bar):
    """Return the mask of kept probabilities, from rows' marks and columns' numbers."""
    x = (first ^ number.to(tl.uint32, bitcast=True)) * 0xED5AD4BB
    x = (x ^ (x >> 16) ^ second) * 0xAC4C1B51
    x = (x ^ (x >> 15)) * 0x31848BAB
    return x >= bar.to(tl.uint32, bitcast=True)


@triton.jit
def span(
    start, stop, whole, a0, b0, b1, back, ahead,
    BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
    back_step, ahead_step,
    STEPPED: tl.constexpr,
):  # fmt: skip
    """Find the blocks of the other side, within b0 to b1, that start to stop of this side sees.

    Returns the start of the first block, the number of blocks before the full ones, the number of
    all blocks that need masking, and start and end of the full ones. Blocks start at multiples of
    `ALIGNED`.
    """
    low, high = start - a0, stop - 1 - a0
    least, most = tl.maximum(low - back, 0), tl.maximum(high - back, 0)
    if STEPPED:
        least, most = _up(least, back_step), _up(most, back_step)
        low, high = low // ahead_step * ahead_step, high // ahead_step * ahead_step
    origin = b0 // ALIGNED * ALIGNED
    first = origin + ((b0 - origin + least) // BLOCK) * BLOCK
    end = tl.minimum(b1, high + b0 + ahead + 1)
    full = origin + tl.cdiv(b0 - origin + most, BLOCK) * BLOCK
    full_end = tl.minimum(b1, low + b0 + ahead + 1)
    full_end = origin + (tl.maximum(full_end - origin, 0) // BLOCK) * BLOCK
    none = (full_end <= full) | (whole == 0)
    full, full_end = tl.where(none, first, full), tl.where(none, first, full_end)
    end = tl.where(start < stop, end, first)
    full_end = tl.where(start < stop, full_end, full)
    before = tl.where(start < stop, (full - first) // BLOCK, 0)
    return first, before, before + tl.cdiv(tl.maximum(end - full_end, 0), BLOCK), full, full_end


@triton.jit
def masked_block(i, first, before, full, full_end, BLOCK: tl.constexpr):
    """Return the start of the i-th block that needs masking, before or behind the full ones."""
    start = first + i * BLOCK
    return tl.where(i < before, start, start + (full_end - full))


@triton.jit
def seen(a, b, tile, STEPPED: tl.constexpr):
    """Return the mask of pairs that the tile shows, from indices a and b, one of them a column.

    The bounds of each a are computed first, so that a pair costs only two comparisons.
    """
    a0, a1, b0, b1, back, ahead, back_step, ahead_step = tile
    diagonal = a - a0 + b0
    start = tl.maximum(diagonal - back, b0)
    if STEPPED:
        start = b0 + _up(tl.maximum(a - a0 - back, 0), back_step)
        diagonal = b0 + (a - a0) // ahead_step * ahead_step
    stop = tl.where((a >= a0) & (a < a1), tl.minimum(diagonal + ahead + 1, b1), b0)
    return (b >= start) & (b < stop)


@triton.jit
def place(base, batch, head, batch_stride, head_stride):
    """Return the address of one head: offsets of batches and heads can exceed 32 bits."""
    return base + batch.to(tl.int64) * batch_stride + head.to(tl.int64) * head_stride


@triton.jit
def matrix(
    base, strides, batch, head, start,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, PACK: tl.constexpr = 1,
):  # fmt: skip
    """Return the addresses of rows of [batch, row, head, width]: from `start` on, of `PACK` heads.

    WIDE: offsets within a block exceed 32 bits, too.
    """
    batch_stride, row_stride, head_stride, stride = strides
    row, head_of_row = packed(0, 0, ROWS, PACK)
    col = tl.arange(0, WIDTH)
    if WIDE:
        row, head_of_row, col = row.to(tl.int64), head_of_row.to(tl.int64), col.to(tl.int64)
    at = place(base, batch, head, batch_stride, head_stride)
    at += tl.cast(start, tl.int64) * row_stride
    offset = row * row_stride
    if PACK > 1:
        offset += head_of_row * head_stride
    return at + (offset[:, None] + col[None, :] * stride)


@triton.jit
def rows_of(
    x, strides, batch, head, start, stop, width,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, CHECK: tl.constexpr, EVEN: tl.constexpr,
    TMA: tl.constexpr, WIDE: tl.constexpr, PACK: tl.constexpr = 1,
):  # fmt: skip
    """Load rows of x [batch, row, head, width], addressed as in `matrix`; zeros beyond its bounds.

    x is a tensor, or its descriptor with heads before rows if TMA. Rows are compared to `stop` only
    if CHECK.
    """
    if TMA:
        block = tl.reshape(x.load([batch, head, start, 0]), [ROWS, WIDTH])
    else:
        at = matrix(x, strides, batch, head, start, ROWS, WIDTH, WIDE, PACK)
        row, _ = packed(start, head, ROWS, PACK)
        inside = (row < stop)[:, None]
        within = (tl.arange(0, WIDTH) < width)[None, :]
        if CHECK and EVEN:
            block = tl.load(at, mask=inside, other=0.0)
        elif CHECK:
            block = tl.load(at, mask=inside & within, other=0.0)
        elif EVEN:
            block = tl.load(at)
        else:
            block = tl.load(at, mask=within, other=0.0)
    return block


@triton.jit
def numbers_of(at, inside, CHECK: tl.constexpr):
    """Load a number for each row or column; with CHECK, 0 where it is not inside."""
    return tl.load(at, mask=inside, other=0) if CHECK else tl.load(at)


@triton.jit
def lse_of_rows(at, stride, row, r0, r1):
    """Load lse in base 2; inf, so that p = 0, for rows that see no key or are not the tile's."""
    lse = tl.load(
        at + row.to(tl.int64) * stride, mask=(row >= r0) & (row < r1), other=-float("inf")
    )
    return tl.where(lse == -float("inf"), float("inf"), lse * 1.4426950408889634)


@triton.jit
def tanh(x):
    """Return tanh and its derivative, without overflow, precise near 0 and where it saturates."""
    square = x * x
    near = x * (1 + square * (-1 / 3 + square * (2 / 15 - square * (17 / 315))))
    e = tl.exp2(tl.abs(x) * -2.8853900817779268)
    far = tl.where(x < 0, e - 1, 1 - e) / (1 + e)
    return tl.where(square < 0.0625, near, far), 4 * e / ((1 + e) * (1 + e))


@triton.jit
def probabilities(
    scores, lse, shown, bias, inner, factor,
    MASKED: tl.constexpr, CLAMP: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """Return p and the derivative of the softclamp. lse is in base 2."""
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
def add_rows(
    before, total, strides, batch, head, start, length, width, value,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, FRESH: tl.constexpr,
    PACK: tl.constexpr = 1,
):  # fmt: skip
    """Store rows in total, addressed as in `matrix`, added to `before` unless FRESH."""
    at = matrix(0, strides, batch, head, start, ROWS, WIDTH, WIDE, PACK)
    row, _ = packed(start, head, ROWS, PACK)
    inside = (row < length)[:, None]
    inside = inside & (tl.arange(0, WIDTH) < width)[None, :]
    if not FRESH:
        value += tl.load(before + at, mask=inside)
    tl.store(total + at, value, mask=inside)
