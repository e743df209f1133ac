"""Summaries of blocks: softmax-weighted means, made in parts where their tokens are.

A part is a mean and the log-sum-exp of its weights, as in flash attention. So parts of ranks are
merged by the same function that made them, and only parts travel: one for each cell, however many
tokens it is of.
"""

from functools import partial

import torch
from torch import Tensor

from ring_attention_pytorch.comm.exchange import exchange_rows
from ring_attention_pytorch.ranks.agreement import error_of, report_to_group, typed
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype, softmax_weights
from ring_attention_pytorch.summaries.plan import Deal, SummaryPlan


def softmax_mean(x: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean `[c, h, d]` of x `[c, s, h, d]` by a softmax of logits `[c, s, h]`, and lse.

    Where all logits are -inf the mean is 0 and lse -inf, and there is no gradient.

    >>> mean, lse = softmax_mean(torch.ones(1, 2, 1, 3), torch.tensor([[[0.0], [-torch.inf]]]))
    >>> mean.tolist(), lse.tolist()
    ([[[1.0, 1.0, 1.0]]], [[0.0]])
    """
    weights, lse = softmax_weights(logits, dim=1)
    return torch.einsum("csh,cshd->chd", weights, x), lse


@typed(report_to_group("summary attention", agreed=("plan", ...)))
def summarize(
    k: Tensor,
    v: Tensor,
    *,
    plan: SummaryPlan,
    weights: tuple[Tensor | None, Tensor | None] = (None, None),
    queries: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor]:
    """Make the summaries of keys and of values that this rank keeps.

    Args:
        k: `[b, n, h_kv, d]`, this rank's keys, before rotary embedding.
        v: `[b, n, h_kv, d_v]`, its values.
        plan: of near and far attention of these tokens.
        weights: of keys and of values, each `[h_kv, block]`: the logits of a block's tokens by
            place. None is 0, a plain mean.
        queries: of keys and of values, `[h_kv, d]` and `[h_kv, d_v]`: what a token's logit is
            raised by is its product with these (attention pooling). None is 0.

    Returns:
        Keys `[1, m, h_kv, d]` and values `[1, m, h_kv, d_v]` in the dtypes of k and v, of all
        samples, in the order of `plan.summary_positions()`.

    Raises:
        ValueError: the plan was made for other keys or values, or weights or queries are of other
            shapes.

    >>> k = torch.arange(6.0).view(1, 6, 1, 1)
    >>> plan = SummaryPlan.make(k, k, k, window=0, stride=2)
    >>> summarize(k, k, plan=plan)[0].flatten().tolist()
    [0.5, 2.5]
    """
    if (error := error_of(partial(_check, k, v, plan, weights, queries))) is not None:
        plan.ring.report_failure(f"raised ValueError: {error}")
        raise ValueError(f"summarize: {error}")
    deal = plan.deal
    if deal is None:
        return k.new_empty(1, 0, *k.shape[2:]), v.new_empty(1, 0, *v.shape[2:])
    k, v = plan.keys(k, v)[:2]  # weight 0 times NaN in what is hidden would be NaN
    parts: list[Tensor] = []
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
    """Raise ValueError for what is not of the shape that the plan was made for."""
    b, _, n, _, heads, d, d_v, *_ = plan.signature
    by_place = heads, plan.rule.block
    found = (("k", k), ("v", v), *zip(("weights of keys", "weights of values"), weights))
    found += (*zip(("queries of keys", "queries of values"), queries),)
    shapes = (b, n, heads, d), (b, n, heads, d_v), by_place, by_place, (heads, d), (heads, d_v)
    for (name, t), shape in zip(found, shapes):
        if t is not None and t.shape != shape:
            raise ValueError(
                f"{name} must be {[*shape]} by the plan, got {[*t.shape]}; make one for these"
            )


def _own_parts(
    deal: Deal, x: Tensor, by_place: Tensor | None, query: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return mean `[c, h, d]` and lse `[c, h]` of the tokens here, for each cell that has any."""
    wide = accumulation_dtype(x.dtype)
    x = x.flatten(0, 1)[deal.tokens].to(wide)
    logits = x.new_zeros(x.shape[:3])
    if by_place is not None:
        logits = by_place.to(wide).T[deal.places]
    if query is not None:
        logits = logits + torch.einsum("cshd,hd->csh", x, query.to(wide))
    return softmax_mean(x, logits.masked_fill(~deal.real[..., None], -torch.inf))


def _merged(parts: list[Tensor], plan: SummaryPlan) -> list[Tensor]:
    """Send parts of cells to the ranks that keep their summaries; return those kept here, whole."""
    deal = plan.deal
    keys, key_lse, values, value_lse = parts
    packed = torch.cat((keys, key_lse[..., None], values, value_lse[..., None]), -1)
    arrived = exchange_rows([packed[sent] for sent in deal.sends], deal.lands, plan.ring)
    widths = keys.shape[-1], 1, values.shape[-1], 1
    cells = deal.mine.stop - deal.mine.start
    nothing = packed.new_zeros(cells, *packed.shape[1:]).split(widths, -1)
    empty = torch.cat((nothing[0], nothing[1] - torch.inf, nothing[2], nothing[3] - torch.inf), -1)
    by_rank = [empty.index_copy(0, land, part) for land, part in zip(deal.lands, arrived)]
    keys, key_lse, values, value_lse = torch.stack(by_rank, 1).split(widths, -1)
    key_parts = softmax_mean(keys, key_lse[..., 0])
    return [*key_parts, *softmax_mean(values, value_lse[..., 0])]
