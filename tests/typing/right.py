"""Code that users write, and that mypy and pyright must accept."""

from typing import Any, assert_type

import torch
from torch import Tensor

from ring_attention_pytorch import (
    ConditionalRoutedAttention,
    RingAttention,
    RingPlan,
    RingTransformer,
    balanced,
    positions,
    ring_attn,
    ring_flash_attn,
    shard_sequence,
    ulysses_attn,
    unshard_sequence,
)

q, k = torch.randn(1, 8, 4, 8), torch.randn(1, 8, 2, 8)

out = ring_attn(q, k, k, causal=True, layout="zigzag", kernel="sdpa", transport="ring")
assert_type(out, Tensor)
flat: Tensor = ring_attn(q, k, k, window=3).flatten(2)
assert_type(ring_attn(q, k, k, return_lse=True, softclamp=30), tuple[Tensor, Tensor])
assert_type(ring_attn(q, k, k, kernel="triton+flash-attn"), Tensor)
assert_type(ring_attn(q, k, k, heads_first=True, return_lse=False), Tensor)
assert_type(ulysses_attn(q, k, k, causal=True), Tensor)
assert_type(ulysses_attn(q, k, k, return_lse=True), tuple[Tensor, Tensor])

plan = RingPlan.make(q, k, k, causal=True, layout="striped", dropout=0.1, dropout_seed=3)
assert_type(plan, RingPlan)
assert_type(ring_attn(q, k, k, plan=plan.for_layer(2)), Tensor)
assert_type(plan.positions(), Tensor)
dealt = balanced([0, 3, 8], 2)
ring_attn(q, k, k, cu_seqlens=[0, 3, 8], layout=dealt)

attn = RingAttention(32, dim_head=8, heads=4, causal=True, layout="zigzag", ring_attn=True)
assert_type(attn.plan(torch.randn(1, 8, 32)), RingPlan | Any)
model = RingTransformer(num_tokens=256, dim=16, depth=2, kernel="eager")
plans: tuple[RingPlan, ...] = model.plans(torch.zeros(1, 8, dtype=torch.long))
x: Tensor = shard_sequence(torch.arange(4), dim=0)
whole: Tensor = unshard_sequence(x, length=4, dim=0)
at: Tensor = positions("zigzag", rank=0, ring_size=2, length=8)

assert_type(ring_flash_attn(q, k, k, causal=True), Tensor)
assert_type(attn.heads, int)
ConditionalRoutedAttention(16, num_heavy_tokens_q=4, num_heavy_tokens_kv=0.5, layout=None)
