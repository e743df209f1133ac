"""Kernels begin early: keys are there when they are read, gradients when a call has ended."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ring_attention_pytorch import RingPlan, ring_attn
from ring_attention_pytorch.comm.gather_serial import SerialGather
from ring_attention_pytorch.geometry.tiles import Tile
from ring_attention_pytorch.kernels import triton
from ring_attention_pytorch.runtime.accumulate import OutputAccumulator
from ring_attention_pytorch.runtime.interfaces import KVBlock, ScoreMods, Tiles
from ring_attention_pytorch.runtime.launches import can_begin_early

COMING = slice(512, 1536)
SIZE, TOKENS, LATE = 2, 256, 20_000_000  # cycles: some 10 ms, thousands of times what dq takes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


def attended(whole: Tensor, q: Tensor, tiles: Tiles, spans: tuple[slice, ...]) -> list[Tensor]:
    """Attend to keys half of which a slow kernel writes; return out, and keys as they are then."""
    from tests.support.late_writer import write_late

    both = whole.clone()
    both[:, COMING] = torch.nan
    late, source = both[:, COMING], whole[:, COMING]
    result = OutputAccumulator(q, q)
    torch.cuda.synchronize()
    write_late[(1,)](late, source, source.numel(), 5_000_000, BLOCK=4096)
    keys = KVBlock(both[..., :64], both[..., 64:], None, (), coming=spans)
    triton.forward(q, keys, tiles, ScoreMods(0.125, None, 64), result)
    left = both.clone()
    return [result.finalize()[0].float(), left]


@pytest.mark.parametrize("cols", [slice(0, 2048), slice(0, 600), slice(0, 512)], ids=str)
def test_keys_that_are_coming_are_there_when_they_are_read_and_at_the_end(cols):
    if not can_begin_early(torch.device("cuda")):
        pytest.skip("kernels can't begin early")
    q, whole = (torch.randn(1, n, 4, d, device="cuda") for n, d in ((512, 64), (2048, 128)))
    q, whole = q.bfloat16(), whole.bfloat16()
    tiles = Tiles([Tile(slice(0, 512), cols, None, None)])
    want, _ = attended(whole, q, tiles, ())
    for _ in range(3):  # the first one compiles, and makes tables
        got, left = attended(whole, q, tiles, (COMING,))
        assert (got - want).norm() < 1e-2 * want.norm()
        assert torch.equal(left, whole)


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
