"""The layer whose far past is in summary."""

import pytest
import torch
from torch import Tensor

from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.summaries import SummaryAttention
from tests.support.reference import relative_error
from tests.support.summary_reference import summary_attention


@pytest.mark.parametrize("restart", [False, True])
def test_a_layer_is_the_reference_of_its_projections(restart: bool) -> None:
    torch.manual_seed(0)
    made = dict(rotary_embed=True, rotary_restart=restart, num_grouped_query_heads=2)
    attn = SummaryAttention(12, window=5, stride=3, block=4, heads=4, dim_head=6, **made).double()
    x = torch.randn(2, 29, 12, dtype=torch.float64)
    ids = (torch.arange(29) >= 8).long().expand(2, -1)
    far = attn.summaries
    with torch.no_grad():
        for p in far.parameters():
            p.normal_()
        q, k, v = attn.project(x, None)
        angles = attn.rotary_embed.inv_freq.double().repeat(2)

        def rotate(t: Tensor, at: Tensor) -> Tensor:
            turned = torch.cat((-t[..., 3:], t[..., :3]), -1)
            # angles are computed in float32, as everywhere
            angle = (at[:, None].float() * angles.float())[:, None].double()
            return t * angle.cos() + turned * angle.sin()

        want = summary_attention(
            q, k, v, window=5, stride=3, block=4, weights=(far.key_weights, far.value_weights),
            bias=far.bias, documents=ids, rotate=rotate, restart=restart,
        )  # fmt: skip
        got = attn(x, documents=ids)
    assert relative_error(got, attn.to_out(want.flatten(2))) < 1e-6


@pytest.mark.parametrize(
    "given",
    [dict(causal=False), dict(dropout=0.1), dict(max_lookback_seq_len=3)],
)
def test_layers_refuse_what_summaries_cannot_do(given: dict) -> None:
    with pytest.raises(ValueError, match="attn_summaries needs causal=True"):
        SummaryAttention(8, window=4, **given)


def test_plans_of_other_summaries_are_refused() -> None:
    layers = [SummaryAttention(8, window=4, stride=s, heads=2, dim_head=4) for s in (2, 4)]
    x = torch.randn(1, 30, 8)
    plan = layers[0].plan(x)
    assert torch.equal(layers[0](x, plan=plan), layers[0](x))
    with pytest.raises(ValueError, match="the plan is for summaries by"):
        layers[1](x, plan=plan)


def test_ranks_that_wait_for_a_step_hear_of_its_tokens(monkeypatch):
    attn, heard = SummaryAttention(8, window=4, stride=2, dim_head=4, heads=2), []
    _, cache = attn.prefill(torch.randn(1, 5, 8))
    monkeypatch.setattr(Ring, "report_failure", lambda _, error: heard.append(str(error)))
    with pytest.raises(ValueError, match="step: x must be") as error:
        attn.step(torch.randn(1, 2, 8), cache)
    assert heard == [str(error.value)]
