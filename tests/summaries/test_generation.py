"""Caches of layers with summaries: a prompt and tokens give what the whole gives."""

import pytest
import torch

from ring_attention_pytorch import RingAttention, Summaries
from ring_attention_pytorch.nn.layer_caches import Reading, TokenChunk
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.summaries.generation import CachedSummaries
from tests.support.reference import relative_error

X = torch.randn(2, 21, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def layer(**options) -> RingAttention:
    far = Summaries(4, 3, **options)
    return RingAttention(8, causal=True, dim_head=4, heads=2, attn_summaries=far).double()


def kept_by(attn: RingAttention) -> CachedSummaries:
    return CachedSummaries(attn, Reading(Ring.alone(), 2, 40, torch.float64, torch.device("cpu")))


@pytest.mark.parametrize("prompt", [1, 4, 17, 21])
@pytest.mark.parametrize("options", [{}, {"distance": 10}, {"gates": True}], ids=str)
@torch.no_grad()
def test_a_prompt_and_the_tokens_after_it_are_the_whole(prompt: int, options: dict) -> None:
    attn = layer(**options)
    kept, want = kept_by(attn), attn(X)
    out = [kept.attend(X[:, :prompt], TokenChunk(torch.arange(prompt), None, "contiguous", prompt))]
    for at in range(prompt, 21):
        assert kept.length == at
        out.append(kept.attend(X[:, at : at + 1], TokenChunk(torch.tensor([at]), None, None, 1)))
    assert relative_error(torch.cat(out, 1), want) < 1e-12


@torch.no_grad()
def test_layers_with_the_same_summaries_share_the_plan_of_a_prompt() -> None:
    chunk = TokenChunk(torch.arange(21), None, "contiguous", 21)
    first, second, other = layer(), layer(), layer(distance=10)
    assert kept_by(first)._plan(X, chunk) is kept_by(second)._plan(X, chunk)
    assert kept_by(other)._plan(X, chunk) is not kept_by(first)._plan(X, chunk)
