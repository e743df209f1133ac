"""Time few tokens a rank: keys that come together beside a gather that overlaps, by turns.

    torchrun --nproc-per-node 2 -m benchmarks few --tokens 2048 4096 --peers
    torchrun --nproc-per-node 2 -m benchmarks few --documents "of 1 to 999 tokens"
    torchrun --nproc-per-node 2 -m benchmarks few --device cpu --tokens 64 --heads 4 2

Both are measured whichever a plan would take, by the plan's kernel: name one to compare the two
ways alone. They are launched one by one, and with `--graphs` as CUDA graphs. Times are medians of
rounds of the slowest rank; backward is both less forward.
"host_us" is how long the host takes to launch both, the device being idle. Without shared memory
there is only what the plan takes.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import torch
import torch.distributed as dist

from benchmarks.lib import peers
from benchmarks.lib.options import parser
from benchmarks.lib.results import GRAPH, Row, Run, Subject, by_pass, microseconds
from benchmarks.lib.rings import (
    Runs,
    Shape,
    Times,
    by_turns,
    captured,
    device_name,
    gpus,
    joined,
    make_plan,
    passes,
    planned,
    shapes,
)
from benchmarks.lib.sequences import KINDS, packed, whole
from ring_attention_pytorch import RingPlan
from ring_attention_pytorch.comm.symmetric_memory import shared_by
from ring_attention_pytorch.comm.transports import on_one_stream
from ring_attention_pytorch.schedule.policy import own_keys_apart


def both_ways(plan: RingPlan) -> dict[str, RingPlan]:
    """Return the plan overlapping and together, where there can be both.

    What it has itself is one of them, or both; what is made here is as a plan would make it.
    """
    gather = plan.chosen.overlapping_transport or plan.transport
    if not gather.fabric.name:  # messages
        return {"gather": plan}
    together = plan
    if plan.chosen.overlapping_transport is None:  # tokens are many
        of = plan.blocks, plan.chosen.shape, shared_by(gather.fabric.ring, plan.device)
        apart = own_keys_apart(plan.blocks, plan.kernel.traits.square)
        together = plan.by(
            on_one_stream(gather.fabric.ring, *of, apart, plan.kernel.traits.keys_first)
        )
    return {"gather, overlapping": plan.by(gather), "gather, together": together}


def ours(shape: Shape, kernel: str | None, documents: str | None, graphs: bool) -> Runs:
    """Make the calls of each way to gather."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tensors, length = shape.tensors(shape.tokens, seed=rank), shape.tokens * ranks
    mask = whole(length) if documents is None else packed(documents, length, ranks)
    options = dict(layout=mask.layout, kernel=kernel, transport="gather", **mask.options)
    plan = make_plan(shape, tensors, **options)
    name = plan.kernel.name
    found = {
        Subject(way, name): passes(planned(each), tensors) for way, each in both_ways(plan).items()
    }
    if graphs:
        found |= {
            subject._replace(mode=GRAPH): tuple(map(captured, runs))
            for subject, runs in found.items()
        }
    return found


def others(shape: Shape, stack: ExitStack) -> Runs:
    """Make the calls of peers that take a causal sequence without documents, but PyTorch's own."""
    tensors = shape.tensors(shape.tokens, seed=dist.get_rank())
    found = peers.peers(True, shape.tokens, shape.key_heads)
    torch.cuda.set_device(shape.device)  # which some of them change as they are imported
    return {
        Subject(name): passes(stack.enter_context(peer), tensors)
        for name, peer in found.items()
        if not name.startswith("torch")
    }


def rows(shape: Shape, documents: str | None, times: dict[Subject, Times]) -> Iterator[Row]:
    """Make the rows of each subject."""
    mask = "causal" if documents is None else f"documents {documents}"
    for subject, (forward, both, host) in times.items():
        about = shape.about() | {"mask": mask} | subject.about()
        figures = microseconds(forward, both)
        yield from by_pass(about, "microseconds", figures, host_us=round(host * 1e6))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and with `--save` keep."""
    options = parser(
        "few", __doc__, save="ring", device="cuda", tokens=[8192], heads=[32, 8], dim_head=128,
        dtype=None, kernels=[None], graphs=False, rounds=9, repeats=8,
    )  # fmt: skip
    options.add_argument("--documents", nargs="+", default=[None], choices=list(KINDS))
    options.add_argument("--peers", action="store_true", help="beside the first kernel")
    options.set_defaults(mask=["causal"])
    asked = options.parse_args(argv)
    with joined(asked.device) as device:
        run = Run("few", argv, device_name(device), asked.save, **gpus(device))
        for shape in shapes(asked, device):
            for documents in asked.documents:
                for kernel in asked.kernels:
                    with ExitStack() as stack:
                        runs = ours(shape, kernel, documents, asked.graphs)
                        if asked.peers and documents is None and kernel == asked.kernels[0]:
                            runs |= others(shape, stack)
                        times = by_turns(runs, device, asked.rounds, asked.repeats, load=0.05)
                    run.add(rows(shape, documents, times))
        run.finish()
