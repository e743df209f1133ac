"""Routed queries to routed keys of another sequence: what is chosen, and what is refused."""

import pytest
import torch

from ring_attention_pytorch import ConditionalRoutedCrossAttention, RoutingPlan, positions
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.routing.cross_attention import mean_token
from tests.support import threads
from tests.support.reference import relative_error

DOUBLE = torch.float64
X, CONTEXT = torch.randn(2, 9, 8, dtype=DOUBLE), torch.randn(2, 13, 8, dtype=DOUBLE)


def module(**options) -> ConditionalRoutedCrossAttention:
    given = dict(num_tokens_q=3, num_tokens_kv=4, dim_head=4, heads=2) | options
    return ConditionalRoutedCrossAttention(8, **given).double()


def test_what_is_not_routed_gets_the_null_token_or_nothing() -> None:
    attn = module()
    out = attn(X, CONTEXT)
    chosen = attn.q_router(X, num_tokens=3).indices
    for b in range(2):
        others = ~torch.isin(torch.arange(9), chosen[b])
        assert others.sum() == 6
        assert torch.equal(out[b, others], attn.null_q_token.expand(6, -1))
        assert not torch.isin(out[b, ~others], attn.null_q_token).any()
    zeros = module(use_null_q_tokens=False)(X, CONTEXT)
    assert (zeros == 0).all(-1).sum() == 2 * 6


def test_only_routed_keys_are_read() -> None:
    attn = module(num_tokens_q=None)
    want = attn(X, CONTEXT)
    routed = attn.kv_router(CONTEXT, num_tokens=4).indices
    for b in range(2):
        few = CONTEXT[b : b + 1, routed[b]]
        assert relative_error(attn(X[b : b + 1], few), want[b : b + 1]) < 1e-12


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_mean_of_real_tokens_is_that_of_the_whole(size: int, masked: bool) -> None:
    mask = torch.rand(2, 9) > 0.4
    mask[1] = False
    want = torch.stack([X[b][mask[b] if masked else slice(None)].sum(0) for b in range(2)])
    want = want / (mask.sum(1).clamp(min=1) if masked else torch.tensor([9, 9]))[:, None]

    def main(ring: Ring) -> float:
        at = positions("zigzag", rank=ring.rank, ring_size=size, length=9)
        mine = mask[:, at] if masked else None
        plan = RoutingPlan.make(X[:, at], mine, layout="zigzag", group=ring)
        return relative_error(mean_token(X[:, at], plan), want)

    assert max(threads.run(size, main)[0]) < 1e-14


def test_contexts_that_do_not_fit_are_refused() -> None:
    for given, why in (
        (dict(context=CONTEXT.float()), "context must have the dtype of x, torch.float64, got"),
        (dict(context=CONTEXT[..., :4]), r"context must be \[batch, tokens, 8\] of one batch"),
        (dict(context=CONTEXT[:1]), r"context must be .* got \[1, 13, 8\]"),
        (dict(num_tokens_kv=0), "num_tokens_kv must be at least 1"),
        (dict(context_mask=torch.ones(2, 9).bool()), "mask must be bool"),
    ):
        with pytest.raises(ValueError, match=why):
            module()(**{"x": X, "context": CONTEXT, **given})
    with pytest.raises(ValueError, match="made without a router for queries"):
        module(num_tokens_q=None)(X, CONTEXT, num_tokens_q=3)
