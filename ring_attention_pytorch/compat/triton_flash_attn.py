"""Attention to one block of keys by our Triton kernels, by the function names of 0.5.20."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ring_attention_pytorch.attention import backward, forward
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype, merge_, sum_of_products

_NOTHING_SEEN = torch.finfo(torch.float32).min  # finite lse of a row that saw nothing


@torch.no_grad()
def flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    causal: bool = False,
    o: Tensor | None = None,
    m: Tensor | None = None,
    lse: Tensor | None = None,
    softmax_scale: float | None = None,
    causal_mask_diagonal: bool = False,
    return_normalized_output: bool = False,
    load_accumulated: bool = True,
    softclamp_qk_sim: bool = False,
    softclamp_value: float | int = 50.0,
    head_first_dim: bool = False,
    remove_padding: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute attention to one block of keys by our Triton kernel; merge it with earlier blocks.

    Args:
        q, k, v: `[b, n, h, d]`, `[b, m, h_kv, d]`, `[b, m, h_kv, d_v]`; with head_first_dim
            `[b, h, n, d]` and so on.
        bias: `[b, m]` or `[b, 1, 1, m]`: 0 for keys that are seen, -inf for others.
        causal: query i sees no key after i; with causal_mask_diagonal not key i either.
        o, m, lse: with load_accumulated, the results for earlier blocks; overwritten.
        return_normalized_output: has no effect: o is always normalised.
        softclamp_qk_sim, softclamp_value: scores s become c * tanh(s / c).
        remove_padding: m and lse have n rows; if False, n rounded up to a multiple of 128.

    Returns:
        o like q, and m and lse, float32 `[b, h, rows]`. As in 0.5, `o * exp(m - lse)` is
        normalised; here o already is, and m equals lse. No gradients: see `flash_attn_backward`.

    Raises:
        ValueError: the kernel can't run here or does not support the call, or the bias has other
            values.
    """
    if head_first_dim:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        o = None if o is None else o.transpose(1, 2)
    n, clamp = q.shape[1], softclamp_value if softclamp_qk_sim else None
    plan = _block(q, k, v, bias, causal, causal_mask_diagonal, softmax_scale, clamp)
    out, out_lse = forward(plan, q, k, v, None)
    if load_accumulated and o is not None and m is not None and lse is not None:
        old_m, old_lse = m[..., :n], lse[..., :n]
        factor = (old_m - old_lse).exp()
        before = o.float() * factor.transpose(1, 2).unsqueeze(-1)
        out = out.to(accumulation_dtype(out.dtype))
        merge_(out, out_lse, before, _infinite(old_lse))
    rows = out_lse.masked_fill(out_lse == -torch.inf, _NOTHING_SEEN)
    if not remove_padding:
        rows = F.pad(rows, (0, -n % 128), value=_NOTHING_SEEN)
    o = out.to(q.dtype) if o is None else o.copy_(out)
    if head_first_dim:
        o = o.transpose(1, 2)
    return o, _written(rows, m), _written(rows, lse)


@torch.no_grad()
def flash_attn_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    delta: Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
    causal_mask_diagonal: bool = False,
    softmax_scale: float | None = None,
    softclamp_qk_sim: bool = False,
    softclamp_value: float | int = 50.0,
) -> Tensor:
    """Compute the gradients of one block of keys by our Triton kernels, into dq, dk and dv.

    Args:
        do: the gradient of o, `[b, n, h, d_v]`.
        q, k, v, bias and options: as for `flash_attn_forward`, tokens before heads.
        o, lse: the normalised results for all blocks of keys; lse `[b, h, rows]`, with or without
            padding.
        dq, dk, dv: where to write, in any dtype.
        delta: the result of an earlier call for another block of keys; None computes it.

    Returns:
        delta, of lse's shape: the row sums of do * o.

    Raises:
        ValueError: as for `flash_attn_forward`.
    """
    n, clamp = q.shape[1], softclamp_value if softclamp_qk_sim else None
    plan = _block(q, k, v, bias, causal, causal_mask_diagonal, softmax_scale, clamp)
    own_delta, dlse = sum_of_products(do, o), None
    if delta is None:
        delta = F.pad(own_delta, (0, lse.shape[-1] - n))
    else:
        dlse = own_delta - delta[..., :n]
    lse = _infinite(lse[..., :n]).contiguous()
    grads = backward(plan, q, k, v, None, o, lse, do.to(q.dtype), dlse)
    for place, grad in zip((dq, dk, dv), grads):
        place.copy_(grad)
    return delta


def _block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    causal: bool,
    diagonal: bool,
    scale: float | None,
    softclamp: float | None,
) -> RingPlan:
    """Make the plan of attention to one block of keys, on this process alone."""
    key_mask = None
    options: dict[str, Any] = {}
    if bias is not None:
        key_mask = bias.expand(q.shape[0], *bias.shape[1:]).flatten(1) > _NOTHING_SEEN
        if key_mask.shape[1] != k.shape[1] or bool((bias.flatten(1)[key_mask] != 0).any()):
            raise ValueError(
                "bias must be [b, m] or [b, 1, 1, m] of 0 and -inf, got another shape or value: "
                "ring_attn takes others, as key_bias, alibi_slopes or mask_mod"
            )
    if causal:
        rows = torch.arange(q.shape[1])
        cols = torch.arange(k.shape[1]) + diagonal
        options = dict(causal=True, cross=True, query_positions=rows, key_positions=cols)
    return RingPlan.make(
        q, k, v, key_mask=key_mask, scale=scale, softclamp=softclamp, group=Ring.alone(),
        kernel="triton", **options,
    )  # fmt: skip


def _written(rows: Tensor, place: Tensor | None) -> Tensor:
    """Return rows, copied into `place` if its shape fits, or into new memory."""
    if place is None or place.shape != rows.shape:
        return rows.clone()
    return place.copy_(rows)


def _infinite(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse <= _NOTHING_SEEN, -torch.inf)
