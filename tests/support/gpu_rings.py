"""Rings of GPUs: their plans, cases and limits of errors."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attention_pytorch import RingPlan
from ring_attention_pytorch.comm import transports
from ring_attention_pytorch.kernels import refusal
from ring_attention_pytorch.plan import plan_cache
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime.interfaces import KernelRequest
from tests.support import threads
from tests.support.reference import dense_attention

BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1.5e-2}
WAYS = [
    dict(transport="ring"), dict(transport="gather"), dict(transport="gather", memory=0),
    dict(transport="gather", apart=True), dict(transport="gather", apart=True, memory=0),
    dict(transport="gather", soon=True),
    dict(transport="ring", ulysses=2), dict(transport="gather", ulysses=2),
    dict(transport="ring", ulysses=2, apart=True), dict(),
    dict(transport="gather", side_stream=True), dict(transport="gather", side_stream=False),
]  # fmt: skip
FEW = [
    dict(transport="gather", ulysses=ulysses, few=True, own_apart=own_apart)
    for ulysses in (1, 2) for own_apart in (False, True)
]  # fmt: skip


PARTS = "few", "ways", "checks", "kernels", "surroundings"


def whole(length: int, batch: int, dtype: torch.dtype, key_heads: int = 2) -> list[Tensor]:
    """q, k, v and the cotangent, the same on every rank, as the dtype holds them."""
    draw = torch.Generator().manual_seed(length)
    shapes = [(batch, length, h, 64) for h in (8, key_heads, key_heads, 8)]
    return [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]


def wanted(tensors: list[Tensor], dout: Tensor, **options: object) -> list[Tensor]:
    """out, dq, dk and dv of the whole, by dense attention in float64."""
    device = torch.cuda.current_device()
    exact = [t.to(device).double().requires_grad_() for t in tensors]
    with torch.device(device):
        out, _ = dense_attention(*exact, **options)
    return [out, *torch.autograd.grad(out, exact, dout.to(device).double())]


def plan_for(
    *tensors: Tensor,
    apart: bool = False,
    soon: bool = False,
    side_stream: bool | None = None,
    few: bool = False,
    own_apart: bool = False,
    **options: object,
) -> RingPlan:
    """A plan; apart as for GPUs that share no memory, which send point to point; soon as if keys
    came before own keys are computed on, which takes more tokens; gradients come aside by copy
    engine, or not, whatever hides them; as for few tokens, which come together, or many."""
    plan_cache.forget()  # what is patched here is no part of what a plan is found again by
    without = mock.patch.object(Ring, "shared", return_value=None)
    in_time = mock.patch.object(transports, "keys_arrive_late", return_value=False)
    coming = mock.patch.object(transports, "reduce_by_copy_engine", return_value=side_stream)
    with (
        without if apart else nullcontext(),
        in_time if soon else nullcontext(),
        mock.patch.object(transports, "is_few", return_value=few),
        mock.patch.object(transports, "own_keys_apart", return_value=own_apart),
        nullcontext() if side_stream is None else coming,
    ):
        return RingPlan.make(*tensors, **options)


def able_of(kernels: list[str]) -> list[str]:
    """List the kernels that can compute here now; to be deterministic is a request, too."""
    like = torch.empty(1, 0, 1, 64, device=torch.cuda.current_device(), dtype=torch.bfloat16)
    return [name for name in kernels if refusal(name, KernelRequest.of(like, like)) is None]


def in_threads(size: int, rank_main: Callable[[Ring], Any]) -> list[Any]:
    """Run each rank of a ring in a thread; they share a GPU, and each goes backward by itself."""

    def main(ring: Ring) -> Any:
        with torch.autograd.set_multithreading_enabled(False):
            return rank_main(ring)

    return threads.run(size, main)[0]


def say(*what: object) -> None:
    if dist.get_rank() == 0:
        print(*what, flush=True)
