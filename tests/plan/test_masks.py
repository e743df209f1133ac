"""Masks of a plan: copied, so that the caller may use their memory again."""

import torch

from ring_attention_pytorch import ring_attn
from tests.support.reference import dense_attention, relative_error


def test_a_key_mask_may_be_reused_before_backward() -> None:
    q = torch.randn(1, 6, 2, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, True, False, True, True, False]])
    (want,) = torch.autograd.grad(dense_attention(q, q, q, key_mask=mask)[0].sum(), q)
    out = ring_attn(q, q, q, key_mask=mask)
    mask.fill_(True)
    (got,) = torch.autograd.grad(out.sum(), q)
    assert relative_error(got, want) < 1e-12
