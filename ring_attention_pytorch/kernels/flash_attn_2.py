"""flash-attn 2 (Dao 2023, https://arxiv.org/abs/2307.08691), where it is installed.

It has windows, softcap and a deterministic backward of its own. Its diagonals count from the bottom
right, and it makes its own delta from `out`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ring_attention_pytorch.geometry.tiles import Tile
from ring_attention_pytorch.kernels._flash import aligned, lane, part, windows, with_lse_gradient
from ring_attention_pytorch.runtime.accumulate import OutputAccumulator
from ring_attention_pytorch.runtime.interfaces import (
    FEATURES,
    Capabilities,
    Dependency,
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
    features=FEATURES - {"key_mask", "unusual_scale", "alibi", "mask_mod", "dropout"},
    package=Dependency("flash-attn", "flash_attn.flash_attn_interface", "2.8", built=True),
)


def forward(
    q: Tensor, keys: KVBlock, tiles: Sequence[Tile], terms: ScoreMods, result: OutputAccumulator
) -> None:
    from flash_attn.flash_attn_interface import _flash_attn_forward

    for tile, left, right in windows(tiles) if q.numel() else ():
        with lane(tiles, keys):
            q_, k, v = aligned(part(q, tile.rows), part(keys.k, tile.cols), part(keys.v, tile.cols))
            out, lse, *_ = _flash_attn_forward(
                q_, k, v, dropout_p=0.0, softmax_scale=terms.scale, causal=False,
                window_size_left=left, window_size_right=right, softcap=terms.softclamp or 0.0,
                alibi_slopes=None, return_softmax=False,
            )  # fmt: skip
        result.add(tile.rows, out, lse)


def backward(
    saved: Residuals, keys: KVBlock, tiles: Sequence[Tile], terms: ScoreMods, grads: Grads
) -> None:
    with_lse_gradient(_backward, saved, keys, tiles, terms, grads)


def _backward(
    saved: Residuals, keys: KVBlock, tiles: Sequence[Tile], terms: ScoreMods, grads: Grads
) -> None:
    from flash_attn.flash_attn_interface import _flash_attn_backward

    for tile, left, right in windows(tiles) if saved.q.numel() else ():
        places = tile.rows, tile.cols, tile.cols
        dq, dk, dv = found = [total.alloc(at) for total, at in zip(grads, places)]
        with lane(tiles, keys, *found):
            q, k, v, out, dout = aligned(
                part(saved.q, tile.rows), part(keys.k, tile.cols), part(keys.v, tile.cols),
                part(saved.out, tile.rows), part(saved.dout, tile.rows),
            )  # fmt: skip
            _flash_attn_backward(
                dout, q, k, v, out, saved.lse[..., tile.rows].contiguous(), dq, dk, dv,
                dropout_p=0.0, softmax_scale=terms.scale, causal=False, window_size_left=left,
                window_size_right=right, softcap=terms.softclamp or 0.0, alibi_slopes=None,
                deterministic=torch.are_deterministic_algorithms_enabled(),
            )  # fmt: skip
        for total, at, t in zip(grads, places, found):
            total.add(at, t)
