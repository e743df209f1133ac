"""The function for CUDA: what it needs, and which kernel runs backward."""

import sys

import pytest
import torch

from ring_attention_pytorch import ring_flash_attn_cuda, ring_flash_attn_cuda_


def test_the_function_for_cuda_says_what_it_needs(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    q = torch.randn(1, 6, 2, 8)
    with pytest.raises(ValueError, match=r"kernel='triton' runs on CUDA, the tensors are on cpu"):
        ring_flash_attn_cuda(q, q, q, causal=True)
    assert ring_flash_attn_cuda_ is ring_flash_attn_cuda


def test_the_function_for_cuda_takes_flash_attn_s_backward_where_it_can(monkeypatch):
    module = sys.modules[ring_flash_attn_cuda.__module__]
    asked = []
    monkeypatch.setattr(
        module, "ring_flash_attn", lambda *a, **k: asked.append(k["kernel"]) or a[0]
    )
    q = torch.randn(1, 6, 2, 8)
    for able, want in ((True, "triton+flash-attn"), (False, "triton")):
        monkeypatch.setattr(module, "refusal", lambda *a, able=able: None if able else "no")
        ring_flash_attn_cuda(q, q, q)
        assert asked.pop() == want
