"""Measure TF/s a GPU of attention over a group, beside the same kernel alone and other libraries.

    torchrun --nproc-per-node 4 -m benchmarks ring --save
    torchrun --nproc-per-node 4 -m benchmarks ring --heads 64 8 --save FILE.json
    torchrun --nproc-per-node 4 -m benchmarks ring --tokens 2048 --graphs
    torchrun --nproc-per-node 4 -m benchmarks ring --tokens 8192 --trace traces
    torchrun --nproc-per-node 4 -m benchmarks ring --million
    torchrun --nproc-per-node 2 -m benchmarks ring --device cpu --tokens 64 --heads 4 2

FLOPs are those of the visible half under a causal mask, backward 2.5 times forward; times and
errors are as `lib/rings.py` says. "theory" is the same kernel on one GPU over the whole sequence,
divided by the ranks; shares are of it. "calls alone" are the kernel's calls of a gather that
overlaps, where nothing travels. Those of mode "graph" are captured once and replayed as a CUDA
graph.
Launched one by one, few tokens come together, in other calls.
"predicted" is the TF/s that the cost model of the plan says, on GPUs.
"""

import argparse
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.lib import peers
from benchmarks.lib.clock import wait
from benchmarks.lib.options import parser
from benchmarks.lib.results import (
    GRAPH,
    ONE_BY_ONE,
    Row,
    Run,
    Subject,
    by_pass,
    failed,
    rounded,
    tflops,
)
from benchmarks.lib.rings import (
    THEORY,
    Attend,
    Errors,
    Result,
    Shape,
    alone,
    captured,
    checker,
    device_name,
    gpus,
    joined,
    make_plan,
    measured,
    passes,
    planned,
    predicted_seconds,
    shapes,
    theory_of,
)
from benchmarks.lib.still import ALONE, still
from ring_attention_pytorch import RingPlan
from ring_attention_pytorch.comm.symmetric_memory import near_by, shared_by
from ring_attention_pytorch.comm.transports import TRANSPORTS
from ring_attention_pytorch.kernels import KERNELS, refusal
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime.interfaces import KernelRequest

Results = dict[Subject, Result | str]  # or what went wrong


def modes(plan: RingPlan, graphs: bool) -> Iterator[tuple[str, RingPlan]]:
    """Yield the ways to launch a plan."""
    yield ONE_BY_ONE, plan
    if graphs:
        yield GRAPH, plan


def ours(shape: Shape, asked: argparse.Namespace, like: list[Tensor], errors: Errors) -> Results:
    """Measure each kernel by each transport, launched in each way."""
    found: Results = {}
    for kernel, ulysses, transport in product(asked.kernels, asked.ulysses, asked.transports):
        name = transport + (f", Ulysses {ulysses}" if ulysses > 1 else "")
        options = dict(kernel=kernel, transport=transport, ulysses=ulysses, layout=shape.layout)
        try:
            plan = make_plan(shape, like, **options)
        except ValueError as error:  # the same on all ranks
            found[Subject(name, kernel)] = str(error)[:120]
            continue
        for mode, ready in modes(plan, asked.graphs):
            result = measured(planned(ready), like, asked.repeats, errors, mode == GRAPH)
            if isinstance(result, Result):
                result = with_shared(result, shape.device)
                result = result._replace(predicted=predicted_seconds(ready, mode))
            found[Subject(name, kernel, mode)] = result
        if name == "gather" and has_theory(shape, asked):
            found |= bare(Subject(ALONE, kernel), still(plan), like, asked.graphs, asked.repeats)
    return found


def bare(
    subject: Subject, attend: Attend, like: list[Tensor], graphs: bool, repeats: int
) -> Results:
    """Measure one by one, and with `graphs` in a graph; nothing is compared."""
    return {
        subject._replace(mode=mode): measured(attend, like, repeats, None, mode == GRAPH)
        for mode in ([ONE_BY_ONE, GRAPH] if graphs else [ONE_BY_ONE])
    }


def has_theory(shape: Shape, asked: argparse.Namespace) -> bool:
    """Tell whether the kernel alone is measured, too."""
    return shape.tokens * dist.get_world_size() <= asked.theory_up_to


def with_shared(result: Result, device: torch.device) -> Result:
    """Add the memory that is shared with other ranks."""
    return result._replace(peak=result.peak + shared_gib(device))


def shared_gib(device: torch.device) -> float:
    """Return the memory shared with other ranks, which PyTorch's allocator does not count."""
    shared = shared_by(Ring(), device) or near_by(Ring(), device)
    if shared is None:
        return 0.0
    buffers = (shared.space.keys, shared.space.grads, shared.space.swaps)
    return sum(buffer.memory.nbytes for buffer in buffers) / 2**30


def theories(shape: Shape, asked: argparse.Namespace) -> Results:
    """Measure each kernel alone over the whole sequence, and divide its time by the ranks."""
    found: Results = {}
    ranks = dist.get_world_size()
    whole = shape.tensors(shape.tokens * ranks, seed=0)
    repeats = max(1, asked.repeats // 2)
    for kernel in asked.kernels:
        attend = alone(shape, kernel, whole)
        found |= bare(Subject(THEORY, kernel), attend, whole, asked.graphs, repeats)
    return {
        subject: result
        if isinstance(result, str)
        else result._replace(forward=result.forward / ranks, both=result.both / ranks)
        for subject, result in found.items()
    }


def others(shape: Shape, asked: argparse.Namespace, like: list[Tensor], errors: Errors) -> Results:
    """Measure other libraries; errors are of those that lay a sequence out as we do."""
    found: Results = {}
    for name, peer in peers.peers(shape.causal, shape.tokens, shape.key_heads).items():
        same = "stripe" not in name and "Ulysses" not in name
        with peer as attend:
            found[Subject(name)] = measured(attend, like, asked.repeats, errors if same else None)
    return found


def all_of(shape: Shape, asked: argparse.Namespace) -> Results:
    """Measure all subjects of a shape."""
    found = theories(shape, asked) if has_theory(shape, asked) else {}
    tensors = shape.tensors(shape.tokens, seed=dist.get_rank())
    hidden = torch.lt if shape.causal else None  # a row's position is before the column's
    errors = checker(shape, tensors, shape.layout, hidden)
    found |= ours(shape, asked, tensors, errors)
    if asked.peers:
        found |= others(shape, asked, tensors, errors)
    return found


def rows(shape: Shape, found: Results) -> Iterator[Row]:
    """Make the rows of each subject."""
    flops = shape.flops(dist.get_world_size())
    for subject, result in found.items():
        about = shape.about() | subject.about()
        if isinstance(result, str):
            yield from failed(about, result)
            continue
        theory = found.get(theory_of(subject))
        said = result.memory_and_errors()
        if isinstance(theory, Result):
            said["share"] = rounded(theory.both / result.both)
        if result.predicted is not None:
            said["predicted"] = rounded(3.5 * flops / result.predicted / 1e12)
        yield from by_pass(about, "tflops", tflops(flops, result.forward, result.both), **said)


def trace(shape: Shape, asked: argparse.Namespace) -> None:
    """Write a profiler's trace of each kernel and transport, a file for each rank."""
    from torch.profiler import ProfilerActivity, profile

    rank = dist.get_rank()
    tensors = shape.tensors(shape.tokens, seed=rank)
    asked.trace.mkdir(parents=True, exist_ok=True)
    kinds = [ProfilerActivity.CPU]
    kinds += [ProfilerActivity.CUDA] if shape.device.type == "cuda" else []
    for kernel, transport in product(asked.kernels, asked.transports):
        options = dict(kernel=kernel, transport=transport, layout=shape.layout)
        *_, (_, plan) = modes(make_plan(shape, tensors, **options), asked.graphs)
        _, both = passes(planned(plan), tensors)
        run = captured(both) if asked.graphs else both
        for _ in ("warm", "kept"):
            dist.barrier()
            with profile(activities=kinds) as profiler:
                run()
                wait(shape.device)
        name = f"{transport}-{kernel}-{shape.tokens}-rank{rank}.json"
        profiler.export_chrome_trace(str(asked.trace / name))


def able(asked: argparse.Namespace, device: torch.device) -> list[str]:
    """Find the kernels for what is asked, but the slow one that does everything."""
    shape = shapes(asked, device)[0]
    q = torch.empty(1, 0, 1, shape.d, device=device, dtype=shape.dtype)
    case = KernelRequest.of(q, q)
    return [name for name in KERNELS if name != "eager" and refusal(name, case) is None]


def settle(asked: argparse.Namespace, device: torch.device) -> None:
    """Fill in what depends on the device, and on `--million`."""
    on_gpu = device.type == "cuda"
    asked.peers = on_gpu and not asked.no_peers
    asked.tokens = asked.tokens or ([2**n for n in range(10, 18)] if on_gpu else [64])
    if asked.million:
        asked.tokens = [2**20 // dist.get_world_size()]
        asked.theory_up_to, asked.repeats, asked.peers = 0, 1, False
    asked.kernels = asked.kernels or able(asked, device)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and with `--save` keep; or write traces."""
    options = parser(
        "ring", __doc__, save="ring", device="cuda", tokens=None, mask=["causal", "full"],
        heads=[32, 8], dim_head=128, dtype=None, kernels=None, graphs=False, repeats=8,
    )  # fmt: skip
    options.add_argument("--transports", nargs="+", default=list(TRANSPORTS))
    options.add_argument("--ulysses", type=int, nargs="+", default=[1])
    options.add_argument("--no-peers", action="store_true")
    options.add_argument("--theory-up-to", type=int, default=300_000, help="tokens of the whole")
    options.add_argument("--million", action="store_true", help="2 ** 20 tokens in all, once")
    options.add_argument("--trace", type=Path, metavar="DIR", help="profiler traces; no table")
    asked = options.parse_args(argv)
    with joined(asked.device) as device:
        settle(asked, device)
        run = Run("ring", argv, device_name(device), asked.save, **gpus(device))
        for shape in shapes(asked, device):
            if asked.trace is not None:
                trace(shape, asked)
            else:
                run.add(rows(shape, all_of(shape, asked)))
        if asked.trace is None:
            run.finish()
