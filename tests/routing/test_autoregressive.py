"""Causal routed attention."""

import pytest

from ring_attention_pytorch import routing


def test_causal_attention_always_has_a_light_branch() -> None:
    numbers = dict(num_heavy_tokens_q=1, num_heavy_tokens_kv=1)
    with pytest.raises(TypeError, match="'has_light_attn'"):
        routing.ConditionalRoutedAutoregressiveAttention(8, has_light_attn=False, **numbers)
    with pytest.raises(ValueError, match="heavy_window_size must be at least 1, got 0"):
        routing.ConditionalRoutedAutoregressiveAttention(8, heavy_window_size=0, **numbers)
