"""Derivatives that attention to encoded keys has, and those that it says it has not."""

import pytest
import torch

from ring_attention_pytorch.latent import mla_ring_attn
from tests.support.latent_cases import Case


def given() -> list[torch.Tensor]:
    case = Case(1)
    return [case.tensors()[name].requires_grad_() for name in case.names]


def test_second_derivatives_and_forward_mode_are_refused():
    args = given()
    out = mla_ring_attn(*args)
    with pytest.raises(NotImplementedError, match="can't be differentiated twice"):
        torch.autograd.grad(out.square().sum(), args, create_graph=True)
    with pytest.raises(NotImplementedError, match="no forward mode"):
        torch.func.jvp(lambda q: mla_ring_attn(q, *args[1:]), (args[0],), (args[0],))


def test_only_what_needs_a_gradient_gets_one():
    args = [t.detach() for t in given()]
    assert not mla_ring_attn(*args).requires_grad
    args[4].requires_grad_()
    out = mla_ring_attn(*args)
    (grad,) = torch.autograd.grad(out.sum(), args[4:])
    assert grad.shape == args[4].shape
    with torch.no_grad():
        assert torch.equal(mla_ring_attn(*args), out)
