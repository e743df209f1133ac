"""Measure a gated delta net over a ring, against flash-linear-attention on the whole sequence.

    python -m benchmarks recurrent                                       # one GPU: kernels, errors
    torchrun --nproc-per-node 2 -m benchmarks recurrent                  # the sequence over two
    torchrun --nproc-per-node 2 -m benchmarks recurrent --device cpu --lengths 256 --heads 2 4

Shapes are of Qwen3-Next: 16 key heads and 32 value heads of 128. "share" is the time of fla alone
on the whole sequence (fla-core, if it is installed; else the eager kernel on the whole), divided
by the ranks, over ours. "scan" is the exchange of states by itself, forward. "context" is fla's own
context parallelism, which is for contiguous shards. Errors, of one process, are against float64.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.lib.options import parser
from benchmarks.lib.rings import joined
from ring_attention_pytorch import RunPlan, positions, ring_gated_delta_rule, ring_scan

LENGTHS = [2**13, 2**15, 2**17]


def inputs(n: int, heads: Sequence[int], d: int, device: str, dtype: torch.dtype) -> list[Tensor]:
    """Return q, k, v, g and beta of a whole sequence, the same on all ranks."""
    torch.manual_seed(0)
    key_heads, value_heads = heads
    q, k = (torch.randn(1, n, key_heads, d, device=device, dtype=dtype) for _ in range(2))
    v = torch.randn(1, n, value_heads, d, device=device, dtype=dtype)
    g = -0.1 * torch.rand(1, n, value_heads, device=device)
    return [q, k, v, g, torch.rand(1, n, value_heads, device=device, dtype=dtype)]


def seconds(run: Callable[[], Any], device: str, repeats: int) -> float:
    """Return the median time of a call that all ranks make together."""

    def finished() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        if dist.is_initialized():
            dist.barrier()
        return time.perf_counter()

    for _ in range(2):
        run()
    times = []
    for _ in range(repeats):
        begun = finished()
        run()
        times.append(finished() - begun)
    return sorted(times)[repeats // 2]


def step(function: Callable[..., Any], tensors: Sequence[Tensor], back: bool) -> Callable[[], Any]:
    """Return a call of forward, or of forward and backward."""
    leaves = [t.detach().requires_grad_(back) for t in tensors]

    def run() -> Any:
        out = function(*leaves)
        return torch.autograd.grad(out, leaves, torch.ones_like(out)) if back else out

    return run


def whole(device: str) -> Callable[..., Tensor]:
    """Return the layer of a whole sequence in one process, by fla where it is installed."""
    if device == "cuda" and find_spec("fla"):
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        return lambda *t: chunk_gated_delta_rule(*t, use_qk_l2norm_in_kernel=True)[0]

    def eager(*tensors: Tensor) -> Tensor:
        from ring_attention_pytorch.ranks.ring import Ring

        plan = RunPlan.make(tensors[0], group=Ring.alone())
        return ring_gated_delta_rule(*tensors, plan=plan, normalize=True)[0]

    return eager


def context(length: int, device: str) -> Callable[..., Tensor] | None:
    """Return the layer by fla's own context parallelism; None where it can't be run."""
    if device != "cuda" or not find_spec("fla") or not dist.is_initialized():
        return None
    from fla.ops.cp import build_cp_context
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    borders = torch.tensor([0, length], device=device)
    made = build_cp_context(borders, group=dist.group.WORLD)
    options = dict(use_qk_l2norm_in_kernel=True, cp_context=made, cu_seqlens=made.cu_seqlens)
    return lambda *t: chunk_gated_delta_rule(*t, **options)[0]


def ours(plan: RunPlan) -> Callable[..., Tensor]:
    """Return the layer over the ring."""
    return lambda *t: ring_gated_delta_rule(*t, plan=plan, normalize=True)[0]


def measured(length: int, given: Any, ranks: int, rank: int) -> None:
    """Print the times of one length."""
    tensors = inputs(length, given.heads, given.dim, given.device, torch.bfloat16)

    def timed(function: Callable[..., Any], of: Sequence[Tensor]) -> list[float]:
        return [seconds(step(function, of, back), given.device, given.repeats)
                for back in (False, True)]  # fmt: skip

    alone = timed(whole(given.device), tensors)
    report(rank, f"{length} tokens, whole:", *(f"{1e3 * t:.2f} ms" for t in alone))
    for layout in ("contiguous", "zigzag"):
        at = positions(layout, rank=rank, ring_size=ranks, length=length).to(given.device)
        mine = [t[:, at].contiguous() for t in tensors]
        plan = RunPlan.make(mine[0], layout=layout)
        times = timed(ours(plan), mine)
        d, runs = given.dim, len(plan.mine)
        m = torch.randn(runs, given.heads[1], d, d, device=given.device)
        scan = seconds(lambda: ring_scan(m, m, plan=plan), given.device, given.repeats)  # noqa: B023
        shares = (f"{one / ranks / our:.0%}" for one, our in zip(alone, times))
        report(
            rank, f"  ours, {layout}:", *(f"{1e3 * t:.2f} ms" for t in times), "share", *shares,
            f"scan {1e3 * scan:.2f} ms = {scan / times[0]:.0%} of forward",
        )  # fmt: skip
        other = context(length, given.device) if layout == "contiguous" else None
        if other is not None:
            try:
                times = timed(other, mine)
                report(rank, "  fla's context:", *(f"{1e3 * t:.2f} ms" for t in times))
            except Exception as error:  # another version of fla
                report(rank, f"  fla's context: {type(error).__name__}: {error}")


def errors(given: Any) -> None:
    """Print relative errors of results and gradients, of 5 documents, against float64."""
    n = min(1000, given.lengths[0])
    tensors = inputs(n, given.heads, given.dim, given.device, torch.bfloat16)
    plan = RunPlan.make(tensors[0], cu_seqlens=[0, n // 3, n // 3 + 1, n // 2, n])
    results = []
    for of in ([t.double() for t in tensors], [t.float() for t in tensors], tensors):
        leaves = [t.requires_grad_() for t in of]
        initial = torch.ones(1, given.heads[1], given.dim, given.dim, device=given.device)
        out, last = ring_gated_delta_rule(
            *leaves, plan=plan, normalize=True, initial=initial / 50, final=True
        )
        assert last is not None
        loss = out.double().square().sum() + last.double().sum()
        grads = torch.autograd.grad(loss, leaves)
        results.append([out.detach(), last.detach(), *grads])
    for name, found in zip(("float32", "bfloat16"), results[1:]):
        parts = [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, results[0])]
        report(0, f"errors in {name} (out, last, dq, dk, dv, dg, dbeta):",
             *(f"{part:.1e}" for part in parts))  # fmt: skip


def report(rank: int, *words: str) -> None:
    """Print a line on the first rank."""
    if rank == 0:
        print(*words, flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all lengths."""
    options = parser("recurrent", __doc__ or "")
    options.add_argument("--device", default="cuda")
    options.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    options.add_argument("--heads", type=int, nargs=2, default=[16, 32], help="of keys, of values")
    options.add_argument("--dim", type=int, default=128)
    options.add_argument("--repeats", type=int, default=5)
    given = options.parse_args(argv)
    with joined(given.device) if dist.is_torchelastic_launched() else nullcontext():
        rank, ranks = 0, 1
        if dist.is_initialized():
            rank, ranks = dist.get_rank(), dist.get_world_size()
        report(rank, f"{given.device}, {ranks} ranks; times of forward, and with backward")
        if ranks == 1:
            errors(given)
        for length in given.lengths:
            measured(length, given, ranks, rank)
