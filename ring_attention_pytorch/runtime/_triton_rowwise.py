"""Triton kernels over the rows of results `[b, n, h, d]`, each a single pass over memory."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_attention_pytorch.runtime.launches import KernelCall, PreparedLaunch
from ring_attention_pytorch.runtime.tape import opaque, prepared

_ELEMENTS = 4096  # elements in one program's block
_AT_ONCE = 8  # parts that one launch adds


@triton.jit
def _block(n, heads, ROWS: tl.constexpr, D: tl.constexpr):
    """Return this program's batch and head, and its rows and columns, all in 64 bits.

    Products with strides can exceed 32 bits. The grid has one dimension, because the other two are
    limited to 65535.
    """
    blocks = tl.cdiv(n, ROWS)
    of, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    row = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, D).to(tl.int64)
    return (of // heads).to(tl.int64), (of % heads).to(tl.int64), row, col


@triton.jit
def _at(x, strides, batch, head, row, col):
    """Return the addresses of these rows and columns of one head of x [b, n, h, d]."""
    x_b, x_n, x_h, x_d = strides
    return x + batch * x_b + head * x_h + row[:, None] * x_n + col[None, :] * x_d


@triton.jit
def _lse_at(lse, strides, batch, head, row):
    """Return the addresses of these rows of one head of lse [b, h, n]."""
    lse_b, lse_h, lse_n = strides
    return lse + batch * lse_b + head * lse_h + row * lse_n


@triton.jit
def _lse(lse, strides, batch, head, row, held):
    return tl.load(_lse_at(lse, strides, batch, head, row), mask=held, other=0.0)


@triton.jit
def _weighted(at, within, weight):
    """Load rows of out, times the weight of each row."""
    return tl.load(at, mask=within, other=0.0).to(tl.float32) * weight[:, None]


@triton.jit
def _read(within, lse):
    """Return which elements of a part are read: not the rows that saw no key."""
    return within & (lse != -float("inf"))[:, None]


@triton.jit
def _weight(lse, top):
    return tl.where(lse == -float("inf"), 0.0, tl.exp(lse - top))


@triton.jit
def _merge_kernel(
    out, lse, x, x_lse, y, y_lse, z, z_lse,
    n, heads, d,  # sizes
    # strides
    out_strides, lse_strides, x_strides, x_lse_strides, y_strides, y_lse_strides, z_strides,
    z_lse_strides,
    PARTS: tl.constexpr, FRESH: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Merge x into out and lse, and y and z too if there are more PARTS.

    If FRESH, out and lse are not read. Rows of a part whose lse is -inf never are.
    """
    batch, head, row, col = _block(n, heads, ROWS, D)
    held = row < n
    if FRESH:
        here = tl.full([ROWS], -float("inf"), tl.float32)
    else:
        here = _lse(lse, lse_strides, batch, head, row, held)
    lse_x = _lse(x_lse, x_lse_strides, batch, head, row, held)
    top = tl.where(here > lse_x, here, lse_x)  # a NaN passes on to the result
    if PARTS > 1:
        lse_y = _lse(y_lse, y_lse_strides, batch, head, row, held)
        top = tl.where(top > lse_y, top, lse_y)
    if PARTS > 2:
        lse_z = _lse(z_lse, z_lse_strides, batch, head, row, held)
        top = tl.where(top > lse_z, top, lse_z)
    within = held[:, None] & (col < d)[None, :]
    total = _weight(here, top)
    out_at = _at(out, out_strides, batch, head, row, col)
    merged = tl.zeros([ROWS, D], tl.float32)
    if not FRESH:
        merged = _weighted(out_at, within, total)
    weight = _weight(lse_x, top)
    at = _at(x, x_strides, batch, head, row, col)
    merged += _weighted(at, _read(within, lse_x), weight)
    total += weight
    if PARTS > 1:
        weight = _weight(lse_y, top)
        at = _at(y, y_strides, batch, head, row, col)
        merged += _weighted(at, _read(within, lse_y), weight)
        total += weight
    if PARTS > 2:
        weight = _weight(lse_z, top)
        at = _at(z, z_strides, batch, head, row, col)
        merged += _weighted(at, _read(within, lse_z), weight)
        total += weight
    merged = merged / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.debug_barrier()  # other warps may have these rows too: all must read before any writes
    lse_at = _lse_at(lse, lse_strides, batch, head, row)
    tl.store(lse_at, tl.where(total == 0.0, -float("inf"), top + tl.log(total)), mask=held)
    tl.store(out_at, merged, mask=within)


@opaque
def fused_merge_(out: Tensor, lse: Tensor, *parts: Tensor, fresh: bool = False) -> None:
    """Compute `rowwise.merge_` on a GPU, three parts at a time: each is read once."""
    if out.numel() == 0:
        return
    if len(parts) > 6 and fresh:
        fused_merge_(out, lse, *parts[:6], fresh=True)
        parts, fresh = parts[6:], False
    if len(parts) > 6:
        fused_merge_(out, lse, *parts[6:])
        parts = parts[:6]
    with torch.cuda.device_of(out):
        _merge_call(out, lse, *parts, fresh=fresh).launch()


@prepared(fused_merge_)
def _(out: Tensor, lse: Tensor, *parts: Tensor, fresh: bool = False) -> Any:
    if out.numel() == 0:
        return None
    if len(parts) > 6:
        return fused_merge_
    return PreparedLaunch(_merge_call(out, lse, *parts, fresh=fresh), (out, lse, *parts))


def _merge_call(out: Tensor, lse: Tensor, *parts: Tensor, fresh: bool) -> KernelCall:
    b, n, h, d = out.shape
    slots = out, lse, *[*parts, *parts[:2], *parts[:2]][:6]  # copies beyond `parts` are not read
    rows, width = _block_of(d)
    return KernelCall(
        _merge_kernel,
        triton.cdiv(n, rows) * b * h,
        (*slots, n, h, d, *[t.stride() for t in slots]),
        dict(PARTS=len(parts) // 2, FRESH=fresh, ROWS=rows, D=width),
    )


@triton.jit
def _merge_back_kernel(
    lse, dout, dlse, delta, outs, lses, douts, dlses,
    n, heads, d,  # sizes
    # strides; lse, delta and dlses are contiguous
    dout_strides, dlse_strides, out_strides, lse_strides, douts_strides,
    ROWS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Write the gradients of merged parts, and delta, each row's product of dout and out."""
    batch, head, row, col = _block(n, heads, ROWS, D)
    held = row < n
    within = held[:, None] & (col < d)[None, :]
    at_row = (batch * heads + head) * n + row
    top = tl.load(lse + at_row, mask=held, other=0.0)
    of_out = tl.load(_at(dout, dout_strides, batch, head, row, col), mask=within, other=0.0)
    of_out = of_out.to(tl.float32)
    of_lse = _lse(dlse, dlse_strides, batch, head, row, held)
    total = tl.zeros([ROWS], tl.float32)
    for i in tl.static_range(len(outs)):
        part_lse = _lse(lses[i], lse_strides[i], batch, head, row, held)
        weight = _weight(part_lse, top)
        at = _at(outs[i], out_strides[i], batch, head, row, col)
        x = tl.load(at, mask=_read(within, part_lse), other=0.0).to(tl.float32)
        product = tl.sum(x * of_out, 1)
        total += weight * product
        at = _at(douts[i], douts_strides[i], batch, head, row, col)
        tl.store(at, weight[:, None] * of_out, mask=within)
        tl.store(dlses[i] + at_row, product, mask=held)
    tl.store(delta + at_row, total, mask=held)
    tl.debug_barrier()  # products are read by other threads than those that wrote them
    for i in tl.static_range(len(outs)):
        part_lse = _lse(lses[i], lse_strides[i], batch, head, row, held)
        product = tl.load(dlses[i] + at_row, mask=held, other=0.0)
        found = _weight(part_lse, top) * (product - total + of_lse)
        tl.store(dlses[i] + at_row, tl.where(part_lse == -float("inf"), 0.0, found), mask=held)


def fused_merge_back(
    lse: Tensor, dout: Tensor, dlse: Tensor, outs: Sequence[Tensor], lses: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Compute gradients of parts that were merged: douts, dlses, and delta `[b, h, n]`.

    `lse` is the contiguous result. Each part is read once, and dout once.
    """
    b, n, h, d = dout.shape
    douts = [torch.empty_like(out) for out in outs]
    dlses = [torch.empty_like(lse) for _ in lses]
    delta = torch.empty_like(lse)
    rows, width = _block_of(d)
    with torch.cuda.device_of(dout):
        KernelCall(
            _merge_back_kernel,
            triton.cdiv(n, rows) * b * h,
            (
                lse, dout, dlse, delta, tuple(outs), tuple(lses), tuple(douts), tuple(dlses),
                n, h, d, dout.stride(), dlse.stride(),
                *[tuple([t.stride() for t in several]) for several in (outs, lses, douts)],
            ),
            dict(ROWS=rows, D=width),
        ).launch()  # fmt: skip
    return douts, dlses, delta


def _block_of(d: int) -> tuple[int, int]:
    """Return the rows and columns of one program's block."""
    width = triton.next_power_of_2(d)
    return max(1, _ELEMENTS // width), width


@triton.jit
def _add_kernel(
    total, parts,
    n, heads, d,  # sizes
    total_strides, strides,  # strides
    FRESH: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Add the parts to total, or write their sum to it if FRESH."""
    batch, head, row, col = _block(n, heads, ROWS, D)
    within = (row < n)[:, None] & (col < d)[None, :]
    total_at = _at(total, total_strides, batch, head, row, col)
    if FRESH:
        sums = tl.zeros((ROWS, D), tl.float32)
    else:
        sums = tl.load(total_at, mask=within, other=0.0).to(tl.float32)
    for i in tl.static_range(len(parts)):
        at = _at(parts[i], strides[i], batch, head, row, col)
        sums += tl.load(at, mask=within, other=0.0).to(tl.float32)
    tl.store(total_at, sums, mask=within)


@opaque
def fused_add_(total: Tensor, *parts: Tensor, fresh: bool) -> None:
    """Compute `rowwise.add_` on a GPU, eight parts at a time."""
    if total.numel() == 0:
        return
    if len(parts) > _AT_ONCE:
        fused_add_(total, *parts[:_AT_ONCE], fresh=fresh)
        fused_add_(total, *parts[_AT_ONCE:], fresh=False)
        return
    with torch.cuda.device_of(total):
        _add_call(total, *parts, fresh=fresh).launch()


@prepared(fused_add_)
def _(total: Tensor, *parts: Tensor, fresh: bool) -> Any:
    if total.numel() == 0:
        return None
    if len(parts) > _AT_ONCE:
        return fused_add_
    return PreparedLaunch(_add_call(total, *parts, fresh=fresh), (total, *parts))


def _add_call(total: Tensor, *parts: Tensor, fresh: bool) -> KernelCall:
    each = [total, *parts]
    in_rows = all(t.stride(2) == t.shape[3] * t.stride(3) for t in each)
    if in_rows and total[0, 0].numel() <= _ELEMENTS:
        each = [t.flatten(2).unsqueeze(2) for t in each]  # a token's heads are one row
    b, n, h, d = each[0].shape
    rows, width = _block_of(d)
    strides = [t.stride() for t in each]
    return KernelCall(
        _add_kernel,
        triton.cdiv(n, rows) * b * h,
        (total, parts, n, h, d, strides[0], tuple(strides[1:])),
        dict(FRESH=fresh, ROWS=rows, D=width),
    )


@triton.jit
def _product_kernel(
    a, b, total, n, heads, d, a_strides, b_strides,
    ROWS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    batch, head, row, col = _block(n, heads, ROWS, D)
    held = row < n
    within = held[:, None] & (col < d)[None, :]
    a_at = _at(a, a_strides, batch, head, row, col)
    b_at = _at(b, b_strides, batch, head, row, col)
    x = tl.load(a_at, mask=within, other=0.0).to(tl.float32)
    y = tl.load(b_at, mask=within, other=0.0).to(tl.float32)
    at = total + (batch * heads + head) * n + row
    tl.store(at, tl.sum(x * y, 1), mask=held)


def fused_sum_of_products(a: Tensor, b: Tensor) -> Tensor:
    """Compute `rowwise.sum_of_products` on a GPU."""
    batch, n, h, _ = a.shape
    total = a.new_empty((batch, h, n), dtype=torch.float32)
    _write_products(total, a, b)
    return total


@opaque
def _write_products(total: Tensor, a: Tensor, b: Tensor) -> None:
    if a.numel() == 0:
        total.zero_()
        return
    with torch.cuda.device_of(a):
        _product_call(total, a, b).launch()


@prepared(_write_products)
def _(total: Tensor, a: Tensor, b: Tensor) -> Any:
    given = total, a, b
    return PreparedLaunch(_product_call(*given), given) if a.numel() else _write_products


def _product_call(total: Tensor, a: Tensor, b: Tensor) -> KernelCall:
    batch, n, h, d = a.shape
    rows, width = _block_of(d)
    return KernelCall(
        _product_kernel,
        triton.cdiv(n, rows) * batch * h,
        (a, b, total, n, h, d, a.stride(), b.stride()),
        dict(ROWS=rows, D=width),
    )
