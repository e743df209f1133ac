"""Regular attention on one process, with all scores in memory: the reference of the tests."""

import math

import torch
from einops import einsum, rearrange
from torch import Tensor

from ring_attention_pytorch.arguments import checked, checks_of
from ring_attention_pytorch.plan.checks import autocast, check_key_mask, check_qkv, like_autocast
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype


@checked
def default_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    softclamp_qk_sim: bool = False,
    softclamp_value: float | int = 50.0,
    *,
    window: int | None = None,
) -> Tensor:
    """Compute regular attention on one process, with all scores in memory, as a reference.

    Args:
        q, k, v: `[b, n, h, d]`, `[b, m, h_kv, d]`, `[b, m, h_kv, d_v]`.
        mask: bool `[b, m]`, True where a key can be seen; also applies with causal.
        causal, window: as for `ring_attn`; both need m = n.
        softclamp_qk_sim: scores s become c * tanh(s / c), where c is softclamp_value.

    Returns:
        `[b, n, h, d_v]` in q's dtype, or autocast's; 0 for a query that sees nothing.

    Raises:
        ValueError: causal or window with m != n, or a number out of range.

    >>> q, k = torch.randn(1, 5, 4, 8), torch.randn(1, 5, 2, 8)
    >>> default_attention(q, k, k, causal=True).shape
    torch.Size([1, 5, 4, 8])
    """
    with checks_of("default_attention"):
        check_qkv(like_autocast(q), like_autocast(k), like_autocast(v))
        check_key_mask(mask, k)
    n = q.shape[1]
    m = k.shape[1]
    if (causal or window is not None) and n != m:
        raise ValueError(f"causal and window need as many keys as queries, got {m} and {n}")
    if window is not None and window < 0:
        raise ValueError(f"window must be None or at least 0, got {window}")
    if not 0 < softclamp_value < math.inf:
        raise ValueError(f"softclamp_value must be positive and finite, got {softclamp_value}")
    q, k, v = autocast(q), autocast(k), autocast(v)
    softclamp = softclamp_value if softclamp_qk_sim else None
    with torch.autocast(q.device.type, enabled=False):  # which would compute scores in 16 bits
        return _attend(q, k, v, mask, _hidden(q, k, mask, causal, window), softclamp)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, hidden: Tensor, softclamp: float | None
) -> Tensor:
    """Compute attention, without the pairs that are `hidden`, which broadcasts to the scores."""
    if mask is not None:  # probability 0 times NaN would be NaN
        k, v = (t.masked_fill(~rearrange(mask, "b j -> b j 1 1"), 0.0) for t in (k, v))
    dtype = accumulation_dtype(q.dtype)
    grouped = rearrange(q, "b i (g r) d -> b i g r d", g=k.shape[2]).to(dtype)
    scores = einsum(grouped, k.to(dtype), "b i g r d, b j g d -> b g r i j")
    scores = scores * q.shape[-1] ** -0.5
    if softclamp is not None:
        scores = (scores / softclamp).tanh() * softclamp
    # the least finite number, not -inf: softmax of a row that sees nothing must not be NaN
    scores = scores.masked_fill(hidden, torch.finfo(dtype).min)
    p = scores.softmax(dim=-1)
    p = p.masked_fill(hidden, 0.0)
    out = einsum(p, v.to(dtype), "b g r i j, b j g d -> b i g r d")
    return rearrange(out, "b i g r d -> b i (g r) d").to(q.dtype)


def _hidden(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, window: int | None) -> Tensor:
    """Return bool `[n, m]` or `[b, 1, 1, n, m]`, True where a query does not see a key."""
    rows = torch.arange(q.shape[1], device=q.device)
    cols = torch.arange(k.shape[1], device=q.device)
    behind = rows.unsqueeze(1) - cols
    hidden = torch.zeros_like(behind, dtype=torch.bool)
    if causal:
        hidden = hidden | (behind < 0)
    if window is not None:
        hidden = hidden | (behind.abs() > window)
    return hidden if mask is None else hidden | ~rearrange(mask, "b j -> b 1 1 1 j")
