"""What one rank of many has to do, on one GPU: what is left when nothing travels between GPUs.

    torchrun --nproc-per-node 1 -m benchmarks.bench_rank --of 4 --tokens 2048 4096 8192
    torchrun --nproc-per-node 1 -m benchmarks.bench_rank --device cpu --tokens 64 --heads 4 2

"theory" is the kernel over the whole sequence, its time divided by the ranks. "gather" is all that
a rank does, with its own memory read in place of the others', and barriers that nobody is late
for. "calls alone" leaves out what moves keys and gradients. "in a graph" are forward and backward
captured as one CUDA graph, "replayed" those of a plan `in_graphs()`. Times are medians of rounds
that take turns, for clocks change; backward is both less forward. "host" is how long the host takes
to launch both, the device being idle.
"""

import argparse

import torch
import torch.distributed as dist

from benchmarks.bench_ring import alone
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
from benchmarks.still import still
from ring_attention_pytorch import RingPlan, ring_attn
from ring_attention_pytorch.comm.ring import Ring

HEAD = (
    "tokens a rank", "rank", "kernel", "", "forward, us", "backward, us", "of theory", "host, us",
)  # fmt: skip


class Imagined(Ring):
    """A place among `size` of whom one is there: all say what it says, and have what it has."""

    def __init__(self, rank: int, size: int) -> None:
        self.group, self.size, self.rank, self.first = None, size, rank, 0

    def gather_bytes(self, message: bytes, size: int = 0) -> list[bytes]:
        return [message] * self.size

    def shared(self) -> tuple[dist.ProcessGroup, tuple[int, ...]] | None:
        return dist.group.WORLD, (0,) * self.size


def subjects(shape: Shape, kernel: str, rank: int, ranks: int) -> Runs:
    """Theory first."""
    tensors, whole = (shape.tensors(shape.tokens * n, seed=0) for n in (1, ranks))
    q, k, v = (t.detach().requires_grad_() for t in tensors[:3])
    plan = RingPlan.make(
        q, k, v, causal=shape.causal, layout=shape.layout, kernel=kernel, transport="gather",
        group=Imagined(rank, ranks),
    )  # fmt: skip
    found = {"theory": passes(alone(shape, kernel, whole), whole)}
    found["calls alone"] = passes(still(plan), tensors)
    if not q.is_cuda:  # others' memory is only read where it can be shared
        return found
    found["gather"] = passes(lambda q, k, v: ring_attn(q, k, v, plan=plan), tensors)
    again = plan.in_graphs()
    replayed = passes(lambda q, k, v: ring_attn(q, k, v, plan=again), tensors)
    in_graphs = found | {"gather": replayed}
    found |= {f"{name}, in a graph": tuple(map(captured, runs)) for name, runs in in_graphs.items()}
    return found | {"gather, replayed": replayed}


def rows(shape: Shape, kernel: str, rank: int, ranks: int, times: dict[str, Times]) -> list:
    """Of a table in Markdown."""
    table = []
    for name, (forward, both, host) in times.items():
        theory = "theory, in a graph" if ", " in name else "theory"
        if name == theory:
            forward, both = forward / ranks, both / ranks
        share = times[theory].both / ranks / both
        table.append([
            str(shape.tokens), str(rank), kernel, name, f"{forward * 1e6:.0f}",
            f"{(both - forward) * 1e6:.0f}", f"{share:.1%}", f"{host * 1e6:.0f}",
        ])  # fmt: skip
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--of", type=int, default=4, help="ranks")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1], help="which of them")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--mask", nargs="+", default=["causal"], choices=("causal", "full"))
    parser.add_argument("--heads", type=int, nargs=2, default=[32, 8], metavar=("H", "H_KV"))
    parser.add_argument("--dim-head", type=int, default=128)
    parser.add_argument("--kernels", nargs="+", default=["sdpa-cudnn"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=8)
    asked = parser.parse_args()
    device, dtype = begun(asked.device)
    table = []
    for mask in asked.mask:
        for tokens in asked.tokens:
            shape = Shape(tokens, mask == "causal", *asked.heads, asked.dim_head, device, dtype)
            for kernel in asked.kernels:
                for rank in asked.ranks:
                    runs = subjects(shape, kernel, rank, asked.of)
                    times = by_turns(runs, device, asked.rounds, asked.repeats)
                    table += rows(shape, kernel, rank, asked.of, times)
    name = device_name(device)
    print(f"One of {asked.of} ranks, on {name}, torch {torch.__version__}, {dtype}\n")
    print(markdown(HEAD, table))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
