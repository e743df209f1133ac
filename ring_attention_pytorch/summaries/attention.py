"""`summary_attn`: exact attention to near tokens, merged with attention to summaries of the rest.

    window  ring_attn with a window                                      sends keys as usual
    edge    the rest of the cell in which the window ends (edge.py)      sends few keys
    select  cells whose summaries score best for a query (select.py)     sends these cells
    far     ring_attn of rows to summaries, causal by row and cell;      sends summaries
            the queries of a row see the same, so they become heads

Yuan et al. 2025, "Native Sparse Attention", section 3.3.
"""

from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.compiler import is_compiling

from ring_attention_pytorch.functional import ring_attn
from ring_attention_pytorch.plan.checks import autocast_dtype
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.ranks.agreement import report_to_ring_of, typed
from ring_attention_pytorch.ranks.ring import Caller
from ring_attention_pytorch.runtime.rowwise import merge
from ring_attention_pytorch.runtime.torch_func import run_apart
from ring_attention_pytorch.summaries.plan import SummaryPlan


@typed(report_to_ring_of("plan"))
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
    """Compute exact attention to near tokens, and attention to summaries of farther ones.

    Args:
        q: `[b, n, h, d]`, this rank's queries.
        k: `[b, n, h_kv, d]`, v: `[b, n, h_kv, d_v]`, this rank's keys and values.
        summary_k, summary_v: `[1, m, h_kv, ...]`, this rank's summaries, from `summarize`.
        plan: from `SummaryPlan.make`, for tensors like q, k and v.
        bias: `[h]`, added to the scores of summaries. None is 0.
        gates: `[b, n, h, 2]`: near and far keys get a softmax each, and the result is the sum of
            both results with these factors. None: one softmax over near and far keys.

    Returns:
        `[b, n, h, d_v]`, in the dtype that `ring_attn` returns. Gradients are exact, also through
        summaries.

    Raises:
        ValueError: the plan was made for other tensors, or bias or gates have a wrong shape.

    >>> from ring_attention_pytorch.summaries import SummaryPlan, summarize
    >>> q, k = torch.randn(1, 40, 4, 8), torch.randn(1, 40, 2, 8)
    >>> plan = SummaryPlan.make(q, k, k, window=8, stride=4)
    >>> summary_attn(q, k, k, *summarize(k, k, plan=plan), plan=plan).shape
    torch.Size([1, 40, 4, 8])
    """
    if is_compiling():
        given: dict[str, Any] = dict(plan=plan, bias=bias, gates=gates)
        return run_apart(summary_attn, q, k, v, summary_k, summary_v, **given)
    b, n, h, _ = q.shape
    for name, t, shape in (("bias", bias, [h]), ("gates", gates, [b, n, h, 2])):
        if t is not None and list(t.shape) != shape:
            raise ValueError(f"summary attention: {name} must be {shape}, got {list(t.shape)}")
    if bias is not None and gates is not None:
        raise ValueError("summary attention: with gates a bias has no effect; leave one out")
    summaries = summary_k.to(autocast_dtype(summary_k)), summary_v.to(autocast_dtype(summary_v))
    q, k, v = (t.to(autocast_dtype(t)) for t in (q, k, v))
    with torch.autocast(q.device.type, enabled=False):
        return _sum_of_parts((q, k, v), summaries, plan, bias, gates)


Part = tuple[Tensor, Tensor]  # out [b, n, h, d_v] and lse [b, n, h], of some keys


def _sum_of_parts(
    qkv: tuple[Tensor, Tensor, Tensor],
    summaries: tuple[Tensor, Tensor],
    plan: SummaryPlan,
    bias: Tensor | None,
    gates: Tensor | None,
) -> Tensor:
    """Attend to near keys and to summaries, and merge the results."""
    (q, k, v), (summary_k, summary_v), (b, n) = qkv, summaries, qkv[0].shape[:2]
    k, v = plan.near.keys(k, v)[:2]  # zeros hidden keys: they may be NaN
    near, terms = [_attended(q, k, v, plan.near)], plan.near.terms
    caller = Caller(plan.ring, "summary attention", plan.near.number)
    if plan.edge is not None:
        found = plan.edge.attend(q, k, v, terms, caller)
        near.append(_placed(*found, plan.edge.queries, b, n))
    if plan.selection is not None:
        found = plan.selection.attend(q, k, v, summary_k, terms, caller)
        near.append(_placed(*found, plan.selection.queries, b, n))
    far = None if plan.far is None else _far(q, summary_k, summary_v, plan)
    dtype = near[0][0].dtype
    if gates is not None:
        out = gates[..., :1] * merge(near)[0]
        return (out if far is None else out + gates[..., 1:] * far[0]).to(dtype)
    if far is not None:
        near.append(far if bias is None else (far[0], far[1] + bias.to(far[1].dtype)))
    return merge(near)[0].to(dtype)


def _attended(q: Tensor, k: Tensor, v: Tensor, plan: RingPlan) -> Part:
    out, lse = ring_attn(q, k, v, plan=plan, return_lse=True)
    return out, rearrange(lse, "b h n -> b n h")


def _far(q: Tensor, k: Tensor, v: Tensor, plan: SummaryPlan) -> Part:
    """Compute attention to summaries, with the queries of a row as heads of one query."""
    deal = plan.deal
    b, n, h, d = q.shape
    fold = dict(w=deal.width, g=k.shape[2])
    room = q.new_zeros(len(deal.rows) * deal.width, h, d)
    rows = room.index_copy(0, deal.slots, q.flatten(0, 1)[deal.queries])
    rows = rearrange(rows, "(r w) (g h) d -> 1 r (g h w) d", **fold)
    out, lse = ring_attn(rows, k, v, plan=plan.far, return_lse=True)
    out = rearrange(out, "1 r (g h w) d -> (r w) (g h) d", **fold)[deal.slots]
    lse = rearrange(lse, "1 (g h w) r -> (r w) (g h)", **fold)[deal.slots]
    return _placed(out, lse, deal.queries, b, n)


def _placed(out: Tensor, lse: Tensor, tokens: Tensor, b: int, n: int) -> Part:
    """Scatter results `[x, h, ...]` to `[b, n, ...]`; other tokens get out 0 and lse -inf."""
    nothing = out.new_zeros(b * n, *out.shape[1:])
    unseen = lse.new_full((b * n, lse.shape[1]), -torch.inf)
    out, lse = nothing.index_copy(0, tokens, out), unseen.index_copy(0, tokens, lse)
    return out.unflatten(0, (b, n)), lse.unflatten(0, (b, n))
