"""The gated delta rule's gradients within chunks, where flash-linear-attention refuses its own."""

import torch
from torch import Tensor

from ring_attention_pytorch.recurrent.chunks import CHUNK, Chunks, How, Inputs, Returned
from ring_attention_pytorch.runtime.launches import launch_alike, power_of_2

CHOSEN = dict(BK=128, BV=64, num_warps=8, num_stages=3)  # measured on an H200


def head_gradients(
    x: Inputs, work: Chunks, r: Returned, how: How
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, w and the sums of gates, as fla's `chunk_bwd_dqkwg`.

    Value heads that share a key head are summed for q and k, in the dtype of q.
    """
    from ring_attention_pytorch.recurrent._triton_head_gradients import head_gradients_kernel

    (_, n, heads, d_v), (key_heads, d_k) = r.v.shape, x.k.shape[2:]
    chosen = CHOSEN | {"BK": min(CHOSEN["BK"], power_of_2(d_k))}
    blocks = -(-d_k // chosen["BK"])
    dq, dk, dw = torch.empty_like(x.q), torch.empty_like(x.k), torch.empty_like(work.w)
    dg = x.g.new_empty(blocks, 1, n, heads, dtype=torch.float32)
    launch_alike(
        head_gradients_kernel, blocks * len(how.chunk_indices) * key_heads, x.q, x.k, r.v,
        x.g, r.h, r.do, r.dh, r.dv, dq, dk, dw, dg, how.chunk_indices, how.cu_seqlens, x.scale, n,
        HEADS=heads, KEY_HEADS=key_heads, K=d_k, V=d_v, CHUNK=CHUNK, **chosen,
    )  # fmt: skip
    return dq, dk, dw, dg.sum(0)
