"""Trials in processes that share a sequence: correctness of attention, and speed of links."""

import os
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_attention_pytorch.comm.transports import TRANSPORTS
from ring_attention_pytorch.doctor.facts import request, why_not
from ring_attention_pytorch.doctor.parity import or_infinite
from ring_attention_pytorch.doctor.speed import SIZES, Speed, speed
from ring_attention_pytorch.functional import ring_attn
from ring_attention_pytorch.kernels import KERNELS
from ring_attention_pytorch.launch import spawn
from ring_attention_pytorch.nn.reference import default_attention
from ring_attention_pytorch.nn.sharding import shard_sequence
from ring_attention_pytorch.plan.explain import explain_plan
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.progress import counted, show
from ring_attention_pytorch.ranks.ring import Ring

# the largest relative error of out or a gradient: some hundred times the usual error
ALLOWED = {torch.float64: 1e-11, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
_TOKENS, _HEADS, _KEY_HEADS, _WIDTH = 210, 4, 2, 64
_MESSAGE = 16 << 20  # bytes
_ROUNDS = 3


class Parity(NamedTuple):
    """The worst relative error of a kernel's results over a transport, over all ranks."""

    kernel: str
    transport: str
    dtype: str
    error: float
    allowed: float

    @property
    def right(self) -> bool:
        """True if the error is small; False for NaN."""
        return self.error <= self.allowed


class Trial(NamedTuple):
    """Results of one rank or of all: errors, bytes/s to a neighbour, speeds, and the plan's facts.

    `machines` numbers the ranks' machines; `ulysses` is the degree that a plan takes there.
    """

    parities: list[Parity]
    bandwidth: float | None
    speed: Speed | None = None
    machines: tuple[int, ...] = ()
    ulysses: int = 1


def try_out(device: str, backend: str, nproc: int) -> Trial:
    """Compare each kernel and transport with dense attention, and time links, in new processes.

    Every process sends to one neighbour and receives as many bytes from the other; the slowest
    one counts. With one process the bandwidth is None.
    """
    return worst(spawn(_trial, nproc, device, backend=backend))


def worst(trials: Sequence[Trial]) -> Trial:
    """Return the worst results of all ranks."""
    same = zip(*(trial.parities for trial in trials))
    speeds = [trial.bandwidth for trial in trials if trial.bandwidth is not None]
    slowest = min((t.speed for t in trials if t.speed), key=lambda s: s.measured, default=None)
    last = trials[-1]
    parities = [max(each, key=lambda parity: or_infinite(parity.error)) for each in same]
    return Trial(parities, min(speeds, default=None), slowest, last.machines, last.ulysses)


def explained(
    tokens: int,
    heads: tuple[int, int],
    width: int,
    nproc: int,
    layout: str,
    causal: bool,
    machines: int = 1,
) -> list[str]:
    """Explain the plan of each of `nproc` processes; their tensors take no memory.

    They plan as if they were on so many machines, one after another.
    """
    return spawn(_explain, nproc, tokens, heads, width, layout, causal, nproc / machines)


def _trial(rank: int, device: str) -> Trial:
    torch.set_num_threads(1)
    if rank == 0:
        show()
    return trial(device)


def trial(device: str) -> Trial:
    """Run all trials on this rank; all ranks of the default group call this together."""
    found = []
    pairs = [(name, by) for name in KERNELS if why_not(name, device) is None for by in TRANSPORTS]
    for name, transport in counted(pairs, "trying", len(pairs), "kernels and transports"):
        dtype = request(name, device).dtype
        try:
            error = _error(name, transport, dtype, device)
        except Exception as problem:
            raise RuntimeError(f"{name}, {transport}: {problem}") from problem
        found.append(Parity(name, transport, str(dtype), error, ALLOWED[dtype]))
    ring = Ring()
    bandwidth = _bandwidth(ring, device)
    plan = RingPlan.make(*SIZES[device].tensors(device), causal=True, layout="zigzag")
    return Trial(found, bandwidth, speed(device, bandwidth), ring.machines, plan.degree)


def _error(kernel: Any, transport: Any, dtype: torch.dtype, device: str) -> float:
    """Return the worst relative error of out, dq, dk and dv of this rank's tokens."""
    torch.manual_seed(0)
    heads = (_HEADS, _KEY_HEADS, _KEY_HEADS, _HEADS)
    exact = [torch.randn(1, _TOKENS, h, _WIDTH, dtype=torch.float64).to(dtype) for h in heads]
    whole = [t.double().to(device).requires_grad_() for t in exact[:3]]
    cotangent = exact[3].to(device)
    q, k, v = whole
    dense = default_attention(q, k, v, causal=True)
    want = [dense, *torch.autograd.grad(dense, whole, cotangent.double())]
    q, k, v = mine = [_mine(t.to(device)).requires_grad_() for t in exact[:3]]
    out = ring_attn(q, k, v, causal=True, layout="zigzag", kernel=kernel, transport=transport)
    got = [out, *torch.autograd.grad(out, mine, _mine(cotangent))]
    return max((_relative(g, _mine(w)) for g, w in zip(got, want)), key=or_infinite)


def _mine(t: Tensor) -> Tensor:
    return shard_sequence(t.detach(), layout="zigzag")


def _relative(got: Tensor, want: Tensor) -> float:
    return float((got.detach().double() - want).norm() / want.norm())


def _bandwidth(ring: Ring, device: str) -> float | None:
    if ring.size == 1:
        return None
    there, here = (torch.zeros(_MESSAGE, dtype=torch.uint8, device=device) for _ in range(2))
    right, left = (ring.rank + 1) % ring.size, (ring.rank - 1) % ring.size
    best = 0.0
    for _ in range(_ROUNDS + 1):  # the first one opens connections
        ring.gather_bytes(b"", 1)
        start = time.perf_counter()
        with ring.call("measuring the links", 0, None):
            ring.exchange([(right, there)], [(left, here)]).wait()
            if device == "cuda":
                torch.cuda.synchronize()
        best = max(best, _MESSAGE / (time.perf_counter() - start))
    return best


def _explain(
    rank: int,
    tokens: int,
    heads: tuple[int, int],
    width: int,
    layout: Any,
    causal: bool,
    ranks: float,
) -> str:
    os.environ["RING_ATTENTION_MACHINE"] = f"machine {int(rank / ranks)}"
    like = torch.empty((), dtype=torch.bfloat16)
    here = shard_sequence(torch.empty(()).expand(1, tokens), layout=layout).shape[1]
    q = like.expand(1, here, heads[0], width)
    k = like.expand(1, here, heads[1], width)
    return explain_plan(RingPlan.make(q, k, k, causal=causal, layout=layout))
