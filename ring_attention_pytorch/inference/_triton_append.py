# ruff: noqa: RET505 - a kernel forks early
"""Append tokens to a cache at lengths read on the device, as CUDA graphs need."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_attention_pytorch.inference.pools import Pools

_ROWS = 16  # tokens of one program
_LANES = 128  # sequences of one program


@triton.jit
def power_of_two(power):
    """Return 2 ** power, exactly."""
    return ((power + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def exponent(x):
    """Return the exponent of a float32 number; 128 if it is not finite."""
    return ((x.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127


@triton.jit
def power_of_rows(rows):
    """Return the exponent of each row's scale: the row divided by it fits into 8 bits."""
    bits = rows.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    top = tl.max(bits, 1)  # NaN are the largest
    return (top >> 23) - 127 - 8 + ((top & 0x7FFFFF) > 0x600000).to(tl.int32)


@triton.jit
def in_8_bits(rows):
    """Return rows `[tokens, d]` in float8_e4m3fn and their scales, as `scaled.stored` does."""
    power = power_of_rows(rows)
    within = tl.minimum(tl.maximum(power, -63), 63)
    x = rows.to(tl.float32) * power_of_two(-within)[:, None]
    # rounded before the cast, which Triton's interpreter does wrong next to a power of two
    coarse = 1.5 * power_of_two(tl.maximum(exponent(x), -6) + 20)
    x = tl.where((power > 63)[:, None], float("nan"), (x + coarse) - coarse)
    return x.to(tl.float8e4nv), power_of_two(within)


@triton.jit
def kept(rows, SCALED: tl.constexpr):
    """Return rows `[tokens, d]` in the form of the cache, and their scales."""
    if SCALED:
        return in_8_bits(rows)
    else:
        return rows, tl.full([rows.shape[0]], 1.0, tl.float32)


@triton.jit
def store_rows(
    pool, scales, table, rows, scale, token, held, kv, PAGE, RANKS, KV, D, ROW, WIDTH: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """Write rows `[tokens, WIDTH]` of one key head, and their scales, to the tokens' pages.

    ROW numbers are between rows, of which D are written.
    """
    turn, slot = token // (PAGE * RANKS), token % PAGE
    page = tl.load(table + turn, mask=held, other=0).to(tl.int64)
    col = tl.arange(0, WIDTH)
    at = (page * KV + kv) * PAGE + slot
    if SCALED:
        tl.store(scales + at, scale, mask=held)
    within = held[:, None] & (col < D)[None, :]
    tl.store(pool + (at * ROW)[:, None] + col[None, :], rows, mask=within)


@triton.jit(do_not_specialize=["n", "width"])
def append_kernel(
    k, v, keys, values, key_scales, value_scales, tables, lengths, capacities, n: tl.int32,
    width: tl.int32,
    PAGE: tl.constexpr, RANKS: tl.constexpr, RANK: tl.constexpr, KV: tl.constexpr, D: tl.constexpr,
    D_V: tl.constexpr, ROW_V: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    WIDTH_V: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Write this rank's share of k `[b, n, KV, D]` and v after the last tokens.

    ROW_V numbers are between values: D if they are the first D_V numbers of keys.
    """
    blocks = tl.cdiv(n, ROWS)
    block, kv = tl.program_id(0) % blocks, tl.program_id(0) // blocks % KV
    sample = (tl.program_id(0) // (blocks * KV)).to(tl.int64)
    length = tl.load(lengths + sample)
    new = block * ROWS + tl.arange(0, ROWS)
    token = length + new
    held = (
        (new < n) & (token // PAGE % RANKS == RANK) & (length + n <= tl.load(capacities + sample))
    )
    row = (sample * n + new) * KV + kv
    table = tables + sample * width
    col, col_v = tl.arange(0, WIDTH), tl.arange(0, WIDTH_V)
    k_rows = tl.load(
        k + row[:, None] * D + col[None, :], mask=held[:, None] & (col < D)[None, :], other=0.0
    )
    k_rows, k_scale = kept(k_rows, SCALED)
    store_rows(
        keys, key_scales, table, k_rows, k_scale, token, held, kv, PAGE, RANKS, KV, D, D, WIDTH,
        SCALED,
    )  # fmt: skip
    v_rows = tl.load(
        v + row[:, None] * ROW_V + col_v[None, :],
        mask=held[:, None] & (col_v < D_V)[None, :],
        other=0.0,
    )
    v_rows, v_scale = kept(v_rows, SCALED)
    store_rows(
        values, value_scales, table, v_rows, v_scale, token, held, kv, PAGE, RANKS, KV, D_V,
        ROW_V, WIDTH_V, SCALED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n", "count"])
def advance_kernel(
    lengths, capacities, overflown, n: tl.int32, count: tl.int32, LANES: tl.constexpr
):
    """Add n to the lengths of sequences with enough pages; flag the others as overflown."""
    at = tl.program_id(0) * LANES + tl.arange(0, LANES)
    held = at < count
    length = tl.load(lengths + at, mask=held, other=0) + n
    fits = length <= tl.load(capacities + at, mask=held, other=0)
    tl.store(lengths + at, length, mask=held & fits)
    tl.store(overflown + at, 1, mask=held & (fits == 0))


def append(new: tuple[Tensor, Tensor], pools: Pools, layer: int) -> None:
    """Write new keys and values of a layer into its pools, and advance its lengths."""
    k, v = new[0].contiguous(), new[1]
    d_v, row_v = v.shape[-1], k.shape[-1] if pools.tied else v.shape[-1]
    v = k if pools.tied else v.contiguous()
    b, n, h_kv, d = k.shape
    lengths = pools.layer_lengths[layer]
    with torch.cuda.device_of(k):
        append_kernel[(triton.cdiv(n, _ROWS) * h_kv * b,)](
            k, v, *pools.of(layer), pools.tables, lengths, pools.capacities, n,
            pools.tables.shape[1], PAGE=pools.pages.page, RANKS=pools.pages.ranks,
            RANK=pools.ring.rank, KV=h_kv, D=d, D_V=d_v, ROW_V=row_v, ROWS=_ROWS,
            WIDTH=triton.next_power_of_2(d), WIDTH_V=triton.next_power_of_2(d_v),
            SCALED=pools.key_scales[layer].numel() > 0,
        )  # fmt: skip
        grid = (triton.cdiv(b, _LANES),)
        advance_kernel[grid](lengths, pools.capacities, pools.overflown, n, b, LANES=_LANES)
