"""The module of ring-attention-pytorch 0.5.20 of that name; see `original`."""

from types import SimpleNamespace

from ring_attention_pytorch.ring_flash_attention import ring_flash_attn_cuda, ring_flash_attn_cuda_

RingFlashAttentionCUDAFunction = SimpleNamespace(apply=ring_flash_attn_cuda)

__all__ = ["RingFlashAttentionCUDAFunction", "ring_flash_attn_cuda", "ring_flash_attn_cuda_"]
