"""`tree_attn_decode` under its path of 0.5.20."""

from ring_attention_pytorch.decoding import tree_attn_decode

__all__ = ["tree_attn_decode"]
