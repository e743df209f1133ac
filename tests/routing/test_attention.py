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


def test_autocast_takes_nothing_from_the_null_key() -> None:
    module = routing.ConditionalRoutedAttention(
        DIM, num_heavy_tokens_q=4, num_heavy_tokens_kv=4, has_light_attn=False, **HEADS
    )
    heavy = module.heavy_attn
    q, out = torch.randn(2, 2, 5, heavy.heads, heavy.dim_head)
    lse, found = torch.randn(2, heavy.heads, 5), []
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found.append(heavy.with_null(q, out, lse))
    assert torch.equal(*found)
