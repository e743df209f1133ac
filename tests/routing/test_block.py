"""A routed block."""

import pytest

from ring_attention_pytorch import routing


@pytest.mark.parametrize("causal", [False, True])
def test_an_unknown_option_of_a_block_is_named(causal: bool) -> None:
    numbers = dict(num_heavy_attn_tokens_q=1, num_heavy_attn_tokens_kv=1, num_heavy_ff_tokens=1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'lite_heads'"):
        routing.ConditionalRoutedTransformerBlock(8, causal=causal, lite_heads=2, **numbers)
