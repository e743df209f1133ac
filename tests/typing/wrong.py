"""Mistakes that mypy and pyright must find: in each line that says so, and in no other."""

import torch

from ring_attention_pytorch import (
    ConditionalRoutedAttention,
    RingAttention,
    RingCache,
    RingPlan,
    RingTransformer,
    ring_attn,
    ring_attn_with_cache,
    ring_flash_attn,
    shard_batch,
    ulysses_attn,
)
from ring_attention_pytorch.integrations.transformers import ring_forward

q = torch.randn(1, 8, 4, 8)

ring_attn(q, q, q, return_lse=True).flatten(2)  # wrong
ring_attn(q, q, q, layout="zig-zag")  # wrong
ring_attn(q, q, q, kernel="tritn")  # wrong
ring_attn(q, q, q, transport="gathr")  # wrong
ring_attn(q, q, q, windw=3)  # wrong
ring_attn(q, q, q, causal="yes")  # wrong
ring_attn(q, q)  # wrong
ulysses_attn(q, q, q, ulysses=2, casual=True)  # wrong
ulysses_attn(q, q, q, layout="stripes")  # wrong
RingPlan.make(q, q, q, causal=True, layout="zag")  # wrong
RingPlan.make(q, q, q, memry=3)  # wrong
RingPlan.make(q, q, q).position()  # wrong
ring_forward(shard_batch({}), kernle="sdpa")  # wrong
ring_forward(shard_batch({}), transport="gathr")  # wrong
RingAttention(32, layout="zigzg")  # wrong
RingAttention(32, transport="rings")  # wrong
RingTransformer(num_tokens=9, dim=16, depth=2, kernel="flex2")  # wrong
ring_flash_attn(q, q, q, kernel="tritton")  # wrong
ring_flash_attn(q, q, q, causal="no")  # wrong
ring_attn_with_cache(q, q, q, RingCache(1, 2, 8), layout="zag")  # wrong
ConditionalRoutedAttention(9, num_heavy_tokens_q=4, num_heavy_tokens_kv=4, layout="zg")  # wrong
