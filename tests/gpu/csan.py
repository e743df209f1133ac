"""Each transport forward and backward under PyTorch's CUDA sanitizer: do streams race one another?

    TORCH_CUDA_SANITIZER=1 torchrun --nproc-per-node 2 -m tests.gpu.csan

The sanitizer sees PyTorch's operators, the memory that its allocator gives, events and waits. It
knows nothing of Triton kernels, of NCCL's streams, nor of what other GPUs read and write in
symmetric memory. So attention is by PyTorch's own operators here, and what GPUs share is tested by
`tests.gpu.test_transports_gpu`, with streams that are late. A race is planted first, and must be
found.
"""

import os

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ring_attention_pytorch import ring_attn
from tests.support.gpu_rings import BOUNDS, FEW, WAYS, able_of, plan_for, say, wanted, whole
from tests.support.reference import relative_error
from tests.support.torchrun import join_ranks

LENGTH = 512


def a_race_is_found() -> None:
    from torch.cuda._sanitizer import CUDASanitizerErrors

    x = torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    with pytest.raises(CUDASanitizerErrors):
        race(x)
    torch.cuda.synchronize()


def race(x: Tensor) -> None:
    """Write the same memory on two streams, of which none waits for the other."""
    for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            x.add_(1)


def worst_error(kernel: str, how: dict) -> float:
    """Return this rank's worst error of two calls, forward and backward; the second is recorded."""
    rank, size, device = dist.get_rank(), dist.get_world_size(), torch.cuda.current_device()
    *given, dout = whole(LENGTH, 1, torch.bfloat16)
    n = LENGTH // size
    at = slice(rank * n, (rank + 1) * n)
    wants = wanted(given, dout, causal=True)
    mine = [t[:, at].to(device).requires_grad_() for t in given]
    plan = plan_for(*mine, causal=True, layout="contiguous", kernel=kernel, **how)
    errors = []
    for _ in range(2):
        out = ring_attn(*mine, plan=plan)
        got = [out.detach(), *torch.autograd.grad(out, mine, dout[:, at].to(device))]
        errors += [relative_error(g, w[:, at]) for g, w in zip(got, wants)]
    return max(errors)


def main() -> None:
    if "TORCH_CUDA_SANITIZER" not in os.environ:
        raise SystemExit("set TORCH_CUDA_SANITIZER=1: PyTorch reads it when it is imported")
    join_ranks()
    a_race_is_found()
    say("the planted race is found")
    for kernel in ("eager", *able_of(["sdpa-flash"])):
        for how in WAYS + FEW:
            error = worst_error(kernel, how)
            assert error < BOUNDS[torch.bfloat16], (kernel, how, error)
            say(kernel, how, f"{error:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
