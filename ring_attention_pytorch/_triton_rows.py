# ruff: noqa: PLR0913 - a kernel takes every stride by itself
"""What is done to every row of a result, in one pass over memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_ELEMENTS = 4096  # of one program


@triton.jit
def _merge_kernel(
    out, lse, part, part_lse, n, heads, d,
    out_b, out_n, out_h, out_d, lse_b, lse_h, lse_n,
    part_b, part_n, part_h, part_d, part_lse_b, part_lse_h, part_lse_n,
    ROWS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    batch, head = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    col, held = tl.arange(0, D), row < n
    lse_at = lse + batch * lse_b + head * lse_h + row * lse_n
    here = tl.load(lse_at, mask=held, other=0.0)
    there = tl.load(
        part_lse + batch * part_lse_b + head * part_lse_h + row * part_lse_n, mask=held, other=0.0
    )
    unseen = there == -float("inf")
    weight = tl.where(unseen, 0.0, 1.0 / (1.0 + tl.exp(here - there)))
    top = tl.where(here > there, here, there)
    total = top + tl.log(tl.exp(here - top) + tl.exp(there - top))
    tl.debug_barrier()  # other warps may hold these rows too: all read before any writes
    tl.store(lse_at, tl.where(top == -float("inf"), top, total), mask=held)
    within = held[:, None] & (col < d)[None, :]
    out_at = out + batch * out_b + head * out_h + row[:, None] * out_n + col[None, :] * out_d
    part_at = part + batch * part_b + head * part_h + row[:, None] * part_n + col[None, :] * part_d
    old = tl.load(out_at, mask=within, other=0.0).to(tl.float32)
    new = tl.load(part_at, mask=within, other=0.0).to(tl.float32)
    tl.store(out_at, old + (new - old) * weight[:, None], mask=within)


def fused_merge_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """`running.merge_` on a GPU: reads both, writes one."""
    b, n, h, d = out.shape
    if out.numel() == 0:
        return
    width = triton.next_power_of_2(d)
    rows = max(1, _ELEMENTS // width)
    with torch.cuda.device(out.device):
        _merge_kernel[(triton.cdiv(n, rows), b * h)](
            out, lse, part, part_lse, n, h, d,
            *out.stride(), *lse.stride(), *part.stride(), *part_lse.stride(),
            ROWS=rows, D=width,
        )  # fmt: skip


@triton.jit
def _product_kernel(
    a, b, total, n, heads, d, a_b, a_n, a_h, a_d, b_b, b_n, b_h, b_d,
    ROWS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    batch, head = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    col, held = tl.arange(0, D), row < n
    within = held[:, None] & (col < d)[None, :]
    a_at = a + batch * a_b + head * a_h + row[:, None] * a_n + col[None, :] * a_d
    b_at = b + batch * b_b + head * b_h + row[:, None] * b_n + col[None, :] * b_d
    x = tl.load(a_at, mask=within, other=0.0).to(tl.float32)
    y = tl.load(b_at, mask=within, other=0.0).to(tl.float32)
    at = total + tl.program_id(1).to(tl.int64) * n + row
    tl.store(at, tl.sum(x * y, 1), mask=held)


def fused_sum_of_products(a: Tensor, b: Tensor) -> Tensor:
    """`running.sum_of_products` on a GPU."""
    batch, n, h, d = a.shape
    total = a.new_empty((batch, h, n), dtype=torch.float32)
    if a.numel() == 0:
        return total.zero_()
    width = triton.next_power_of_2(d)
    rows = max(1, _ELEMENTS // width)
    with torch.cuda.device(a.device):
        _product_kernel[(triton.cdiv(n, rows), batch * h)](
            a, b, total, n, h, d, *a.stride(), *b.stride(), ROWS=rows, D=width
        )
    return total
