"""The function `tree_attn_decode` at its path of 0.5.20."""

from ring_attention_pytorch.decoding import tree_attn_decode

__all__ = ["tree_attn_decode"]
