"""How near a gather comes to its kernel under load that lasts, where a GPU is at its power limit.

    torchrun --nproc-per-node 4 -m benchmarks.bench_sustained --tokens 8192 16384 32768
    torchrun --nproc-per-node 2 -m benchmarks.bench_sustained --device cpu --tokens 64 --heads 4 2

Subjects take turns of a third of a second. "theory" is the kernel over the whole sequence, its time
divided by the ranks; "NVLink awake" the same while some MB come from another rank every 10 ms,
which nobody waits for. For links that were used stay awake for some time (50 ms, says `nvidia-smi
nvlink -gLowPwrInfo` of an H200), and what they draw the kernel can't have. "calls alone" are those
of the gather, while nothing travels. Times are the slowest rank's; "host" is how long it takes to
launch one pass forward and backward.
"""

import argparse
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.bench_ring import THEORY, alone
from benchmarks.rings import (
    Runs,
    Shape,
    Times,
    begun,
    by_turns,
    captured,
    device_name,
    markdown,
    passes,
    speeds,
)
from benchmarks.still import still
from ring_attention_pytorch import RingPlan, ring_attn
from ring_attention_pytorch.comm.gather_symmetric import SymmetricGather

HEAD = (
    "tokens a rank", "mask", "kernel", "", "forward", "backward", "both, TF/s", "of theory",
    "host, us",
)  # fmt: skip
AWAKE = THEORY + "NVLink awake"
COMES, PAUSE = 16 << 20, 0.01  # bytes, and seconds from one time to the next


def subjects(shape: Shape, kernel: str, graphs: bool) -> tuple[Runs, dict[str, Callable]]:
    """Theory first; and what the host does beside one of them."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tensors, whole = shape.tensors(shape.tokens, rank), shape.tensors(shape.tokens * ranks, 0)
    q, k, v = (t.detach().requires_grad_() for t in tensors[:3])
    plan = RingPlan.make(
        q, k, v, causal=shape.causal, layout=shape.layout, kernel=kernel, transport="gather"
    )
    plan = plan.in_graphs() if graphs and ranks > 1 else plan
    found = {
        "theory": passes(alone(shape, kernel, whole), whole),
        "calls alone": passes(still(plan), tensors),
        "gather": passes(lambda q, k, v: ring_attn(q, k, v, plan=plan), tensors),
    }
    if graphs:
        found = {name: tuple(map(captured, runs)) for name, runs in found.items()}
    if ranks == 1 or not isinstance(plan.transport, SymmetricGather):
        return found, {}
    found[AWAKE] = found["theory"]
    return found, {AWAKE: coming(plan.transport)}


def coming(transport: SymmetricGather) -> Callable[[], None]:
    """Some bytes out of the next rank's memory, if it is time."""
    space, ring = transport.space, transport.ring
    there = space.keys.halves[transport.ranks[(ring.rank + 1) % ring.size]].flatten()[:COMES]
    here, stream, last = torch.empty_like(there), torch.cuda.Stream(space.device), 0.0

    def come() -> None:
        nonlocal last
        if time.perf_counter() - last >= PAUSE:
            last = time.perf_counter()
            with torch.cuda.stream(stream):
                here.copy_(there)

    return come


def rows(shape: Shape, kernel: str, times: dict[str, Times]) -> list[list[str]]:
    """Of a table in Markdown."""
    ranks, table = dist.get_world_size(), []
    flops, theory = shape.flops(ranks), times["theory"].both / ranks
    for name, (forward, both, host) in times.items():
        if name.startswith("theory"):
            forward, both = forward / ranks, both / ranks
        table.append([
            str(shape.tokens), "causal" if shape.causal else "full", kernel, name,
            *speeds(flops, forward, both), f"{theory / both:.1%}", f"{host * 1e6:.0f}",
        ])  # fmt: skip
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384, 32768])
    parser.add_argument("--mask", nargs="+", default=["causal"], choices=("causal", "full"))
    parser.add_argument("--heads", type=int, nargs=2, default=[32, 8], metavar=("H", "H_KV"))
    parser.add_argument("--dim-head", type=int, default=128)
    parser.add_argument("--kernels", nargs="+", default=["sdpa-cudnn"])
    parser.add_argument("--graphs", action="store_true", help="all in CUDA graphs")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=1, help="calls of a turn, at least")
    parser.add_argument("--load", type=float, default=0.33, help="seconds of a turn")
    asked = parser.parse_args()
    device, dtype = begun(asked.device)
    first, table = dist.get_rank() == 0, []
    for mask in asked.mask:
        for tokens in asked.tokens:
            shape = Shape(tokens, mask == "causal", *asked.heads, asked.dim_head, device, dtype)
            for kernel in asked.kernels:
                runs, beside = subjects(shape, kernel, asked.graphs)
                times = by_turns(runs, device, asked.rounds, asked.repeats, asked.load, beside)
                table += (new := rows(shape, kernel, times))
                if first:
                    print("\n".join(" | ".join(row) for row in new), flush=True)
                del runs, beside
    if first:
        ranks, name = dist.get_world_size(), device_name(device)
        print(f"\n{ranks} ranks, {name}, torch {torch.__version__}, {dtype}\n")
        print(markdown(HEAD, table))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
