"""A routed block."""

import pytest
import torch

from ring_attention_pytorch import routing
from tests.support.reference import relative_error
from tests.support.routing_cases import Case


@pytest.mark.parametrize("causal", [False, True])
def test_an_unknown_option_of_a_block_is_named(causal: bool) -> None:
    numbers = dict(num_heavy_attn_tokens_q=1, num_heavy_attn_tokens_kv=1, num_heavy_ff_tokens=1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'lite_heads'"):
        routing.ConditionalRoutedTransformerBlock(8, causal=causal, lite_heads=2, **numbers)


@pytest.mark.parametrize("name", ["block", "causal block"])
def test_a_block_is_attention_and_a_feed_forward_with_residuals(name: str) -> None:
    """Which get the mask, each, as if they were called alone."""
    case = Case(name)
    block, data = case.make(), case.data()
    attended = data["x"] + block.conditional_attn(data["x"], mask=data["mask"])
    want = attended + block.conditional_ff(attended, data["mask"])
    assert relative_error(block(data["x"], data["mask"]), want) < 1e-14


def test_windows_are_of_causal_blocks_and_both_parts_have_the_same() -> None:
    numbers = dict(num_heavy_attn_tokens_q=1, num_heavy_attn_tokens_kv=1, num_heavy_ff_tokens=1)
    with pytest.raises(ValueError, match="heavy_window_size is of a causal block"):
        routing.ConditionalRoutedTransformerBlock(8, heavy_window_size=4, **numbers)
    for size in (None, 4):
        block = routing.ConditionalRoutedTransformerBlock(
            8, causal=True, light_window_size=6, heavy_window_size=size, **numbers
        )
        x = torch.randn(1, 17, 8)
        assert block.conditional_attn.window == (size or 6)
        assert block(x).shape == x.shape
