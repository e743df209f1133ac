# ruff: noqa: PLR0913 - a kernel takes every size by itself
"""Append tokens to a cache, at lengths that only the device knows: for CUDA graphs, too."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_attention_pytorch.inference.pages import Pages

_ROWS = 16  # tokens of one program
_LANES = 128  # sequences of one program


@triton.jit
def store_rows(pool, table, rows, token, held, kv, PAGE, RANKS, KV, D, WIDTH: tl.constexpr):
    """Write rows `[tokens, WIDTH]` of one key head where the cache has these tokens."""
    turn, slot = token // (PAGE * RANKS), token % PAGE
    page = tl.load(table + turn, mask=held, other=0).to(tl.int64)
    col = tl.arange(0, WIDTH)
    at = ((page * KV + kv) * PAGE + slot) * D
    within = held[:, None] & (col < D)[None, :]
    tl.store(pool + at[:, None] + col[None, :], rows, mask=within)


@triton.jit(do_not_specialize=["n", "width"])
def append_kernel(
    k,
    v,
    keys,
    values,
    tables,
    lengths,
    rooms,
    n: tl.int32,
    width: tl.int32,
    PAGE: tl.constexpr,
    RANKS: tl.constexpr,
    RANK: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    D_V: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_V: tl.constexpr,
):
    """Write this rank's share of k `[b, n, KV, D]` and v behind the last tokens."""
    blocks = tl.cdiv(n, ROWS)
    block, kv = tl.program_id(0) % blocks, tl.program_id(0) // blocks % KV
    sample = (tl.program_id(0) // (blocks * KV)).to(tl.int64)
    length = tl.load(lengths + sample)
    new = block * ROWS + tl.arange(0, ROWS)
    token = length + new
    held = (new < n) & (token // PAGE % RANKS == RANK) & (length + n <= tl.load(rooms + sample))
    row = (sample * n + new) * KV + kv
    table = tables + sample * width
    col, col_v = tl.arange(0, WIDTH), tl.arange(0, WIDTH_V)
    k_rows = tl.load(
        k + row[:, None] * D + col[None, :], mask=held[:, None] & (col < D)[None, :], other=0.0
    )
    store_rows(keys, table, k_rows, token, held, kv, PAGE, RANKS, KV, D, WIDTH)
    v_rows = tl.load(
        v + row[:, None] * D_V + col_v[None, :],
        mask=held[:, None] & (col_v < D_V)[None, :],
        other=0.0,
    )
    store_rows(values, table, v_rows, token, held, kv, PAGE, RANKS, KV, D_V, WIDTH_V)


@triton.jit(do_not_specialize=["n", "count"])
def advance_kernel(lengths, rooms, overflown, n: tl.int32, count: tl.int32, LANES: tl.constexpr):
    """Count the tokens of sequences that have room for them; mark those that have not."""
    at = tl.program_id(0) * LANES + tl.arange(0, LANES)
    held = at < count
    length = tl.load(lengths + at, mask=held, other=0) + n
    fits = length <= tl.load(rooms + at, mask=held, other=0)
    tl.store(lengths + at, length, mask=held & fits)
    tl.store(overflown + at, 1, mask=held & (fits == 0))


def append(
    new: tuple[Tensor, Tensor],
    pools: tuple[Tensor, Tensor],
    tables: Tensor,
    lengths: Tensor,
    rooms: Tensor,
    overflown: Tensor,
    pages: Pages,
    rank: int,
) -> None:
    """Write new keys and values of one layer into its pools, and advance its lengths."""
    k, v = (t.contiguous() for t in new)
    b, n, h_kv, d = k.shape
    d_v = v.shape[-1]
    with torch.cuda.device_of(k):
        append_kernel[(triton.cdiv(n, _ROWS) * h_kv * b,)](
            k,
            v,
            *pools,
            tables,
            lengths,
            rooms,
            n,
            tables.shape[1],
            PAGE=pages.page,
            RANKS=pages.ranks,
            RANK=rank,
            KV=h_kv,
            D=d,
            D_V=d_v,
            ROWS=_ROWS,
            WIDTH=triton.next_power_of_2(d),
            WIDTH_V=triton.next_power_of_2(d_v),
        )
        grid = (triton.cdiv(b, _LANES),)
        advance_kernel[grid](lengths, rooms, overflown, n, b, LANES=_LANES)
