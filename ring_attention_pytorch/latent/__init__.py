"""Attention whose keys travel in fewer bytes: latents, keys that are values, and 8 bits."""

from ring_attention_pytorch.latent.attention import (
    mla_plan,
    mla_ring_attn,
    tied_plan,
    tied_ring_attn,
)
from ring_attention_pytorch.latent.decoding import mla_attn_with_cache
from ring_attention_pytorch.latent.rounded import rounded_plan, rounded_ring_attn

__all__ = [
    "mla_attn_with_cache",
    "mla_plan",
    "mla_ring_attn",
    "rounded_plan",
    "rounded_ring_attn",
    "tied_plan",
    "tied_ring_attn",
]
