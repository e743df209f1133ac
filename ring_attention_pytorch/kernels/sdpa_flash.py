"""Flash attention 2 as PyTorch ships it for CUDA: nothing to install, windows included."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ring_attention_pytorch.geometry.tiles import Tile
from ring_attention_pytorch.kernels._flash import aligned, lane, part, windows, with_lse_gradient
from ring_attention_pytorch.runtime.accumulate import OutputAccumulator
from ring_attention_pytorch.runtime.interfaces import (
    FEATURES,
    Capabilities,
    Grads,
    KVBlock,
    Residuals,
    ScoreMods,
)

CAN = Capabilities(
    devices=("cuda",),
    dtypes=(torch.bfloat16, torch.float16),
    min_capability=(8, 0),
    max_head_dim=256,
    head_dim_multiple=8,
    one_head_dim=True,
    features=FEATURES - {"key_mask", "softclamp", "unusual_scale", "alibi", "mask_mod", "dropout"},
)


def forward(
    q: Tensor, keys: KVBlock, tiles: Sequence[Tile], terms: ScoreMods, result: OutputAccumulator
) -> None:
    for tile, left, right in windows(tiles) if q.numel() else ():
        with lane(tiles, keys):
            q_, k, v = aligned(part(q, tile.rows), part(keys.k, tile.cols), part(keys.v, tile.cols))
            out, lse, *_ = torch.ops.aten._flash_attention_forward(
                q_, k, v, None, None, q_.shape[1], k.shape[1], 0.0, False, False,
                scale=terms.scale, window_size_left=left, window_size_right=right,
            )  # fmt: skip
        result.add(tile.rows, out, lse)


def backward(
    saved: Residuals, keys: KVBlock, tiles: Sequence[Tile], terms: ScoreMods, grads: Grads
) -> None:
    with_lse_gradient(_backward, saved, keys, tiles, terms, grads)


def _backward(
    saved: Residuals, keys: KVBlock, tiles: Sequence[Tile], terms: ScoreMods, grads: Grads
) -> None:
    for tile, left, right in windows(tiles) if saved.q.numel() else ():
        with lane(tiles, keys):
            q, k, v, out, dout = aligned(
                part(saved.q, tile.rows), part(keys.k, tile.cols), part(keys.v, tile.cols),
                part(saved.out, tile.rows), part(saved.dout, tile.rows),
            )  # fmt: skip
            unused = torch.zeros(2, dtype=torch.uint64, device=q.device)  # dropout's numbers
            dq, dk, dv = torch.ops.aten._flash_attention_backward(
                dout, q, k, v, out, saved.lse[..., tile.rows].contiguous(), None, None,
                q.shape[1], k.shape[1], 0.0, False, unused, unused, scale=terms.scale,
                window_size_left=left, window_size_right=right,
            )  # fmt: skip
        grads.dq.add(tile.rows, dq)
        grads.dk.add(tile.cols, dk)
        grads.dv.add(tile.cols, dv)
