"""flash-attn 2 (Dao 2023, https://arxiv.org/abs/2307.08691), if it is installed.

It has windows, softcap and a deterministic backward of its own. Its diagonals count from the bottom
right, and it computes delta from `out`.
"""

from functools import partial

import torch
from torch import Tensor

from ring_attention_pytorch.kernels._flash import (
    backward_in_windows,
    forward_in_windows,
    with_lse_gradient,
)
from ring_attention_pytorch.runtime.interfaces import (
    FEATURES,
    Capabilities,
    Dependency,
    ScoreMods,
)

CAN = Capabilities(
    devices=("cuda",),
    dtypes=(torch.bfloat16, torch.float16),
    min_capability=(8, 0),
    max_head_dim=256,
    head_dim_multiple=8,
    unequal_head_dims=(),
    features=FEATURES - {"key_mask", "unusual_scale", "alibi", "mask_mod", "dropout"},
    package=Dependency("flash-attn", "flash_attn.flash_attn_interface", "2.8", built=True),
)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, terms: ScoreMods, window: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    from flash_attn.flash_attn_interface import _flash_attn_forward

    out, lse, *_ = _flash_attn_forward(
        q, k, v, dropout_p=0.0, softmax_scale=terms.scale, causal=False, window_size_left=window[0],
        window_size_right=window[1], softcap=terms.softclamp or 0.0, alibi_slopes=None,
        return_softmax=False,
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
    *room: Tensor,
) -> tuple[Tensor, ...]:
    from flash_attn.flash_attn_interface import _flash_attn_backward

    _flash_attn_backward(
        dout, q, k, v, out, lse, *room, dropout_p=0.0, softmax_scale=terms.scale, causal=False,
        window_size_left=window[0], window_size_right=window[1], softcap=terms.softclamp or 0.0,
        alibi_slopes=None, deterministic=torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    return room


forward = partial(forward_in_windows, _attend)
backward = partial(with_lse_gradient, partial(backward_in_windows, _differentiate, True))
