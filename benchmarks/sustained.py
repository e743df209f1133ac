"""Compare a gather with its kernel under load that lasts, where a GPU is at its power limit.

    torchrun --nproc-per-node 4 -m benchmarks sustained --tokens 8192 16384 32768
    torchrun --nproc-per-node 2 -m benchmarks sustained --device cpu --tokens 64 --heads 4 2

Subjects take turns of a third of a second. "theory" is the kernel over the whole sequence, its time
divided by the ranks; shares are of it. "NVLink awake" is the same while some MB come from another
rank every 10 ms, which nobody waits for. For links that were used stay awake for some time (50 ms,
says `nvidia-smi nvlink -gLowPwrInfo` of an H200), and what they draw the kernel can't have. "calls
alone" are those of the gather, while nothing travels. Times are the slowest rank's; "host_us" is
how long it takes to launch one pass forward and backward.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product

import torch
import torch.distributed as dist

from benchmarks.lib.options import parser
from benchmarks.lib.results import GRAPH, ONE_BY_ONE, Row, Run, Subject, by_pass, tflops
from benchmarks.lib.rings import (
    THEORY,
    Runs,
    Shape,
    Times,
    alone,
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
from benchmarks.lib.still import ALONE, still
from ring_attention_pytorch.comm.fabric_shared import SharedMemory

AWAKE = f"{THEORY}, NVLink awake"
COMES, PAUSE = 16 << 20, 0.01  # bytes, and seconds from one time to the next


def subjects(shape: Shape, kernel: str, graphs: bool) -> tuple[Runs, dict[Subject, Callable]]:
    """Make the calls of each subject; and host work to run next to one of them."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tensors, whole = shape.tensors(shape.tokens, rank), shape.tensors(shape.tokens * ranks, 0)
    plan = make_plan(shape, tensors, layout=shape.layout, kernel=kernel, transport="gather")
    named = {
        THEORY: passes(alone(shape, kernel, whole), whole),
        ALONE: passes(still(plan), tensors),
        "gather": passes(planned(plan), tensors),
    }
    if graphs:
        named = {name: tuple(map(captured, runs)) for name, runs in named.items()}
    host_work = {}
    if ranks > 1 and isinstance(plan.transport.fabric, SharedMemory):
        named[AWAKE] = named[THEORY]
        host_work[AWAKE] = copies_in_flight(plan.transport.fabric)
    mode = GRAPH if graphs else ONE_BY_ONE
    runs = {Subject(name, kernel, mode): each for name, each in named.items()}
    return runs, {Subject(name, kernel, mode): call for name, call in host_work.items()}


def copies_in_flight(fabric: SharedMemory) -> Callable[[], None]:
    """Return what copies some bytes out of the next rank's memory, if it is time."""
    space, ring = fabric.space, fabric.ring
    there = space.keys.slots[fabric.ranks[(ring.rank + 1) % ring.size]].flatten()[:COMES]
    here, stream, last = torch.empty_like(there), torch.cuda.Stream(space.device), 0.0

    def come() -> None:
        nonlocal last
        if time.perf_counter() - last >= PAUSE:
            last = time.perf_counter()
            with torch.cuda.stream(stream):
                here.copy_(there)

    return come


def rows(shape: Shape, times: dict[Subject, Times]) -> Iterator[Row]:
    """Make the rows of each subject."""
    ranks = dist.get_world_size()
    (theory,) = (each.both / ranks for subject, each in times.items() if subject.name == THEORY)
    for subject, (forward, both, host) in times.items():
        if subject.name.startswith(THEORY):
            forward, both = forward / ranks, both / ranks
        about = {"load": "lasting"} | shape.about() | subject.about()
        figures, share = tflops(shape.flops(ranks), forward, both), round(theory / both, 3)
        yield from by_pass(about, "tflops", figures, share=share, host_us=round(host * 1e6))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and with `--save` keep."""
    options = parser(
        "sustained", __doc__, save="ring", device="cuda", tokens=[8192, 16384, 32768],
        mask=["causal"], heads=[32, 8], dim_head=128, dtype=None, kernels=["sdpa-cudnn"],
        graphs=False, rounds=7, repeats=1,
    )  # fmt: skip
    options.add_argument("--load", type=float, default=0.33, help="seconds of a turn")
    asked = options.parse_args(argv)
    with joined(asked.device) as device:
        run = Run("sustained", argv, device_name(device), asked.save, **gpus(device))
        for shape, kernel in product(shapes(asked, device), asked.kernels):
            runs, host_work = subjects(shape, kernel, asked.graphs)
            times = by_turns(runs, device, asked.rounds, asked.repeats, asked.load, host_work)
            run.add(rows(shape, times))
            del runs, host_work
        run.finish()
