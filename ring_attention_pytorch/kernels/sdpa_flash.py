"""Flash attention 2 as PyTorch ships it for CUDA: nothing to install, windows included."""

from functools import partial

import torch
from torch import Tensor

from ring_attention_pytorch.kernels._flash import (
    backward_in_windows,
    forward_in_windows,
    with_lse_gradient,
)
from ring_attention_pytorch.runtime.interfaces import FEATURES, Capabilities, ScoreMods, Traits

CAN = Capabilities(
    devices=("cuda",),
    dtypes=(torch.bfloat16, torch.float16),
    min_capability=(8, 0),
    max_head_dim=256,
    head_dim_multiple=8,
    unequal_head_dims=(),
    traits=Traits(taped=True),
    features=FEATURES - {"key_mask", "softclamp", "unusual_scale", "alibi", "mask_mod", "dropout"},
)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, terms: ScoreMods, window: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, q.shape[1], k.shape[1],
        0.0,  # dropout
        False,  # causal
        False, scale=terms.scale, window_size_left=window[0], window_size_right=window[1],
    )  # fmt: skip
    return out, lse


def _differentiate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    terms: ScoreMods,
    window: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor]:
    unused = torch.zeros(2, dtype=torch.uint64, device=q.device)  # dropout's numbers
    return torch.ops.aten._flash_attention_backward(
        dout, q, k, v, out, lse, None, None, q.shape[1], k.shape[1],
        0.0,  # dropout
        False,  # causal
        unused, unused, scale=terms.scale, window_size_left=window[0], window_size_right=window[1],
    )  # fmt: skip


forward = partial(forward_in_windows, _attend)
backward = partial(with_lse_gradient, partial(backward_in_windows, _differentiate, False))
