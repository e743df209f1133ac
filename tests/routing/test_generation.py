"""Generation by routed blocks: what is kept of tokens, and logits piece by piece."""

import pytest
import torch

from ring_attention_pytorch import ConditionalRoutedTransformer
from ring_attention_pytorch.nn.layer_caches import Reading
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.routing.generation import CachedRoutedTransformer, Recent, feed_forward
from tests.support.generation_cases import ROUTED_BLOCK, ROUTED_TOKENS
from tests.support.reference import relative_error
from tests.support.routing_cases import MODULES

DOUBLE = torch.float64


@pytest.mark.parametrize("size", [1, 3, 4])
def test_of_tokens_the_last_window_and_the_one_before_are_kept(size: int) -> None:
    recent, x = Recent(size), torch.arange(23.0).view(1, -1, 1)
    for at in range(23):
        recent.add(x[:, at : at + 1])
        start = max(0, at // size * size - size)
        assert recent.tokens.flatten().tolist() == [*range(start, at + 1)]
        full = (at + 1) % size == 0
        assert (recent.window is not None) == full
        if recent.window is not None:
            assert recent.window.flatten().tolist() == [*range(at + 1 - size, at + 1)]


@torch.no_grad()
def test_a_feed_forward_by_pieces_is_that_of_the_whole() -> None:
    layer, x = MODULES["causal feedforward"]().double(), torch.randn(2, 18, 8, dtype=DOUBLE)
    recent, want = Recent(5), layer(x)
    out = [feed_forward(layer, piece, recent) for piece in x.split([3, 2, 5, 1, 4, 3], 1)]
    assert relative_error(torch.cat(out, 1), want) < 1e-12


@torch.no_grad()
@pytest.mark.parametrize("prompt", [1, 7, 17])
def test_a_prompt_and_tokens_after_it_have_the_logits_of_the_whole(prompt: int) -> None:
    torch.manual_seed(0)
    model = ConditionalRoutedTransformer(
        num_tokens=11, dim=8, depth=2, causal=True, num_heavy_attn_tokens_q=2,
        num_heavy_attn_tokens_kv=2, heavy_window_size=6, block_kwargs=ROUTED_BLOCK, **ROUTED_TOKENS,
    ).double()  # fmt: skip
    ids = torch.randint(11, (2, 20))
    want = model(ids)
    kept = CachedRoutedTransformer(model, Reading(Ring.alone(), 2, 24, DOUBLE, torch.device("cpu")))
    kept.prefill(ids[:, :prompt])
    assert kept.length == prompt
    for at in range(prompt, 20):
        hidden = kept.hidden(ids[:, at : at + 1])
        assert relative_error(model.to_logits(hidden), want[:, at]) < 1e-6  # angles are float32
