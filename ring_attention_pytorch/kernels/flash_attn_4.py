"""flash-attn 4 (`flash_attn.cute`), where it is installed: the fastest on Hopper and later.

Windows, softcap, the gradient of lse and a deterministic backward are its own. Its diagonals
count from the bottom right. It compiles itself on first use of each shape class.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ring_attention_pytorch.contract import FEATURES, Can, Grads, Keys, Package, Saved, Terms
from ring_attention_pytorch.kernels._whole import NO_BOUND, aligned, from_bottom_right
from ring_attention_pytorch.layouts import Tile
from ring_attention_pytorch.running import Result

CAN = Can(
    devices=("cuda",),
    dtypes=(torch.bfloat16, torch.float16),
    oldest=(9, 0),
    newest=(11, 9),
    widest=128,
    multiple=64,  # 4.0.0b36 gives wrong gradients, without a word, for head sizes 16 and 80
    one_size=True,
    features=FEATURES - {"key_mask", "unusual_scale", "alibi", "mask_mod", "dropout"},
    package=Package("flash-attn-4", "flash_attn.cute.interface", "4.0.0b1", "flash4"),
)


def forward(q: Tensor, keys: Keys, tiles: Sequence[Tile], terms: Terms, result: Result) -> None:
    from flash_attn.cute.interface import _flash_attn_fwd

    for tile in tiles if q.numel() else ():
        q_, k, v = aligned(q[:, tile.rows], keys.k[:, tile.cols], keys.v[:, tile.cols])
        out, lse, *_ = _flash_attn_fwd(
            q_, k, v, softmax_scale=terms.scale, softcap=terms.softclamp, return_lse=True,
            **_window(tile),
        )  # fmt: skip
        result.add(tile.rows, out, lse)


def backward(saved: Saved, keys: Keys, tiles: Sequence[Tile], terms: Terms, grads: Grads) -> None:
    from flash_attn.cute.interface import _flash_attn_bwd

    for tile in tiles if saved.q.numel() else ():
        rows = tile.rows
        q, k, v, out, dout = aligned(
            saved.q[:, rows], keys.k[:, tile.cols], keys.v[:, tile.cols], saved.out[:, rows],
            saved.dout[:, rows],
        )  # fmt: skip
        dq, dk, dv = _flash_attn_bwd(
            q, k, v, out, dout, saved.lse[..., rows].contiguous(), softmax_scale=terms.scale,
            softcap=terms.softclamp or 0.0,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            dlse=None if saved.dlse is None else saved.dlse[..., rows].contiguous(),
            **_window(tile),
        )[:3]  # fmt: skip
        grads.dq.add(rows, dq)
        grads.dk.add(tile.cols, dk)
        grads.dv.add(tile.cols, dv)


def _window(tile: Tile) -> dict[str, int | bool | None]:
    left, right = (None if x == NO_BOUND else x for x in from_bottom_right(tile))
    if (left, right) == (None, 0):
        return dict(causal=True)
    return dict(window_size_left=left, window_size_right=right)
