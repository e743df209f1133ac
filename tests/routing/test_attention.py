"""Routed attention."""

import torch

from ring_attention_pytorch import routing
from tests.support import routing_reference
from tests.support.reference import relative_error
from tests.support.routing_cases import DIM, HEADS

# --- the edges ---


def test_with_all_tokens_routed_and_one_window_heavy_attention_is_dense() -> None:
    module = routing.ConditionalRoutedAttention(
        DIM, num_heavy_tokens_q=50, num_heavy_tokens_kv=50, has_light_attn=False, **HEADS
    ).double()
    x = torch.randn(2, 9, DIM, dtype=torch.float64)
    everything = [dict.fromkeys(range(9), torch.ones((), dtype=torch.float64))]
    want = torch.stack([
        torch.stack([
            routing_reference.heavy(module.heavy_attn, t, t, i, everything) for i in range(9)
        ])
        for t in x
    ])  # fmt: skip
    assert relative_error(module(x), want) < 1e-12
