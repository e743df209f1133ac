"""Time what one rank of many has to do, on one GPU, where nothing travels between GPUs.

    torchrun --nproc-per-node 1 -m benchmarks rank --of 4 --tokens 2048 4096 8192
    torchrun --nproc-per-node 1 -m benchmarks rank --of 2 --ranks 0 1 --documents "two, one of 84 %"
    torchrun --nproc-per-node 1 -m benchmarks rank --device cpu --tokens 64 --heads 4 2

FLOPs are those of visible pairs, the mean of all ranks, backward 2.5 times forward. Documents are
dealt evenly. "theory" is the kernel over the whole sequence, its time divided by the ranks; shares
are of it. "gather" is all that a rank does, with its own memory read in place of the others', and
barriers that nobody is late for. "calls alone" leaves out what moves keys and gradients. In mode
"graph" forward and backward are captured as one CUDA graph.
Times are medians of rounds that take turns, for clocks change; "us" is both passes. "host_us" is
how long the host takes to launch both, the device being idle.
"""

from collections.abc import Iterator, Sequence
from itertools import product

from benchmarks.lib.imagined import Imagined
from benchmarks.lib.options import parser
from benchmarks.lib.results import (
    GRAPH,
    Row,
    Run,
    Subject,
    by_pass,
    tflops,
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
from benchmarks.lib.sequences import KINDS, Mask, of_all, packed
from benchmarks.lib.still import ALONE, still


def cases(shape: Shape, documents: Sequence[str], ranks: int) -> Iterator[tuple[str, Mask]]:
    """Make the masks of a shape, by name."""
    length = shape.tokens * ranks
    for kind in documents:
        yield f"documents {kind}", packed(kind, length, ranks, multiple=2 * ranks)
    if not documents:
        yield shape.about()["mask"], of_all(length, shape.causal)


def subjects(shape: Shape, mask: Mask, kernel: str, rank: int, ranks: int) -> Runs:
    """Make the calls of each subject."""
    tensors, every = (shape.tensors(shape.tokens * n, seed=0) for n in (1, ranks))
    ring = Imagined(rank, ranks)
    options = dict(layout=mask.layout, kernel=kernel, transport="gather", group=ring)
    plan = make_plan(shape, tensors, **options, **mask.options)
    found = {
        Subject(THEORY, kernel): passes(alone(shape, kernel, every, **mask.options), every),
        Subject(ALONE, kernel): passes(still(plan), tensors),
    }
    if shape.device.type == "cpu":  # others' memory is only read where it can be shared
        return found
    found[Subject("gather", kernel)] = passes(planned(plan), tensors)
    return found | {
        subject._replace(mode=GRAPH): tuple(map(captured, runs)) for subject, runs in found.items()
    }


def rows(about: Row, flops: float, ranks: int, times: dict[Subject, Times]) -> Iterator[Row]:
    """Make the rows of each subject; FLOPs are of one rank, forward."""
    for subject, (forward, both, host) in times.items():
        parts = ranks if subject.name == THEORY else 1
        figures = tflops(flops, forward / parts, both / parts)
        said: Row = {
            "us": round(1e6 * both / parts),
            "share": round(times[theory_of(subject)].both / ranks * parts / both, 3),
            "host_us": round(1e6 * host),
        }
        yield from by_pass(about | subject.about(), "tflops", figures, **said)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and with `--save` keep."""
    options = parser(
        "rank", __doc__, save="rank", device="cuda", tokens=[2048, 4096, 8192], mask=["causal"],
        heads=[32, 8], dim_head=128, dtype=None, kernels=["sdpa-cudnn"], rounds=7, repeats=8,
    )  # fmt: skip
    options.add_argument("--of", type=int, default=4, help="ranks")
    options.add_argument("--ranks", type=int, nargs="+", default=[1], help="which of them")
    options.add_argument("--documents", nargs="+", default=[], choices=list(KINDS))
    asked = options.parse_args(argv)
    with joined(asked.device) as device:
        run = Run("rank", argv, device_name(device), asked.save, **gpus(device))
        for shape in shapes(asked, device):
            for name, mask in cases(shape, asked.documents, asked.of):
                flops = 4.0 * mask.pairs * shape.heads * shape.d / asked.of
                for kernel, rank in product(asked.kernels, asked.ranks):
                    runs = subjects(shape, mask, kernel, rank, asked.of)
                    times = by_turns(runs, device, asked.rounds, asked.repeats)
                    about = {"ranks": asked.of, "rank": rank} | shape.about() | {"mask": name}
                    run.add(rows(about, flops, asked.of, times))
        run.finish()
