"""Attention whose keys travel in fewer bytes: latents, and keys that are values."""

from ring_attention_pytorch.latent.attention import (
    mla_plan,
    mla_ring_attn,
    tied_plan,
    tied_ring_attn,
)
from ring_attention_pytorch.latent.decoding import mla_attn_with_cache

__all__ = [
    "mla_attn_with_cache",
    "mla_plan",
    "mla_ring_attn",
    "tied_plan",
    "tied_ring_attn",
]
