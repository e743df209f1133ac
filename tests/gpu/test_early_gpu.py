"""Kernels begin early: keys are there when they are read, gradients when a call has ended."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ring_attention_pytorch import RingPlan, ring_attn
from ring_attention_pytorch.comm.gather_serial import SerialGather

SIZE, TOKENS, LATE = 2, 256, 20_000_000  # cycles: some 10 ms, thousands of times what dq takes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


def of_new_keys() -> tuple[bool, float]:
    """Tell whether forward began early, and the worst error where all keys change each time."""
    rank, device = dist.get_rank(), torch.device("cuda", torch.cuda.current_device())
    draw, worst = torch.Generator(device).manual_seed(rank), 0.0
    shapes = (8, 2, 2)
    drawn = [torch.randn(1, 2048, h, 64, device=device, generator=draw).bfloat16() for h in shapes]
    plan = RingPlan.make(*drawn, causal=True, layout="zigzag", kernel="triton", transport="gather")
    in_turn = replace(plan, transport=plan.transport.in_turn())
    for _ in range(6):
        for t in drawn:
            t.normal_(generator=draw)
        out, want = (ring_attn(*drawn, plan=each).float() for each in (plan, in_turn))
        worst = max(worst, float((out - want).norm() / want.norm()))
    return plan.transport.early, worst


def test_keys_have_come_when_they_are_read(nccl):
    for early, error in nccl(SIZE).run(of_new_keys):
        assert early
        assert error < 5e-3


def of_a_late_rank(late: int) -> tuple[bool, bool]:
    """Tell whether gradients are those of ranks that are in time, and whether they came beside."""
    rank, device = dist.get_rank(), torch.device("cuda", torch.cuda.current_device())
    draw = torch.Generator(device).manual_seed(rank)
    q, dout = (torch.randn(1, TOKENS, 8, 64, device=device, generator=draw) for _ in range(2))
    q, dout = q.bfloat16(), dout.bfloat16()
    mine = [t.clone().requires_grad_() for t in (q, q[:, :, :2], q[:, :, :2])]
    plan = RingPlan.make(*mine, causal=True, layout="zigzag", kernel="triton", transport="gather")
    assert isinstance(plan.transport, SerialGather)

    def slow(*given: Any) -> None:
        if rank == late:
            torch.cuda._sleep(LATE)
        plan.kernel.backward(*given)

    def gradients(plan: RingPlan) -> list[Tensor]:
        grads = torch.autograd.grad(ring_attn(*mine, plan=plan), mine, dout)
        return [grad.clone() for grad in grads]  # at once, on the same stream

    want = gradients(plan)
    kernel = plan.kernel._replace(backward=slow)
    for _ in range(3):
        got = gradients(replace(plan, kernel=kernel))
        if not all(map(torch.equal, got, want)):
            return False, plan.transport.beside
    return True, plan.transport.beside


@pytest.mark.parametrize("late", range(SIZE))
def test_all_gradients_are_there_when_a_call_ends(late, nccl):
    assert nccl(SIZE).run(of_a_late_rank, late) == [(True, True)] * SIZE
