"""The kernels that follow maps, through Triton's interpreter, against plain PyTorch."""

import pytest
import torch

from ring_attention_pytorch.recurrent import levels
from ring_attention_pytorch.recurrent.levels import Levels, followed, kernel_fits
from tests.support.interpreter import needs_triton
from tests.support.reference import relative_error


def follows_maps(d_k: int, d_v: int) -> list[float]:
    """Relative errors of states, gradients and second derivatives, with a map that none follows."""
    draw = torch.Generator().manual_seed(0)
    way = Levels.of([[2], [4, 5, 3], [], [0]], torch.device("cpu"))
    both = torch.randn(6, 2, d_k, d_v + d_k, generator=draw) / d_k**0.5
    first = torch.randn(4, 2, d_k, d_v, generator=draw)
    drawn = both[..., d_v:], both[..., :d_v], first  # as maps travel: views of one tensor
    found = []
    for kernel, dtype in ((False, torch.float64), (True, torch.float32)):
        levels.kernel_fits = lambda m, u, kernel=kernel: kernel
        own = [t.to(dtype).detach().requires_grad_() for t in drawn]
        states = followed(*own, way)
        grads = torch.autograd.grad(states.square().sum(), own, create_graph=True)
        plain = torch.autograd.grad(followed(*own, way).square().sum(), own)
        second = torch.autograd.grad(sum(t.square().sum() for t in grads), own)
        found.append([t.detach() for t in (states, *grads, *plain, *second)])
    return [relative_error(ours, want) for want, ours in zip(*found)]


@needs_triton
@pytest.mark.parametrize(("d_k", "d_v"), [(16, 40), (12, 8)])
def test_the_kernel_follows_maps_forward_and_back(interpreted, d_k, d_v) -> None:
    assert max(interpreted.submit(follows_maps, d_k, d_v).result()) < 1e-5


def test_where_the_kernel_fits() -> None:
    u = torch.zeros(1, 1, 4, 4)
    assert not kernel_fits(u, u)  # on the CPU
