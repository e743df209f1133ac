"""Summaries of blocks: softmax-weighted means, made in parts on the ranks that hold the tokens.

A part is a mean and the lse of its weights, as in flash attention. The same function makes the
parts of each rank and merges them. Ranks send one part per cell, however many tokens it has.
"""

from functools import partial

import torch
from torch import Tensor

from ring_attention_pytorch.comm.collectives import exchange_rows
from ring_attention_pytorch.ranks.agreement import error_of, report_to_ring_of, typed
from ring_attention_pytorch.ranks.ring import Caller
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype, softmax_weights
from ring_attention_pytorch.summaries.plan import Deal, SummaryPlan


def softmax_mean(x: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Average x `[c, s, h, d]` by softmax(logits `[c, s, h]`); return `[c, h, d]` and lse.

    If all logits are -inf, the mean is 0, lse is -inf, and there is no gradient.

    >>> mean, lse = softmax_mean(torch.ones(1, 2, 1, 3), torch.tensor([[[0.0], [-torch.inf]]]))
    >>> mean.tolist(), lse.tolist()
    ([[[1.0, 1.0, 1.0]]], [[0.0]])
    """
    weights, lse = softmax_weights(logits, dim=1)
    return torch.einsum("csh,cshd->chd", weights, x), lse


@typed(report_to_ring_of("plan"))
def summarize(
    k: Tensor,
    v: Tensor,
    *,
    plan: SummaryPlan,
    weights: tuple[Tensor | None, Tensor | None] = (None, None),
    queries: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor]:
    """Make this rank's summaries of keys and of values.

    Args:
        k: `[b, n, h_kv, d]`, this rank's keys, before rotary embedding.
        v: `[b, n, h_kv, d_v]`, its values.
        plan: the `SummaryPlan` of these tokens.
        weights: for keys and for values, each `[h_kv, block]`: the logits of a block's tokens by
            place. None is 0, a plain mean.
        queries: for keys and for values, `[h_kv, d]` and `[h_kv, d_v]`: a token's product with
            its query is added to its logit (attention pooling). None is 0.

    Returns:
        Keys `[1, m, h_kv, d]` and values `[1, m, h_kv, d_v]` in the dtypes of k and v, of all
        samples, in the order of `plan.summary_positions()`.

    Raises:
        ValueError: the plan was made for other keys or values, or weights or queries have a
            wrong shape.

    >>> k = torch.arange(6.0).view(1, 6, 1, 1)
    >>> plan = SummaryPlan.make(k, k, k, window=0, stride=2)
    >>> summarize(k, k, plan=plan)[0].flatten().tolist()
    [0.5, 2.5]
    """
    if (error := error_of(partial(_check, k, v, plan, weights, queries))) is not None:
        plan.ring.report_failure(error)
        raise ValueError(f"summarize: {error}")
    deal = plan.deal
    if deal is None:
        return k.new_empty(1, 0, *k.shape[2:]), v.new_empty(1, 0, *v.shape[2:])
    k, v = plan.near.keys(k, v)[:2]  # zeros hidden keys: weight 0 times NaN would be NaN
    parts: list[Tensor] = []
    with torch.autocast(k.device.type, enabled=False):
        for x, by_place, query in zip((k, v), weights, queries):
            parts += _own_parts(deal, x, by_place, query)
        if plan.ring.size > 1:
            parts = _merged(parts, plan)
    return parts[0].to(k.dtype)[None], parts[2].to(v.dtype)[None]


def _check(
    k: Tensor,
    v: Tensor,
    plan: SummaryPlan,
    weights: tuple[Tensor | None, Tensor | None],
    queries: tuple[Tensor | None, Tensor | None],
) -> None:
    """Raise ValueError if a shape doesn't fit the plan."""
    b, _, n, _, heads, d, d_v, *_ = plan.near.signature
    by_place = heads, plan.rule.block
    wanted = (
        ("k", k, (b, n, heads, d)),
        ("v", v, (b, n, heads, d_v)),
        ("weights of keys", weights[0], by_place),
        ("weights of values", weights[1], by_place),
        ("queries of keys", queries[0], (heads, d)),
        ("queries of values", queries[1], (heads, d_v)),
    )
    for name, t, shape in wanted:
        if t is not None and t.shape != shape:
            raise ValueError(
                f"{name} must be {[*shape]} by the plan, got {[*t.shape]}; make one for these"
            )


def _own_parts(
    deal: Deal, x: Tensor, by_place: Tensor | None, query: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return mean `[c, h, d]` and lse `[c, h]` of this rank's tokens, for each cell with any."""
    wide = accumulation_dtype(x.dtype)
    x = x.flatten(0, 1)[deal.tokens].to(wide)
    logits = x.new_zeros(x.shape[:3])
    if by_place is not None:
        logits = by_place.to(wide).T[deal.places]
    if query is not None:
        logits = logits + torch.einsum("cshd,hd->csh", x, query.to(wide))
    return softmax_mean(x, logits.masked_fill(~deal.real[..., None], -torch.inf))


def _merged(parts: list[Tensor], plan: SummaryPlan) -> list[Tensor]:
    """Send parts of cells to the ranks that summarise them; return this rank's merged summaries."""
    deal = plan.deal
    keys, key_lse, values, value_lse = parts
    caller = Caller(plan.ring, "summarize", plan.near.number)
    packed = torch.cat((keys, key_lse[..., None], values, value_lse[..., None]), -1)
    arrived = exchange_rows([packed[sent] for sent in deal.sends], deal.lands, caller)
    widths = keys.shape[-1], 1, values.shape[-1], 1
    cells = deal.mine.stop - deal.mine.start
    nothing = packed.new_zeros(cells, *packed.shape[1:]).split(widths, -1)
    empty = torch.cat((nothing[0], nothing[1] - torch.inf, nothing[2], nothing[3] - torch.inf), -1)
    by_rank = [empty.index_copy(0, land, part) for land, part in zip(deal.lands, arrived)]
    keys, key_lse, values, value_lse = torch.stack(by_rank, 1).split(widths, -1)
    key_parts = softmax_mean(keys, key_lse[..., 0])
    return [*key_parts, *softmax_mean(values, value_lse[..., 0])]
