"""cuDNN's flash attention as PyTorch ships it: the fastest on Hopper without further packages.

It computes forward and backward with lse, and supports grouped heads. It supports only full and
causal tiles.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from einops import einsum, rearrange
from torch import Tensor

from ring_attention_pytorch.geometry.tiles import Tile
from ring_attention_pytorch.kernels._flash import aligned, lane, part, with_lse_gradient
from ring_attention_pytorch.runtime.accumulate import OutputAccumulator
from ring_attention_pytorch.runtime.interfaces import (
    Capabilities,
    Grads,
    KVBlock,
    Residuals,
    ScoreMods,
    Traits,
)
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype

CAN = Capabilities(
    devices=("cuda",),
    dtypes=(torch.bfloat16, torch.float16),
    min_capability=(9, 0),
    max_head_dim=256,
    head_dim_multiple=8,
    # right against float64 with torch 2.11 and cuDNN 9.19 on an H200; others were not tried
    unequal_head_dims=(
        (192, 128), (128, 64), (64, 128), (192, 64), (256, 128), (96, 128), (40, 64),
    ),
    traits=Traits(square=True, taped=True),
    features=frozenset(),
)  # fmt: skip


class _Call(NamedTuple):
    rows: slice
    cols: slice
    causal: bool
    by_hand: bool  # a single key, which the op refuses or computes wrong: done in PyTorch


def forward(
    q: Tensor, keys: KVBlock, tiles: Sequence[Tile], terms: ScoreMods, result: OutputAccumulator
) -> None:
    for rows, cols, causal, by_hand in _calls(q, tiles):
        operands = part(q, rows), part(keys.k, cols), part(keys.v, cols)
        with lane(tiles, keys):
            if by_hand:
                found = _one_key(*operands, terms)
            else:
                out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
                    *_heads_first(*operands), None, True, 0.0, causal, False, scale=terms.scale
                )
                found = out.transpose(1, 2), lse.flatten(2)
        result.add(rows, *found)


def backward(
    saved: Residuals, keys: KVBlock, tiles: Sequence[Tile], terms: ScoreMods, grads: Grads
) -> None:
    with_lse_gradient(_backward, saved, keys, tiles, terms, grads)


def _backward(
    saved: Residuals, keys: KVBlock, tiles: Sequence[Tile], terms: ScoreMods, grads: Grads
) -> None:
    for rows, cols, causal, by_hand in _calls(saved.q, tiles):
        operands = (
            part(saved.q, rows),
            part(keys.k, cols),
            part(keys.v, cols),
            part(saved.out, rows),
            part(saved.dout, rows),
        )
        lse = saved.lse[..., rows]
        with lane(tiles, keys):
            if by_hand:
                found = _one_key_backward(*operands, lse, terms)
            else:
                q, k, v, out, dout = _heads_first(*operands)
                out, dout = _with_strides_of(q, out), _with_strides_of(q, dout)
                unused = torch.empty((), dtype=torch.int64, device=q.device)  # dropout's numbers
                found = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
                    dout, q, k, v, out, lse.unsqueeze(-1).contiguous(), unused, unused,
                    None,  # bias
                    None, None, q.shape[2], k.shape[2],
                    0.0,  # dropout
                    causal, scale=terms.scale,
                )  # fmt: skip
                found = [t.transpose(1, 2) for t in found]
        for total, at, t in zip(grads, (rows, cols, cols), found):
            total.add(at, t)


def _calls(q: Tensor, tiles: Sequence[Tile]) -> Iterator[_Call]:
    """Yield all tiles as full rectangles and causal ones, whose diagonal starts at the top left."""
    for rows, cols, left, right in _stairs(tiles) if q.numel() else ():
        assert left is None, "a window, which this kernel says it can't do"
        if right is None:
            yield _call(rows, cols, False)
            continue
        if right > 0:
            yield _call(rows, slice(cols.start, cols.start + right), False)
        yield _call(rows, slice(cols.start + right, cols.stop), True)


def _stairs(tiles: Sequence[Tile]) -> list[Tile]:
    """Join the tile below a causal square to the square: a call costs as much as many rows."""
    found: list[Tile] = []
    for tile in tiles:
        if found and _below_causal_square(tile, found[-1]):
            found[-1] = found[-1]._replace(rows=slice(found[-1].rows.start, tile.rows.stop))
        else:
            found.append(tile)
    return found


def _below_causal_square(tile: Tile, square: Tile) -> bool:
    size = square.cols.stop - square.cols.start
    beneath = tile.cols == square.cols and tile.rows.start == square.rows.start + size
    return beneath and (*square[2:], *tile[2:]) == (None, 0, None, None)


def _call(rows: slice, cols: slice, causal: bool) -> _Call:
    alone = cols.stop - cols.start == 1
    return _Call(rows, cols, causal and not alone, alone)


def _anew(t: Tensor) -> Tensor:
    return t.clone(memory_format=torch.contiguous_format)


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    """Return tensors with heads first, as the op wants them.

    A single row is copied: its row stride is arbitrary, and the op took it for the heads' stride
    and gave wrong gradients.
    """
    laid = [_anew(t) if t.shape[1] == 1 else t for t in tensors]
    return [t.transpose(1, 2) for t in aligned(*laid)]


def _with_strides_of(q: Tensor, t: Tensor) -> Tensor:
    """Return out or dout `[b, h, n, d]` with strides that depend only on q's.

    The op caches compiled kernels by the shapes and strides of q, k and v. It runs them for out and
    dout of any strides: silently, and wrong.
    """
    b, h, n, d = t.shape
    size = n * h * d
    strides: tuple[int, ...] = (size, d, h * d, 1)
    if b > 1 and q.stride()[1:] == strides[1:] and size <= q.stride(0) <= 8 * size:
        strides = q.stride()  # some rows of a longer tensor
    if t.stride() == strides:
        return t
    if b == 1 and t.stride()[1:] == strides[1:]:  # the stride of a single sample is arbitrary
        return t.as_strided(t.shape, strides)
    return t.new_empty_strided(t.shape, strides).copy_(t)


def _one_key(q: Tensor, k: Tensor, v: Tensor, terms: ScoreMods) -> tuple[Tensor, Tensor]:
    q, k, v = _by_key_head(q, k, v)
    lse = terms.scale * einsum(q, k, "b n g r d, b g d -> b g r n")
    out = rearrange(v, "b g d -> b 1 g 1 d").expand(*q.shape[:-1], -1)
    # out needs memory of its own: it will be added to in place
    out = rearrange(out, "b n g r d -> b n (g r) d").contiguous()
    return out, rearrange(lse, "b g r n -> b (g r) n")


def _one_key_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, terms: ScoreMods
) -> list[Tensor]:
    """Compute dq, dk and dv of one key; out and lse are of all keys that the rows see."""
    lse = rearrange(lse, "b (g r) n -> b n g r", g=k.shape[2])
    q, k, v = _by_key_head(q, k, v)
    out, dout = _grouped(out, k.shape[1]), _grouped(dout, k.shape[1])
    p = (terms.scale * einsum(q, k, "b n g r d, b g d -> b n g r") - lse).exp()
    value = rearrange(v, "b g d -> b 1 g 1 d")
    seen = einsum(dout, value - out, "b n g r d, b n g r d -> b n g r")
    ds = terms.scale * p * seen
    dq = einsum(ds, k, "b n g r, b g d -> b n g r d")
    dk = einsum(ds, q, "b n g r, b n g r d -> b g d")
    dv = einsum(p, dout, "b n g r, b n g r d -> b g d")
    return [rearrange(dq, "b n g r d -> b n (g r) d"), dk.unsqueeze(1), dv.unsqueeze(1)]


def _by_key_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    k = k.to(accumulation_dtype(k.dtype))
    v = v.to(accumulation_dtype(v.dtype))
    return _grouped(q, k.shape[2]), k.squeeze(1), v.squeeze(1)


def _grouped(t: Tensor, h_kv: int) -> Tensor:
    """Cast to the accumulator's dtype, and group query heads by key head."""
    return rearrange(t.to(accumulation_dtype(t.dtype)), "b n (g r) d -> b n g r d", g=h_kv)
