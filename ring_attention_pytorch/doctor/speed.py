"""The speed of attention on this machine: predicted by the cost model, and measured.

a kernel alone on one rank ─┐
links between neighbours ───┴─ Hardware ── cost.predict ── expected, and a short measured run
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ring_attention_pytorch.functional import ring_attn
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.schedule.cost import predict
from ring_attention_pytorch.schedule.hardware import Hardware

_ROUNDS = 4


class Size(NamedTuple):
    """Sizes of the timed call: tokens per rank, heads, head size, and dtype."""

    tokens: int
    heads: int
    key_heads: int
    width: int
    dtype: torch.dtype

    def tensors(self, device: str) -> list[Tensor]:
        """Make q, k and v of one rank."""
        heads = (self.heads, self.key_heads, self.key_heads)
        return [
            torch.randn(
                1, self.tokens, h, self.width, device=device, dtype=self.dtype, requires_grad=True
            )
            for h in heads
        ]


SIZES = {
    "cpu": Size(512, 4, 2, 64, torch.float32),
    "cuda": Size(8192, 32, 8, 128, torch.bfloat16),
}


class Speed(NamedTuple):
    """FLOP/s of a rank, forward and backward: kernel alone, expected, and measured."""

    alone: float
    expected: float
    measured: float


def speed(device: str, bandwidth: float | None) -> Speed:
    """Time causal attention in layout "zigzag"; all ranks of the default group call this together.

    Each rank first times the kernel alone, without a mask, on its own tokens.
    """
    size, ring = SIZES[device], Ring()
    q, k, v = size.tensors(device)
    pairs = size.tokens**2
    flops = 4 * size.heads * size.width * pairs
    kernel = _seconds(lambda: ring_attn(q, k, v, group=Ring.alone()), (q, k, v), Ring.alone())
    machine = _machine((flops / kernel[0], 2.5 * flops / kernel[1]), bandwidth)
    plan = RingPlan.make(q, k, v, causal=True, layout="zigzag")
    cost = predict(plan.schedule, plan.place, plan.chosen.shape, machine)
    took = sum(_seconds(lambda: ring_attn(q, k, v, plan=plan), (q, k, v), ring))
    mine = 3.5 * flops * ring.size / 2  # a rank's share of the causal half
    expected = cost.forward + cost.backward
    return Speed(3.5 * flops / sum(kernel), mine / expected, mine / took)


def _machine(kernel: tuple[float, float], bandwidth: float | None) -> Hardware:
    """Return hardware with these FLOP/s (forward, backward) and bytes/s, and no cost per call."""
    forward, backward = kernel
    rate = bandwidth or float("inf")
    hops = ((0, 0.0), (1 << 20, (1 << 20) / rate))
    return Hardware(forward=forward, backward=backward, pull=rate, call=0.0, hops=hops)


def _seconds(
    call: Callable[[], Tensor], given: tuple[Tensor, Tensor, Tensor], ring: Ring
) -> tuple[float, float]:
    """Return the least seconds of forward and of backward; all ranks start together."""
    best = [float("inf")] * 2
    for _ in range(_ROUNDS):
        ring.gather_bytes(b"", 1)
        start = _now(given[0])
        out = call()
        middle = _now(given[0])
        torch.autograd.grad(out, given, torch.ones_like(out))
        for at, seconds in enumerate((middle - start, _now(given[0]) - middle)):
            best[at] = min(best[at], seconds)
    return best[0], best[1]


def _now(t: Tensor) -> float:
    if t.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()
