"""Routing on a CUDA device: what the CPU gives, for a million scores and whole blocks."""

import pytest
import torch

from ring_attention_pytorch import (
    ConditionalRoutedTransformerBlock,
    coordinate_descent,
    soft_topk,
)
from tests.support.reference import relative_error

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
MILLION = 2**20


def scores(n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(2, n) * 3).to(dtype)


@pytest.mark.parametrize("n", [1, 1000, MILLION])
@pytest.mark.parametrize("masked", [False, True])
def test_triton_descends_as_pytorch_does(n: int, masked: bool) -> None:
    s = scores(n).cuda().requires_grad_()
    mask = torch.rand(2, n, device="cuda") < 0.7 if masked else None
    dout, found = torch.randn_like(s), []
    options = dict(n_iters=30, k=max(1, n // 16), eps=0.05, eps_init=4.0, eps_decay=0.8, mask=mask)
    for use_triton in (False, True):
        p = coordinate_descent(s, use_triton=use_triton, **options)
        found.append((p.detach(), torch.autograd.grad(p, s, dout)[0]))
    assert all((a - b).abs().max() < 1e-5 for a, b in zip(*found))


def test_a_million_scores_are_gated_as_on_the_cpu() -> None:
    s, found = scores(MILLION, torch.float64), []
    dout = torch.randn_like(s)
    for device in ("cpu", "cuda"):
        mine = s.to(device).requires_grad_()
        p = soft_topk(mine, 1 / 16, eps=0.3)
        found.append((p.detach().cpu(), torch.autograd.grad(p, mine, dout.to(device))[0].cpu()))
    assert all(relative_error(a, b) < 1e-9 for a, b in zip(*found))


@pytest.mark.parametrize("causal", [False, True])
def test_a_block_gives_what_it_gives_on_the_cpu(causal: bool) -> None:
    block = ConditionalRoutedTransformerBlock(
        64, num_heavy_attn_tokens_q=9, num_heavy_attn_tokens_kv=9, num_heavy_ff_tokens=9,
        light_window_size=32, light_heads=2, light_dim_head=32, heavy_heads=2, heavy_dim_head=32,
        causal=causal,
    ).double()  # fmt: skip
    x, found = torch.randn(2, 201, 64, dtype=torch.float64), []
    dout = torch.randn_like(x)
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32)):
        block = block.to(device, dtype)
        mine = x.to(device, dtype).requires_grad_()
        out = block(mine)
        grads = torch.autograd.grad(out, [mine, *block.parameters()], dout.to(out))
        found.append([t.detach().cpu().double() for t in (out, *grads)])
    assert all(relative_error(b, a) < 1e-4 for a, b in zip(*found))
