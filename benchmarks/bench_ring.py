"""TF/s a GPU of attention over a group, in every transport, beside the same kernel alone and peers.

    torchrun --nproc-per-node 4 -m benchmarks.bench_ring --save benchmarks/results
    torchrun --nproc-per-node 4 -m benchmarks.bench_ring --tokens 2048 --graphs
    torchrun --nproc-per-node 4 -m benchmarks.bench_ring --tokens 8192 --trace traces
    torchrun --nproc-per-node 4 -m benchmarks.bench_ring --million
    torchrun --nproc-per-node 2 -m benchmarks.bench_ring --device cpu --tokens 64 --heads 4 2

FLOPs are those of the visible half under a causal mask, backward 2.5 times forward; times and
errors are as `rings.py` says. "theory" is the same kernel on one GPU over the whole sequence,
divided by the ranks. "calls alone" are the kernel's calls of a gather that overlaps, where nothing
travels. "in a graph" are such calls, captured once and replayed as a CUDA graph; "replayed" those
of a plan `in_graphs()`, which copy what they are given, and are compared with theory in a graph.
Launched one by one, few tokens come together, in other calls.
"""

import argparse
import datetime
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import gpu_peers
from benchmarks.rings import (
    Attend,
    Result,
    Shape,
    begun,
    captured,
    checker,
    device_name,
    markdown,
    measured,
    passes,
    speeds,
    synchronize,
)
from benchmarks.still import ALONE, still
from ring_attention_pytorch import RingPlan, ring_attn
from ring_attention_pytorch.comm.ring import Ring
from ring_attention_pytorch.comm.symmetric_memory import shared_by
from ring_attention_pytorch.comm.transports import TRANSPORTS
from ring_attention_pytorch.kernels import KERNELS, problem

THEORY = "theory, "
GRAPH, REPLAYED = ", in a graph", ", replayed"


class Options(NamedTuple):
    """Who takes part, and for how long."""

    kernels: list[str]
    transports: list[str]
    ulysses: list[int]
    peers: bool
    theory_up_to: int
    repeats: int
    graphs: bool


def name_of(kernel: str, transport: str, ulysses: int = 1) -> str:
    return f"{transport}, {kernel}" + (f", Ulysses {ulysses}" if ulysses > 1 else "")


def ours(
    shape: Shape, kernel: str, transport: str, ulysses: int, like: list[Tensor]
) -> dict[str, Attend]:
    """With a plan made once, as layers have it; of a gather its calls alone, too."""
    q, k, v = (t.detach().requires_grad_() for t in like[:3])
    plan = RingPlan.make(
        q, k, v, causal=shape.causal, layout=shape.layout, kernel=kernel, transport=transport,
        ulysses=ulysses,
    )  # fmt: skip
    name = name_of(kernel, transport, ulysses)
    found: dict[str, Attend] = {name: lambda q, k, v: ring_attn(q, k, v, plan=plan)}
    if (transport, ulysses) == ("gather", 1):
        found[ALONE + kernel] = still(plan)
    if plan.device.type == "cuda" and plan.transport.capturable:
        again = plan.in_graphs()
        found[name + REPLAYED] = lambda q, k, v: ring_attn(q, k, v, plan=again)
    return found


def shelves(device: torch.device) -> float:
    """GiB of memory that is shared with other ranks, which PyTorch's allocator does not count."""
    shared = shared_by(Ring(), device)
    shelves = () if shared is None else (shared.space.keys, shared.space.grads, shared.space.swaps)
    return sum(shelf.memory.nbytes for shelf in shelves) / 2**30


def alone(shape: Shape, kernel: str, like: list[Tensor]) -> Attend:
    """The kernel on this GPU: PyTorch's own operator where it is that, else through our loop."""
    for attend in gpu_peers.one_gpu(kernel, shape.causal):
        return attend
    q, k, v = (t.detach().requires_grad_() for t in like[:3])
    plan = RingPlan.make(q, k, v, causal=shape.causal, kernel=kernel, group=Ring.alone())
    return lambda q, k, v: ring_attn(q, k, v, plan=plan)


def theories(shape: Shape, options: Options, length: int) -> dict[str, Result | str]:
    """Of each kernel, captured too where ours are."""
    found: dict[str, Result | str] = {}
    whole, repeats = shape.tensors(length, seed=0), max(1, options.repeats // 2)
    for kernel in options.kernels:
        for graph in (False, True)[: 1 + options.graphs]:
            result = measured(alone(shape, kernel, whole), whole, repeats, None, graph)
            if isinstance(result, Result):
                forward, both = (t / dist.get_world_size() for t in result[:2])
                result = result._replace(forward=forward, both=both)
            found[THEORY + kernel + GRAPH * graph] = result
    return found


def all_of(shape: Shape, options: Options) -> dict[str, Result | str]:
    """By subject; theories are divided by the ranks already."""
    ring = Ring()
    found: dict[str, Result | str] = {}
    length = shape.tokens * ring.size
    if length <= options.theory_up_to:
        found |= theories(shape, options, length)
    tensors = shape.tensors(shape.tokens, seed=ring.rank)
    hidden = torch.lt if shape.causal else None  # a row's position is before the column's
    errors = checker(shape, tensors, shape.layout, hidden)
    for kernel in options.kernels:
        for ulysses in options.ulysses:
            for transport in options.transports:
                try:
                    each = ours(shape, kernel, transport, ulysses, tensors)
                except ValueError as error:  # the same on all ranks
                    found[name_of(kernel, transport, ulysses)] = str(error)[:120]
                    continue
                for (name, attend), graph in product(
                    each.items(), (False, True)[: 1 + options.graphs]
                ):
                    if name.endswith(REPLAYED) and (graph or not options.graphs):
                        continue  # it is beside those in graphs, and has its own
                    alone = name.startswith(ALONE)
                    if alone and length > options.theory_up_to:
                        continue  # nothing to compare it with
                    check = None if alone else errors
                    # a plan that is meant for graphs, in ours
                    attend = each.get(name + REPLAYED, attend) if graph else attend
                    result = measured(attend, tensors, options.repeats, check, graph)
                    if isinstance(result, Result):
                        result = result._replace(peak=result.peak + shelves(tensors[0].device))
                    found[name + GRAPH * graph] = result
    if options.peers:
        for name, peer in gpu_peers.peers(shape.causal, shape.tokens, shape.key_heads).items():
            same = "stripe" not in name and "Ulysses" not in name
            check = errors if same else None
            with peer as attend:
                found[name] = measured(attend, tensors, options.repeats, check)
    return found


# --- telling ---

HEAD = (
    "tokens a rank", "mask", "", "forward", "backward", "both, TF/s", "of theory", "peak GiB",
    "errors of out, dq",
)  # fmt: skip


def rows(shape: Shape, found: dict[str, Result | str], ranks: int) -> list[list[str]]:
    """Of a table in Markdown."""
    flops, table = shape.flops(ranks), []
    mask = "causal" if shape.causal else "full"
    for name, result in found.items():
        start = [str(shape.tokens), mask, name]
        if isinstance(result, str):
            table.append([*start, f"failed: {result}", *[""] * 5])
            continue
        of = name.split(", ")[1] + GRAPH * name.endswith((GRAPH, REPLAYED)) if ", " in name else ""
        theory = found.get(THEORY + of)
        share = f"{theory.both / result.both:.0%}" if isinstance(theory, Result) else ""
        shown = "" if result.errors is None else ", ".join(f"{e:.0e}" for e in result.errors)
        table.append([
            *start, *speeds(flops, result.forward, result.both), share, f"{result.peak:.1f}", shown,
        ])  # fmt: skip
    return table


def plot(table: list[list[str]], path: Path) -> None:
    """TF/s both ways over tokens, a line for each subject."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    masks = sorted({row[1] for row in table})
    figure = Figure(figsize=(7 * len(masks), 5), layout="constrained")
    for axes, mask in zip(figure.subplots(1, len(masks), squeeze=False)[0], masks):
        for name in dict.fromkeys(row[2] for row in table):
            points = [(int(r[0]), float(r[5])) for r in table if r[1:3] == [mask, name] and r[5]]
            if points:
                style = "--" if name.startswith(THEORY) else "-"
                axes.plot(*zip(*sorted(points)), style, marker="o", label=name)
        axes.set(xscale="log", xlabel="tokens a rank", ylabel="TF/s a rank, both", title=mask)
        tokens = sorted({int(row[0]) for row in table})
        axes.set_xticks(tokens, [f"{n / 1024:g}k" for n in tokens])
        axes.minorticks_off()
        axes.set_ylim(0)
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def trace(shape: Shape, options: Options, folder: Path) -> None:
    """A profiler's trace of each of ours, a file for each rank."""
    from torch.profiler import ProfilerActivity, profile

    rank, tensors = dist.get_rank(), shape.tensors(shape.tokens, seed=dist.get_rank())
    folder.mkdir(parents=True, exist_ok=True)
    kinds = [ProfilerActivity.CPU]
    kinds += [ProfilerActivity.CUDA] if shape.device.type == "cuda" else []
    for kernel in options.kernels:
        for transport in options.transports:
            each, name = ours(shape, kernel, transport, 1, tensors), name_of(kernel, transport)
            name += REPLAYED if options.graphs and name + REPLAYED in each else ""
            _, both = passes(each[name], tensors)
            run = captured(both) if options.graphs else both
            for last in (False, True):
                dist.barrier()
                with profile(activities=kinds) as profiler:
                    run()
                    synchronize(shape.device)
                if last:
                    name = f"{transport}-{kernel}-{shape.tokens}-rank{rank}.json"
                    profiler.export_chrome_trace(str(folder / name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tokens", type=int, nargs="+", help="of one rank")
    parser.add_argument("--mask", nargs="+", default=["causal", "full"], choices=("causal", "full"))
    parser.add_argument("--heads", type=int, nargs=2, default=[32, 8], metavar=("H", "H_KV"))
    parser.add_argument("--dim-head", type=int, default=128)
    parser.add_argument("--dtype", help="bfloat16 on CUDA, float32 on the CPU")
    parser.add_argument("--kernels", nargs="+", choices=list(KERNELS))
    parser.add_argument("--transports", nargs="+", default=list(TRANSPORTS))
    parser.add_argument("--ulysses", type=int, nargs="+", default=[1])
    parser.add_argument("--graphs", action="store_true", help="ours as CUDA graphs, too")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--theory-up-to", type=int, default=300_000, help="tokens of the whole")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--million", action="store_true", help="2 ** 20 tokens in all, once")
    parser.add_argument("--save", type=Path, metavar="DIR", help="write DIR/DATE-ring.md and .png")
    parser.add_argument("--trace", type=Path, metavar="DIR", help="profiler traces; no table")
    asked = parser.parse_args()
    device, dtype = begun(asked.device)
    ranks, first = dist.get_world_size(), dist.get_rank() == 0
    dtype = getattr(torch, asked.dtype) if asked.dtype else dtype
    on_gpu = asked.device == "cuda"
    kernels = asked.kernels or _able(device, dtype, asked.dim_head)
    options = Options(
        kernels, asked.transports, asked.ulysses, on_gpu and not asked.no_peers,
        asked.theory_up_to, asked.repeats, asked.graphs,
    )  # fmt: skip
    tokens = asked.tokens or [2**n for n in (range(10, 18) if on_gpu else (6,))]
    if asked.million:
        tokens, options = [2**20 // ranks], options._replace(theory_up_to=0, repeats=1, peers=False)
    shapes = [
        Shape(n, mask == "causal", *asked.heads, asked.dim_head, device, dtype)
        for mask in asked.mask for n in tokens
    ]  # fmt: skip
    if asked.trace is not None:
        for shape in shapes:
            trace(shape, options, asked.trace)
    else:
        table = []
        for shape in shapes:
            new = rows(shape, all_of(shape, options), ranks)
            table += new
            if first:
                print("\n".join(" | ".join(row) for row in new), flush=True)
        if first:
            tell(table, asked, ranks, device, dtype)
    dist.destroy_process_group()


def _able(device: torch.device, dtype: torch.dtype, d: int) -> list[str]:
    """Kernels that are meant for the device, the slow one that does everything apart."""
    from ring_attention_pytorch.runtime.interfaces import KernelRequest

    q = torch.empty(1, 0, 1, d, device=device, dtype=dtype)
    case = KernelRequest.of(q, q)
    return [n for n in KERNELS if n != "eager" and problem(n, case) is None]


def tell(
    table: list[list[str]],
    asked: argparse.Namespace,
    ranks: int,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Print, and keep if asked to."""
    today = datetime.date.today()
    report = (
        f"# Attention over {ranks} x {device_name(device)}, {today}\n\n"
        f"torch {torch.__version__}, {dtype}, heads {asked.heads}, d {asked.dim_head}, batch 1; "
        "`benchmarks/bench_ring.py` says what is counted.\n\n" + markdown(HEAD, table) + "\n"
    )
    print(report)
    if asked.save is not None:
        asked.save.mkdir(parents=True, exist_ok=True)
        path = asked.save / f"{today}-ring.md"
        plot(table, path.with_suffix(".png"))
        path.write_text(f"{report}\n![TF/s]({path.stem}.png)\n")
        print(f"saved {path}")


if __name__ == "__main__":
    main()
