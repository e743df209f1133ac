"""Time what one rank of many has to do, on one GPU, where nothing travels between GPUs.

    torchrun --nproc-per-node 1 -m benchmarks rank --of 4 --tokens 2048 4096 8192
    torchrun --nproc-per-node 1 -m benchmarks rank --device cpu --tokens 64 --heads 4 2

"theory" is the kernel over the whole sequence, its time divided by the ranks; shares are of it.
"gather" is all that a rank does, with its own memory read in place of the others', and barriers
that nobody is late for. "calls alone" leaves out what moves keys and gradients. In mode "graph"
forward and backward are captured as one CUDA graph, "replayed" is a plan `in_graphs()`. Times are
medians of rounds that take turns, for clocks change; backward is both less forward. "host_us" is
how long the host takes to launch both, the device being idle.
"""

from collections.abc import Iterator, Sequence
from itertools import product

import torch.distributed as dist

from benchmarks.lib.options import parser
from benchmarks.lib.results import (
    GRAPH,
    REPLAYED,
    Row,
    Run,
    Subject,
    by_pass,
    microseconds,
)
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
    theory_of,
)
from benchmarks.lib.still import ALONE, still
from ring_attention_pytorch.ranks.ring import Ring


class Imagined(Ring):
    """Stand among `size` ranks of whom one is there: all say what it says, and have what it has."""

    def __init__(self, rank: int, size: int) -> None:
        self.group, self.size, self.rank, self.first = None, size, rank, 0

    def gather_bytes(self, message: bytes, size: int = 0) -> list[bytes]:
        return [message] * self.size

    def shared(self) -> tuple[dist.ProcessGroup, tuple[int, ...]] | None:
        return dist.group.WORLD, (0,) * self.size


def subjects(shape: Shape, kernel: str, rank: int, ranks: int) -> Runs:
    """Make the calls of each subject."""
    tensors, whole = (shape.tensors(shape.tokens * n, seed=0) for n in (1, ranks))
    ring = Imagined(rank, ranks)
    options = dict(layout=shape.layout, kernel=kernel, transport="gather", group=ring)
    plan = make_plan(shape, tensors, **options)
    found = {
        Subject(THEORY, kernel): passes(alone(shape, kernel, whole), whole),
        Subject(ALONE, kernel): passes(still(plan), tensors),
    }
    if shape.device.type == "cpu":  # others' memory is only read where it can be shared
        return found
    gather = Subject("gather", kernel)
    replayed = passes(planned(plan.in_graphs()), tensors)
    graphs = {
        subject._replace(mode=GRAPH): tuple(map(captured, runs))
        for subject, runs in (found | {gather: replayed}).items()
    }
    found[gather] = passes(planned(plan), tensors)
    return found | graphs | {gather._replace(mode=REPLAYED): replayed}


def rows(shape: Shape, rank: int, ranks: int, times: dict[Subject, Times]) -> Iterator[Row]:
    """Make the rows of each subject."""
    place = {"ranks": ranks, "rank": rank}
    for subject, (forward, both, host) in times.items():
        parts = ranks if subject.name == THEORY else 1
        share = times[theory_of(subject)].both / ranks * parts / both
        figures = microseconds(forward / parts, both / parts)
        about = place | shape.about() | subject.about()
        yield from by_pass(
            about, "microseconds", figures, share=round(share, 3), host_us=round(host * 1e6)
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and with `--save` keep."""
    options = parser(
        "rank", __doc__, save="ring", device="cuda", tokens=[2048, 4096, 8192], mask=["causal"],
        heads=[32, 8], dim_head=128, dtype=None, kernels=["sdpa-cudnn"], rounds=7, repeats=8,
    )  # fmt: skip
    options.add_argument("--of", type=int, default=4, help="ranks")
    options.add_argument("--ranks", type=int, nargs="+", default=[1], help="which of them")
    asked = options.parse_args(argv)
    with joined(asked.device) as device:
        run = Run("rank", argv, device_name(device), asked.save, **gpus(device))
        for shape, kernel, rank in product(shapes(asked, device), asked.kernels, asked.ranks):
            runs = subjects(shape, kernel, rank, asked.of)
            times = by_turns(runs, device, asked.rounds, asked.repeats)
            run.add(rows(shape, rank, asked.of, times))
        run.finish()
