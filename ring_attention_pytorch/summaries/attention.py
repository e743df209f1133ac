"""`summary_attn`: exact attention to what is near, merged with attention to summaries of the rest.

    near    ring_attn with a window, by key's and query's cell          q, k, v where they are
    far     ring_attn of rows to summaries, causal by row and cell      summaries travel
            a row's queries see the same, so they are heads of one row  queries stay

Yuan et al. 2025, "Native Sparse Attention", section 3.3.
"""

import torch
from einops import rearrange
from torch import Tensor
from torch.compiler import is_compiling

from ring_attention_pytorch.functional import ring_attn
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype
from ring_attention_pytorch.runtime.torch_func import run_apart
from ring_attention_pytorch.summaries.plan import SummaryPlan


def summary_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    summary_k: Tensor,
    summary_v: Tensor,
    *,
    plan: SummaryPlan,
    bias: Tensor | None = None,
    gates: Tensor | None = None,
) -> Tensor:
    """Compute attention to near tokens exactly, and to farther ones by their summaries.

    Args:
        q: `[b, n, h, d]`, this rank's queries.
        k: `[b, n, h_kv, d]`, v: `[b, n, h_kv, d_v]`, its keys and values.
        summary_k, summary_v: `[1, m, h_kv, ...]`, the summaries that it keeps, by `summarize`.
        plan: from `SummaryPlan.make`, for tensors like q, k and v.
        bias: `[h]`, added to the scores of summaries. None is 0.
        gates: `[b, n, h, 2]`: instead of one softmax over both there are two, near and far, and
            the result is their sum with these factors.

    Returns:
        `[b, n, h, d_v]`, of the dtype that `ring_attn` gives. Gradients are exact, those through
        summaries too.

    Raises:
        ValueError: the plan was made for other tensors, or bias or gates are of other shapes.

    >>> from ring_attention_pytorch.summaries import SummaryPlan, summarize
    >>> q, k = torch.randn(1, 40, 4, 8), torch.randn(1, 40, 2, 8)
    >>> plan = SummaryPlan.make(q, k, k, window=8, stride=4)
    >>> summary_attn(q, k, k, *summarize(k, k, plan=plan), plan=plan).shape
    torch.Size([1, 40, 4, 8])
    """
    if is_compiling():
        given = dict(plan=plan, bias=bias, gates=gates)
        return run_apart(summary_attn, q, k, v, summary_k, summary_v, **given)
    b, n, h, _ = q.shape
    for name, t, shape in (("bias", bias, [h]), ("gates", gates, [b, n, h, 2])):
        if t is not None and list(t.shape) != shape:
            raise ValueError(f"summary attention: {name} must be {shape}, got {list(t.shape)}")
    if bias is not None and gates is not None:
        raise ValueError("summary attention: with gates a bias has no effect; leave one out")
    out, lse = ring_attn(q, k, v, plan=plan, return_lse=True)
    if plan.far is None:
        return out if gates is None else (out * gates[..., :1]).to(out.dtype)
    far, far_lse = _far(q, summary_k, summary_v, plan)
    dtype, wide = out.dtype, accumulation_dtype(out.dtype)
    out, far = out.to(wide), far.to(wide)
    if gates is not None:
        return (gates[..., :1] * out + gates[..., 1:] * far).to(dtype)
    if bias is not None:
        far_lse = far_lse + bias.to(wide)
    return _merged(out, rearrange(lse, "b h n -> b n h"), far, far_lse).to(dtype)


def _far(q: Tensor, k: Tensor, v: Tensor, plan: SummaryPlan) -> tuple[Tensor, Tensor]:
    """Return out `[b, n, h, d_v]` and lse `[b, n, h]` of attention to summaries."""
    deal = plan.deal
    b, n, h, d = q.shape
    fold = dict(w=deal.width, g=k.shape[2])
    room = q.new_zeros(len(deal.rows) * deal.width, h, d)
    rows = room.index_copy(0, deal.slots, q.flatten(0, 1)[deal.queries])
    rows = rearrange(rows, "(r w) (g h) d -> 1 r (g h w) d", **fold)
    out, lse = ring_attn(rows, k, v, plan=plan.far, return_lse=True)
    out = rearrange(out, "1 r (g h w) d -> (r w) (g h) d", **fold)[deal.slots]
    lse = rearrange(lse, "1 (g h w) r -> (r w) (g h)", **fold)[deal.slots]
    nothing, unseen = out.new_zeros(b * n, *out.shape[1:]), lse.new_full((b * n, h), -torch.inf)
    out = nothing.index_copy(0, deal.queries, out)
    lse = unseen.index_copy(0, deal.queries, lse)
    return out.view(b, n, *out.shape[1:]), lse.view(b, n, h)


def _merged(a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor) -> Tensor:
    """Merge results `[b, n, h, d]` of one softmax by the lse `[b, n, h]` of its two parts."""
    top = torch.maximum(a_lse, b_lse).detach()
    top = top.masked_fill(top.isinf(), 0.0)
    of_a, of_b = (a_lse - top).exp(), (b_lse - top).exp()
    total = of_a + of_b
    total = total.masked_fill(total == 0, 1.0)
    return (of_a / total)[..., None] * a + (of_b / total)[..., None] * b
