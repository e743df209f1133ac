"""Time attention in parts: merges, causal attention in steps, and keys that all ranks hold.

    python -m benchmarks parts
    torchrun --nproc-per-node 2 -m benchmarks parts --tokens 16384
    python -m benchmarks parts --device cpu --tokens 64 --heads 4 2

Forward and backward together, in milliseconds, medians. A merge has its bytes a second, each out,
dout and gradient counted once, beside those of a copy. Steps have their time over that of causal
attention by the same kernel; block diffusion's over that of two causal calls. Shared keys have
their time over that of the video alone; only they need several processes to be of interest.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attention_pytorch import RingPlan, merge_attention, ring_attn
from ring_attention_pytorch.launch import torchrun_group

STEPS = (4, 32, 256)


def seconds(call: Callable[[], Any], device: str, rounds: int) -> float:
    """Return the median time of a call, after some to warm up."""
    taken = []
    for number in range(rounds + 3):
        if device == "cuda":
            torch.cuda.synchronize()
        began = perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        if number >= 3:
            taken.append(perf_counter() - began)
    return sorted(taken)[len(taken) // 2]


def both_ways(attend: Callable[[], Tensor], leaves: Sequence[Tensor]) -> Callable[[], Any]:
    def run() -> None:
        out = attend()
        torch.autograd.grad(out, leaves, torch.ones_like(out))

    return run


def merges(o: Namespace, drawn: Callable[..., Tensor]) -> Iterator[str]:
    n, heads = o.tokens, o.heads[0]
    outs = [drawn(n, heads, o.dim) for _ in range(2)]
    lses = [drawn(heads, n, o.dim)[..., 0].float().detach().requires_grad_() for _ in range(2)]
    parts = [t for pair in zip(outs, lses) for t in pair]
    size = outs[0].numel() * outs[0].element_size()
    with torch.no_grad():
        forward = seconds(lambda: merge_attention(*parts), o.device, o.rounds)
    # the graph's own nodes are reused, so that only backward is timed
    both = merge_attention(*parts)
    along = [torch.ones_like(t) for t in both]
    back = seconds(
        lambda: torch.autograd.grad(both, parts, along, retain_graph=True), o.device, o.rounds
    )
    copy = seconds(outs[0].detach().clone, o.device, o.rounds)
    for name, time, moved in (("forward", forward, 3), ("backward", back, 5), ("a copy", copy, 2)):
        yield f"merge of two, {name}: {1e3 * time:.3f} ms, {moved * size / time / 1e9:.0f} GB/s"


def steps(o: Namespace, drawn: Callable[..., Tensor]) -> Iterator[str]:
    n = o.tokens
    at = torch.arange(n)
    q, k, v = drawn(n, o.heads[0], o.dim), *(drawn(n, o.heads[1], o.dim) for _ in range(2))
    how: dict[str, Any] = dict(causal=True, key_positions=at, cross=True)
    base = {}
    for kernel in o.kernels:
        for step in (1, *STEPS):
            last = at // step * step + step - 1
            plan = RingPlan.make(q, k, v, query_positions=last, kernel=kernel, **how)
            run = both_ways(lambda plan=plan: ring_attn(q, k, v, plan=plan), (q, k, v))
            time = seconds(run, o.device, o.rounds)
            base.setdefault(kernel, time)
            yield (
                f"steps of {step}, {plan.kernel.name}: {1e3 * time:.3f} ms, "
                f"{time / base[kernel]:.2f} of causal"
            )


def diffusion(o: Namespace, drawn: Callable[..., Tensor]) -> Iterator[str]:
    n, step = o.tokens, 32
    at = torch.arange(n)
    (q, qc), (k, v, kc, vc) = (
        [drawn(n, heads, o.dim) for _ in range(number)] for heads, number in zip(o.heads, (2, 4))
    )
    leaves = q, qc, k, v, kc, vc
    causal = RingPlan.make(q, k, v, causal=True)
    own = RingPlan.make(q, k, v, cu_seqlens=[*range(0, n, step), n])
    first = at // step * step
    stand = torch.cat((first - 1, first + step - 1))
    how: dict[str, Any] = dict(causal=True, cross=True, query_positions=stand, key_positions=at)
    clean = RingPlan.make(torch.cat((q, qc), 1), kc, vc, **how)

    def blocks() -> Tensor:
        near = ring_attn(q, k, v, plan=own, return_lse=True)
        out, lse = ring_attn(torch.cat((q, qc), 1), kc, vc, plan=clean, return_lse=True)
        noisy = merge_attention(*near, out[:, :n], lse[..., :n])[0]
        return torch.cat((noisy, out[:, n:]))

    def two() -> Tensor:
        return torch.cat((ring_attn(q, k, v, plan=causal), ring_attn(qc, kc, vc, plan=causal)))

    times = [seconds(both_ways(each, leaves), o.device, o.rounds) for each in (blocks, two)]
    yield (
        f"block diffusion, blocks of {step}, {own.kernel.name} and {clean.kernel.name}: "
        f"{1e3 * times[0]:.3f} ms, {times[0] / times[1]:.2f} of two causal calls"
    )


def shared(o: Namespace, drawn: Callable[..., Tensor]) -> Iterator[str]:
    n = 4 * o.tokens
    q, k, v = drawn(n, o.heads[0], o.dim), *(drawn(n, o.heads[1], o.dim) for _ in range(2))
    text = drawn(o.text, o.heads[1], o.dim), drawn(o.text, o.heads[1], o.dim)
    alone, both = RingPlan.make(q, k, v), RingPlan.make(q, k, v, shared_keys=text)
    times = []
    for attend, leaves in (
        (lambda: ring_attn(q, k, v, plan=alone), (q, k, v)),
        (lambda: ring_attn(q, k, v, plan=both, shared_keys=text), (q, k, v, *text)),
    ):
        times.append(seconds(both_ways(attend, leaves), o.device, o.rounds))
    yield (
        f"{n} video tokens here and {o.text} of text: {1e3 * times[1]:.3f} ms, "
        f"{times[1] / times[0]:.3f} of the video alone"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    options = ArgumentParser(description=__doc__)
    options.add_argument("--tokens", type=int, default=8192, help="on each rank")
    options.add_argument("--text", type=int, default=512, help="tokens of the shared keys")
    options.add_argument("--heads", type=int, nargs=2, default=(32, 8), help="of queries and keys")
    options.add_argument("--dim", type=int, default=128)
    options.add_argument("--device", default="cuda")
    options.add_argument("--rounds", type=int, default=10)
    options.add_argument("--kernels", nargs="+", default=["triton"])
    options.add_argument("--only", nargs="+", default=["merges", "steps", "diffusion", "shared"])
    o = options.parse_args(arguments)
    o.kernels = [None] if o.device == "cpu" else o.kernels
    dtype = torch.bfloat16 if o.device == "cuda" else torch.float32

    def drawn(*shape: int) -> Tensor:
        return torch.randn(1, *shape, device=o.device, dtype=dtype).requires_grad_()

    with torchrun_group("nccl" if o.device == "cuda" else "gloo"):
        several = dist.is_initialized()
        for part in (merges, steps, diffusion, shared):
            if part.__name__ not in o.only or (several and part in (steps, diffusion)):
                continue
            for line in part(o, drawn):
                if not several or dist.get_rank() == 0:
                    print(line, flush=True)


if __name__ == "__main__":
    main()
