"""PyTorch's FlexAttention (Dong et al. 2024): fused kernels for any predicate of pairs.

Tiles become intervals: a row sees the columns between its start and its stop. One mask has one
interval for every row, so a block takes one call in most layouts, and two or three if documents or
a window cut it; hidden cells of the mask cost nothing. Compiled kernels depend on shapes, so tokens
are padded to few lengths and head sizes to powers of two. Predicates are compiled, too: they can
only compare, compute and look up in tensors.

Only public functions are called, whose backward can't take the lse of all keys. Backward therefore
recomputes a part and differentiates it. Its weight in the result is `w = exp(lse of part - lse)`:
its out has the gradient `w * dout`, and its lse `w * (dout . out of part - delta)`.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange, reduce
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from ring_attention_pytorch.geometry.tiles import Tile
from ring_attention_pytorch.runtime.accumulate import OutputAccumulator
from ring_attention_pytorch.runtime.interfaces import (
    FEATURES,
    Capabilities,
    Dependency,
    Grads,
    KVBlock,
    MaskMod,
    Residuals,
    ScoreMods,
    Tiles,
)
from ring_attention_pytorch.runtime.rowwise import sum_of_products

CAN = Capabilities(
    devices=("cuda",),
    dtypes=(torch.bfloat16, torch.float16, torch.float32),
    min_capability=(8, 0),
    max_head_dim=256,
    features=FEATURES - {"unusual_scale", "deterministic", "dropout"},
    package=Dependency("triton", "triton", "3.4"),
)
_CELL = 128  # rows and columns of a mask that are skipped, or shown, together
_NARROWEST = 16  # narrowest head size that a matrix product can take
_VARIANTS = 256  # most compiled variants, of shapes and predicates; PyTorch's bound is 8
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
Block = tuple[list[BlockMask], ScoreMod | None]


def forward(
    q: Tensor, keys: KVBlock, tiles: Tiles, terms: ScoreMods, result: OutputAccumulator
) -> None:
    for mask, score_mod in _calls(q, keys, tiles, terms):
        # detached: otherwise tensors with and without a gradient would be compiled separately
        part, lse = _attention(
            q.detach(), keys.k.detach(), keys.v.detach(), mask, score_mod, terms.scale
        )
        result.add(slice(0, q.shape[1]), part, lse)


def backward(saved: Residuals, keys: KVBlock, tiles: Tiles, terms: ScoreMods, grads: Grads) -> None:
    for mask, score_mod in _calls(saved.q, keys, tiles, terms):
        q, k, v = leaves = [t.detach().requires_grad_() for t in (saved.q, keys.k, keys.v)]
        with torch.enable_grad():
            part, lse = _attention(q, k, v, mask, score_mod, terms.scale)
        weight = (lse.detach() - saved.lse).exp().masked_fill(lse == -torch.inf, 0.0)
        dout = (saved.dout * rearrange(weight, "b h n -> b n h 1")).to(part.dtype)
        dlse = sum_of_products(dout, part.detach()) - weight * saved.delta
        parts = torch.autograd.grad((part, lse), leaves, (dout, dlse.to(lse.dtype)))
        for total, own in zip(grads, parts):
            total.add(slice(0, own.shape[1]), own)


def _calls(
    q: Tensor, keys: KVBlock, tiles: Tiles, terms: ScoreMods
) -> Iterator[tuple[BlockMask, ScoreMod | None]]:
    if not tiles or not q.numel():
        return
    if isinstance(tiles, Tiles):
        block = tiles.once("flex", lambda: _block(q, keys, tiles, terms), of_mask=True)
    else:
        block = _block(q, keys, tiles, terms)
    masks, score_mod = block
    for mask in masks:
        yield mask, score_mod


def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, score_mod: ScoreMod | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute out [b, n, h, d_v] and lse [b, h, n] under one mask."""
    n, d_v = q.shape[1], v.shape[-1]
    q, k, v = _heads_first(q), _heads_first(k), _heads_first(v)
    out, lse = _run(_attend, q, k, v, mask, score_mod, scale)
    out = rearrange(out[:, :, :n, :d_v], "b h n d -> b n h d")
    return out, lse[..., :n]


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Any, score_mod: Any, scale: float) -> Any:
    out, more = flex_attention(
        q, k, v, score_mod, mask, scale, enable_gqa=True, return_aux=AuxRequest(lse=True)
    )
    return out, more.lse


def _block(q: Tensor, keys: KVBlock, tiles: Tiles, terms: ScoreMods) -> Block:
    """Return the masks of a block, one for each interval of rows, and its score modification."""
    (b, n, h, _), m = q.shape, keys.k.shape[1]
    sizes = b, h, _padded(n), _padded(m)
    visible = keys.key_mask
    mask_mod = terms.mask_mod
    rows_at = cols_at = None
    if visible is not None:
        visible = _filled(visible, sizes[3])
    if mask_mod is not None or terms.alibi is not None:
        rows_at = _filled(tiles.rows_at.long(), sizes[2])
        cols_at = _filled(tiles.cols_at.long(), sizes[3])
    if mask_mod is not None:
        samples = tiles.first + torch.arange(b, device=q.device)
        mask_mod = _of_positions(mask_mod, samples, rows_at, cols_at)
    masks = []
    for stretch in _stretches(tiles, n):
        starts, stops = _filled(stretch, sizes[2]).to(q.device)
        shown = _shown(starts, stops, visible, mask_mod)
        masks.append(_mask(shown, sizes, q.device))
    return masks, _score_mod(terms.softclamp, terms.alibi, rows_at, cols_at)


def _stretches(tiles: Sequence[Tile], n: int) -> list[Tensor]:
    """List tiles as intervals, int32 `[2, n]`: start and stop of the columns that each row sees.

    >>> rows = slice(0, 2)
    >>> beside = [Tile(rows, slice(0, 3), None, None), Tile(rows, slice(3, 5), None, 0)]
    >>> [t.tolist() for t in _stretches(beside, 3)]
    [[[0, 0, 0], [4, 5, 0]]]
    """
    found: list[Tensor] = []
    for rows, cols, left, right in tiles:
        end = cols.start + rows.stop - rows.start
        row = torch.arange(cols.start, end, dtype=torch.int32)
        start = torch.full_like(row, cols.start) if left is None else row - left
        stop = torch.full_like(row, cols.stop) if right is None else row + right + 1
        start = start.clamp(min=cols.start)
        stop = stop.clamp(max=cols.stop)
        for starts, stops in (t[:, rows] for t in found):
            free = stops == 0
            if (free | (stops == start)).all():
                starts.copy_(torch.where(free, start, starts))
                stops.copy_(stop)
                break
        else:
            stretch = torch.zeros((2, n), dtype=torch.int32)
            stretch[:, rows] = torch.stack((start, stop))
            found.append(stretch)
    return found


def _shown(starts: Tensor, stops: Tensor, mask: Tensor | None, mask_mod: MaskMod | None) -> MaskMod:
    def shown(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = (starts[i] <= j) & (j < stops[i])
        if mask is not None:
            seen = seen & mask[b, j]
        if mask_mod is not None:
            seen = seen & mask_mod(b, h, i, j)
        return seen

    return shown


def _of_positions(mask_mod: MaskMod, samples: Tensor, rows_at: Any, cols_at: Any) -> MaskMod:
    """Convert a predicate of positions to one of local indices.

    Kernels have 32-bit indices, but squares of positions need more.
    """

    def local(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return mask_mod(samples[b], h.long(), rows_at[i], cols_at[j])

    return local


def _score_mod(
    softclamp: float | None, alibi: Tensor | None, rows_at: Tensor | Any, cols_at: Tensor | Any
) -> ScoreMod | None:
    def changed(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if softclamp is not None:
            score = softclamp * torch.tanh(score / softclamp)
        return score if alibi is None else score - alibi[h] * (rows_at[i] - cols_at[j]).abs()

    return None if softclamp is None and alibi is None else changed


def _mask(shown: MaskMod, sizes: tuple[int, ...], device: torch.device) -> BlockMask:
    count = _run(_count, shown, sizes, device)
    full = _CELL * _CELL
    return BlockMask.from_kv_blocks(
        *_in_order((count > 0) & (count < full)),
        *_in_order(count == full),
        BLOCK_SIZE=_CELL,
        mask_mod=shown,
        seq_lengths=(sizes[2], sizes[3]),
    )


def _count(shown: MaskMod, sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Count the visible pairs of each cell, [b, h, cells, cells]; b or h is 1 if irrelevant.

    Compiled, it never materializes the pairs.
    """
    b, h, i, j = (torch.arange(size, device=device) for size in sizes)
    seen = shown(b.view(-1, 1, 1, 1), h.view(-1, 1, 1), i.unsqueeze(1), j)
    seen = seen[(None,) * (4 - seen.ndim)]
    return reduce(seen, "b h (n r) (m c) -> b h n m", "sum", r=_CELL, c=_CELL)


def _in_order(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many cells of each row of cells are chosen, and their columns.

    The columns of cells not chosen follow.
    """
    which = chosen.byte().argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), which.int()


def _heads_first(t: Tensor) -> Tensor:
    """Return a contiguous [b, h, tokens, head size], padded with zeros, so variants are few."""
    n, d = t.shape[1], t.shape[3]
    width = max(_NARROWEST, 1 << (d - 1).bit_length())
    more = 0, width - d, 0, 0, 0, _padded(n) - n
    if any(more):
        t = F.pad(t, more)
    return rearrange(t.contiguous(), "b n h d -> b h n d")


def _padded(length: int) -> int:
    """Round up a number of tokens, to eight steps between two powers of two.

    >>> [_padded(length) for length in (1, 129, 5000, 8192)]
    [128, 256, 5120, 8192]
    """
    step = max(_CELL, 1 << max(0, (length - 1).bit_length() - 4))
    return -(-length // step) * step


def _filled(t: Tensor, size: int) -> Tensor:
    """Return a copy of t, its last dimension padded with zeros to `size`."""
    *others, length = t.shape
    return torch.cat((t, t.new_zeros((*others, size - length))), -1)


def _run(function: Callable[..., Any], *given: Any) -> Any:
    """Run a function under torch.compile: a variant for each shape, option and predicate."""
    with torch._dynamo.config.patch(recompile_limit=_VARIANTS):
        return _compiled(function)(*given)


@lru_cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, dynamic=False)
