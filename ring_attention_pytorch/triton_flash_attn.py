"""The module of ring-attention-pytorch 0.5.20 of that name; see `original`."""

from ring_attention_pytorch.original.flash import flash_attn_backward, flash_attn_forward

__all__ = ["flash_attn_backward", "flash_attn_forward"]
