"""Attention in parts on CUDA devices: merges, shared keys, and positions in steps."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ring_attention_pytorch import merge_attention, ring_attn
from ring_attention_pytorch.geometry.layouts import positions
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.ranks.ring import Ring
from tests.support.ranks import gpu_ranks
from tests.support.reference import dense_attention, excess, relative_error

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
B, N, H, G, D, S = 2, 320, 8, 2, 64, 37


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw).to("cuda", dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("number", "d"), [(1, 64), (2, 128), (3, 80), (4, 256), (9, 24)])
def test_merges_are_those_of_plain_pytorch(number: int, d: int, dtype: torch.dtype) -> None:
    outs = drawn(*[(B, N, H, d)] * number, dtype=dtype)
    outs[0] = outs[0].transpose(1, 2).contiguous().transpose(1, 2)
    lses = [5 * t for t in drawn(*[(B, H, N)] * number)]
    lses[-1][:, 1], outs[-1][:, :, 1] = -torch.inf, torch.nan
    sinks, dout, dlse = *drawn((H,)), *drawn((B, N, H, d), dtype=dtype), *drawn((B, H, N))
    found = []
    for wide in (False, True):
        leaves = [t.double() if wide else t for t in (*outs, *lses, sinks)]
        leaves = [t.detach().requires_grad_() for t in leaves]
        parts = [t for pair in zip(leaves[:number], leaves[number:-1]) for t in pair]
        both = merge_attention(*parts, sinks=leaves[-1])
        along = dout.to(both[0].dtype), dlse.to(both[1].dtype)
        found.append([*both, *torch.autograd.grad(both, leaves, along)])
    for got, want in zip(*found):
        assert relative_error(got, want) < 16 * torch.finfo(got.dtype).eps


def test_merging_can_be_differentiated_twice() -> None:
    leaves = [t.requires_grad_() for t in drawn((1, 2, 2, 8), (1, 2, 2), (1, 2, 2, 8), (1, 2, 2))]
    found = []
    for dtype in (torch.float32, torch.float64):
        given = [t.to(dtype) for t in leaves]
        out, lse = merge_attention(*given)
        grads = torch.autograd.grad(out.sin().sum() + lse.cos().sum(), leaves, create_graph=True)
        total = sum((g.square().sum() for g in grads), torch.zeros((), device="cuda"))
        found.append(torch.autograd.grad(total, leaves))
    for got, want in zip(*found):
        assert relative_error(got, want) < 1e-4


# --- shared keys ---


def shared(
    ring: Ring, kernel: str | None, transport: str | None, ulysses: int, causal: bool = True
) -> dict[str, str]:
    """List one rank's results that are worse than their dtype allows."""
    whole = [t.cpu() for t in drawn((B, N, H, D), *[(B, N, G, D)] * 2, *[(B, S, G, D)] * 2)]
    dout = drawn((B, N, H, D))[0].cpu()
    mask = torch.arange(S) < torch.tensor([[S], [S if kernel == "sdpa-cudnn" else 9]])
    beside = torch.cat((torch.ones(B, N) > 0, mask), 1)
    at_keys = torch.cat((torch.arange(N), torch.full((S,), -1)))
    answers = []
    for dtype in (torch.float64, torch.bfloat16):
        leaves = [t.bfloat16().to(dtype).requires_grad_() for t in whole]
        q, *kv = leaves
        keys, values = torch.cat((kv[0], kv[2]), 1), torch.cat((kv[1], kv[3]), 1)
        how: dict[str, Any] = dict(causal=causal, positions=(torch.arange(N), at_keys))
        out, _ = dense_attention(q, keys, values, key_mask=beside, **how)
        grads = torch.autograd.grad(out, leaves, dout.bfloat16().to(dtype))
        answers.append([out.detach(), *grads])
    at = positions("zigzag", rank=ring.rank, ring_size=ring.size, length=N)
    own = [t[:, at] for t in whole[:3]] + whole[3:]
    leaves = [t.to("cuda", torch.bfloat16).requires_grad_() for t in own]
    out = ring_attn(
        *leaves[:3], shared_keys=(leaves[3], leaves[4]), causal=causal,
        shared_key_mask=None if mask.all() else mask.cuda(),
        layout="zigzag", group=ring, kernel=kernel, transport=transport, ulysses=ulysses,
    )  # fmt: skip
    grads = torch.autograd.grad(out, leaves, dout[:, at].to("cuda", torch.bfloat16))
    for grad in grads[3:]:
        everyones = [torch.empty_like(grad) for _ in range(ring.size)]
        if ring.size > 1:
            dist.all_gather(everyones, grad)
            assert all(torch.equal(grad, other) for other in everyones)
    held = [[t[:, at] for t in each[:4]] + each[4:] for each in answers]
    said = map(excess, (t.cpu() for t in (out, *grads)), *held, (3, 3, 3, 3, 3, 3))
    names = ("out", "dq", "dk", "dv", "dk shared", "dv shared")
    return {name: why for name, why in zip(names, said) if why is not None}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kernel", [None, "triton", "eager", "sdpa-cudnn"])
def test_shared_keys_on_one_gpu(kernel: str | None, causal: bool) -> None:
    if kernel == "sdpa-cudnn" and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("cuDNN's kernel is for Hopper and later")
    assert not shared(Ring.alone(), kernel, None, 1, causal)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kernel", ["sdpa-cudnn", "sdpa-flash", "triton"])
def test_parts_of_kernels_that_know_no_gradient_of_lse(kernel: str, dtype: torch.dtype) -> None:
    if kernel == "sdpa-cudnn" and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("cuDNN's kernel is for Hopper and later")
    leaves = [t.to(dtype) for t in drawn((B, N, H, D), *[(B, N, G, D)] * 2)]
    dout, dlse = drawn((B, N, H, D))[0].to(dtype), drawn((B, H, N))[0]
    dout[:, ::3] = 0  # of which lse alone has a gradient
    found = []
    for wide in (False, True):
        q, k, v = given = [(t.double() if wide else t).detach().requires_grad_() for t in leaves]
        how: dict[str, Any] = dict(kernel="eager" if wide else kernel, group=Ring.alone())
        parts: list[Tensor] = []
        for part in (slice(100), slice(100, N)):
            parts += ring_attn(q, k[:, part], v[:, part], cross=True, return_lse=True, **how)
        both = merge_attention(*parts)
        grads = torch.autograd.grad(both, given, (dout.to(both[0]), dlse.to(both[1])))
        found.append([*both, *grads])
    for got, want in zip(*found):
        assert relative_error(got, want) < 4 * torch.finfo(dtype).eps


def shared_over_all(kernel: str | None, transport: str | None, ulysses: int) -> dict[str, str]:
    return shared(Ring(), kernel, transport, ulysses)


@pytest.mark.parametrize("transport", ["ring", "gather"])
@pytest.mark.parametrize("ulysses", [1, 2])
def test_shared_keys_over_nccl(nccl, transport: str, ulysses: int) -> None:
    assert not any(nccl(gpu_ranks()).run(shared_over_all, None, transport, ulysses))


# --- steps ---


@pytest.mark.parametrize("kernel", [None, "triton"])
@pytest.mark.parametrize("step", [3, 32, 100])
def test_positions_in_steps(step: int, kernel: str | None) -> None:
    first = torch.arange(N) // step * step
    at = torch.cat((first - 1, first + step - 1)), torch.arange(N)
    q, k, v, dout = drawn((B, 2 * N, H, D), *[(B, N, G, D)] * 2, (B, 2 * N, H, D))
    answers = []
    for dtype in (torch.float64, torch.bfloat16):
        leaves = [t.cpu().bfloat16().to(dtype).requires_grad_() for t in (q, k, v)]
        out, _ = dense_attention(*leaves, causal=True, positions=at)
        grads = torch.autograd.grad(out, leaves, dout.cpu().bfloat16().to(dtype))
        answers.append([out.detach(), *grads])
    leaves = [t.bfloat16().requires_grad_() for t in (q, k, v)]
    how: dict[str, Any] = dict(zip(("query_positions", "key_positions"), at), causal=True)
    plan = RingPlan.make(*leaves, cross=True, kernel=kernel, group=Ring.alone(), **how)
    out = ring_attn(*leaves, plan=plan)
    grads = torch.autograd.grad(out, leaves, dout.bfloat16())
    said = map(excess, (t.cpu() for t in (out, *grads)), *answers, (2, 3, 3, 3))
    assert not [why for why in said if why is not None]
