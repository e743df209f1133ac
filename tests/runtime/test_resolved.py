"""Tensors whose memory does not hold their values are made into such as do."""

import torch

from ring_attention_pytorch.runtime.resolved import resolved
from tests.support.lazy import LAZY


def test_plain_tensors_are_themselves():
    t = torch.randn(3, 4, requires_grad=True)
    view = t.T[::2]
    for one in (None, t, view, t.detach()):
        assert resolved(one) is one


def test_memory_holds_what_is_meant():
    z = torch.randn(5, dtype=torch.complex128)
    imag = z.conj().imag
    got = resolved(imag)
    assert imag.is_neg()
    assert not got.is_neg()
    assert torch.equal(got, -z.imag)


def test_it_is_differentiable():
    z = torch.randn(5, dtype=torch.complex128, requires_grad=True)
    weights = torch.randn(5, dtype=torch.float64)
    (got,) = torch.autograd.grad((resolved(z.conj().imag) * weights).sum(), z)
    (want,) = torch.autograd.grad((-z.imag * weights).sum(), z)
    assert torch.equal(got, want)


def test_every_kind_of_lazy_tensor_is_resolved():
    t = torch.randn(2, 3, 1, 4)
    for kind, make in LAZY.items():
        lazy = make(t)
        got = resolved(lazy)
        assert type(got) is torch.Tensor, kind
        assert not got.is_neg(), kind
