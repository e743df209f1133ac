"""Observed calls on GPUs: by CUDA events, with ranges of NVTX, on every transport.

`torchrun --standalone --nproc-per-node 2 -m tests.gpu.test_observe_gpu` runs the same by hand and
prints a table of each transport.
"""

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ring_attention_pytorch import RingPlan, explain_plan, observe, ring_attn
from tests.support.ranks import gpu_ranks
from tests.support.torchrun import join_ranks, under_torchrun


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_calls_are_observed_on_gpus() -> None:
    under_torchrun("tests.gpu.test_observe_gpu", gpu_ranks(), timeout=300)


def observed(tokens: int, transport: str) -> str:
    """Observe the third of three calls; the same numbers come when nobody looks."""
    torch.manual_seed(dist.get_rank())
    q = torch.randn(1, tokens, 8, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    plan = RingPlan.make(q, q, q, causal=True, layout="zigzag", transport=transport)
    ranges = []
    for _ in range(3):
        alone = ring_attn(q, q, q, plan=plan)
        with observe(), mock.patch("torch.cuda.nvtx.range_push", ranges.append):
            out = ring_attn(q, q, q, plan=plan)
            out.square().sum().backward()
        torch.testing.assert_close(out, alone)
    figures = plan.statistics()
    for direction in figures:
        assert 0 < direction.seconds < 1
        assert sum(hop.computed for hop in direction.hops) <= 1.01 * direction.seconds
        assert direction.received > 0
    assert any("gradients" in name and "home" in name for name in ranges)
    assert explain_plan(plan, picture=os.devnull)
    return f"{tokens} tokens each, {transport}, {type(plan.transport).__name__}\n{figures}\n"


def main() -> None:
    join_ranks()
    for tokens in (1024, 16384):
        for transport in ("ring", "gather"):
            text = observed(tokens, transport)
            if dist.get_rank() == 0:
                print(text, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
