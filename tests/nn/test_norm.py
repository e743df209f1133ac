"""RMSNorm: tokens of length sqrt(dim), whatever their length was."""

import pytest
import torch

from ring_attention_pytorch.nn.norm import RMSNorm
from tests.support.reference import relative_error


def test_tokens_get_the_length_sqrt_dim_times_gamma() -> None:
    norm, x = RMSNorm(7).double(), torch.randn(2, 5, 7, dtype=torch.float64)
    x[0, 1] *= 1e6
    out = norm(x)
    assert relative_error(out.norm(dim=-1), torch.full((2, 5), 7.0).double().sqrt()) < 1e-14
    assert relative_error(out, x / x.norm(dim=-1, keepdim=True) * 7**0.5) < 1e-14
    with torch.no_grad():
        norm.gamma.copy_(torch.arange(7))
    assert relative_error(norm(x), out * torch.arange(7)) < 1e-14


def test_gradients_are_those_of_finite_differences_and_across_tokens() -> None:
    norm, x = RMSNorm(4).double(), torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(norm, x)
    (grad,) = torch.autograd.grad(norm(x).sin().sum(), x)
    assert (grad * x).sum(-1).abs().max() < 1e-14  # its length changes nothing


def test_a_token_of_zeros_is_zeros() -> None:
    assert not RMSNorm(4)(torch.zeros(1, 4)).any()


def test_with_eps_a_token_near_0_stays_short_and_so_does_its_gradient() -> None:
    x = torch.randn(3, 4, dtype=torch.float64) * torch.tensor([[1.0], [1e-3], [1e-9]])
    x.requires_grad_()
    norm = RMSNorm(4, eps=1e-6).double()
    want = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert relative_error(norm(x), want) < 1e-14
    assert torch.autograd.gradcheck(norm, x)
    (grad,) = torch.autograd.grad(norm(x).sum(), x)
    assert grad.abs().max() < 1e4
    for eps in (-1e-6, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="eps must be from 0 and finite"):
            RMSNorm(4, eps=eps)


def test_a_size_that_can_not_be_is_refused() -> None:
    with pytest.raises(ValueError, match="dim must be at least 1, got 0"):
        RMSNorm(0)
