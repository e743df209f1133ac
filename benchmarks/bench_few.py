"""Few tokens a rank: keys that come together beside a gather that overlaps, by turns in one run.

    torchrun --nproc-per-node 2 -m benchmarks.bench_few --tokens 2048 4096 --peers
    torchrun --nproc-per-node 2 -m benchmarks.bench_few --documents "of 1 to 999 tokens"
    torchrun --nproc-per-node 2 -m benchmarks.bench_few --device cpu --tokens 64 --heads 4 2

Both are measured whichever a plan would take, launched one by one, and with `--graphs` as CUDA
graphs; "replayed" is a plan `in_graphs()`. Times are medians of rounds of the slowest rank;
backward is both less forward. "host" is how long the host takes to launch both, the device being
idle. Without shared memory there is only what the plan takes.
"""

import argparse
from contextlib import ExitStack

import torch
import torch.distributed as dist

from benchmarks import gpu_peers
from benchmarks.bench_balance import KINDS
from benchmarks.bench_masks import made, packed, whole
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
)
from ring_attention_pytorch import RingPlan, ring_attn
from ring_attention_pytorch.comm.gather_first import GatherFirst
from ring_attention_pytorch.comm.gather_symmetric import SymmetricGather
from ring_attention_pytorch.comm.symmetric_memory import shared_by

HEAD = (
    "tokens a rank", "documents", "kernel", "", "forward, us", "backward, us", "both, us",
    "host, us",
)  # fmt: skip


def both_ways(plan: RingPlan) -> dict[str, RingPlan]:
    """The plan overlapping and together, where there can be both."""
    gather = plan.overlapped or plan.transport
    if not isinstance(gather, SymmetricGather):
        return {"gather": plan}
    shared = shared_by(gather.ring, plan.device)
    together = GatherFirst.like(gather, plan.blocks, plan.kv_shape, shared)
    return {"overlapping": plan.by(gather), "together": plan.by(together)}


def subjects(shape: Shape, kernel: str, documents: str | None, graphs: bool) -> Runs:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tensors, length = shape.tensors(shape.tokens, seed=rank), shape.tokens * ranks
    mask = whole(length, ranks) if documents is None else packed(documents, length, ranks)
    _, plan = made(shape, mask, kernel, tensors)
    plans = both_ways(plan)
    if plan.device.type == "cuda" and plan.transport.capturable:
        plans["replayed"] = plan.in_graphs()
    found = {
        name: passes(lambda q, k, v, each=each: ring_attn(q, k, v, plan=each), tensors)
        for name, each in plans.items()
    }
    if graphs:
        ours = {name: runs for name, runs in found.items() if name != "replayed"}
        found |= {f"{name}, in a graph": tuple(map(captured, runs)) for name, runs in ours.items()}
    return found


def peers(shape: Shape, stack: ExitStack) -> Runs:
    """Those that take a causal sequence without documents, but PyTorch's own."""
    tensors = shape.tensors(shape.tokens, seed=dist.get_rank())
    found = gpu_peers.peers(True, shape.tokens, shape.key_heads)
    torch.cuda.set_device(shape.device)  # which some of them change as they are imported
    return {
        name: passes(stack.enter_context(peer), tensors)
        for name, peer in found.items()
        if not name.startswith("torch")
    }


def rows(shape: Shape, kernel: str, documents: str | None, times: dict[str, Times]) -> list:
    """Of a table in Markdown."""
    start = str(shape.tokens), documents or "one", kernel
    return [
        [*start, name, *(f"{t * 1e6:.0f}" for t in (forward, both - forward, both, host))]
        for name, (forward, both, host) in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192])
    parser.add_argument("--documents", nargs="+", default=[None], choices=list(KINDS))
    parser.add_argument("--heads", type=int, nargs=2, default=[32, 8], metavar=("H", "H_KV"))
    parser.add_argument("--kernels", nargs="+", default=[None])
    parser.add_argument("--graphs", action="store_true", help="both as CUDA graphs, too")
    parser.add_argument("--peers", action="store_true", help="beside the first kernel")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--repeats", type=int, default=8)
    asked = parser.parse_args()
    device, dtype = begun(asked.device)
    table = []
    for tokens in asked.tokens:
        shape = Shape(tokens, True, *asked.heads, 128, device, dtype)
        for documents in asked.documents:
            for kernel in asked.kernels:
                with ExitStack() as stack:
                    runs = subjects(shape, kernel, documents, asked.graphs)
                    if asked.peers and documents is None and kernel == asked.kernels[0]:
                        runs |= peers(shape, stack)
                    times = by_turns(runs, device, asked.rounds, asked.repeats, 0.05)
                new = rows(shape, kernel or "chosen", documents, times)
                table += new
                if dist.get_rank() == 0:
                    print("\n".join(" | ".join(row) for row in new), flush=True)
    if dist.get_rank() == 0:
        print(
            f"{dist.get_world_size()} x {device_name(device)}, torch {torch.__version__}, {dtype}\n"
        )
        print(markdown(HEAD, table))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
