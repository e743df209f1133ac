"""Say where a GPU's time goes, ours and other libraries': attention, waiting, the rest.

    torchrun --nproc-per-node 4 -m benchmarks timeline --tokens 8192 --kernels sdpa-cudnn

Each subject is called some times, forward and backward, under PyTorch's profiler. A call's time is
split: "attention_us" while any attention runs, "transfer_us" while nothing but transfers runs,
"other_us" while only something else does (elementwise, copies), "idle_us" while nothing runs. They
are means of the ranks and sum to "microseconds". "apart_us" is the attention that runs beside
another one, counted twice. Names of what takes longest are printed by the first rank.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from benchmarks.lib.attempts import attempt
from benchmarks.lib.options import parser
from benchmarks.lib.results import Row, Run, Subject, failed
from benchmarks.lib.rings import Attend, Shape, device_name, gpus, joined, passes, shapes
from benchmarks.lib.spans import ATTENTION, Span, longest, recorded, split
from benchmarks.lib.transformer_engine import MODES
from benchmarks.peers import cases, ours, theirs

CALLS = 5


def timed(shape: Shape, attend: Attend) -> list[float]:
    """Return the mean microseconds of each part, and of attention that runs twice at once."""
    _, both = passes(attend, shape.tensors(shape.tokens, seed=dist.get_rank()))
    for _ in range(3):
        both()
    spans = recorded(both, CALLS, dist.barrier)
    if dist.get_rank() == 0:
        print(*longest(spans), sep="\n", flush=True)
    parts = split(spans)
    found = [each / CALLS for each in (*parts, alone(spans) - parts.attention)]
    mean = torch.tensor(found, device=shape.device, dtype=torch.float64)
    dist.all_reduce(mean)
    return (mean / dist.get_world_size()).tolist()


def alone(spans: list[Span]) -> float:
    """Sum the time of attention, as if each ran alone."""
    return sum(s.stop - s.start for s in spans if s.kind == ATTENTION)


def rows(shape: Shape, subject: Subject, found: list[float] | str) -> Iterator[Row]:
    """Make the row of a subject."""
    about = shape.about() | subject.about()
    if isinstance(found, str):
        yield from failed(about, found)
        return
    names = "attention_us", "transfer_us", "other_us", "idle_us", "microseconds", "apart_us"
    yield about | {"pass": "both"} | {name: round(each) for name, each in zip(names, found)}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and with `--save` keep."""
    options = parser(
        "timeline", __doc__, save="timeline", device="cuda", tokens=[8192], mask=["causal"],
        heads=[32, 8], dim_head=128, dtype=None, kernels=["sdpa-cudnn"],
    )  # fmt: skip
    options.add_argument("--engine", nargs="+", help="kernels in TransformerEngine; all, unless")
    options.add_argument("--modes", nargs="+", default=MODES, choices=MODES, help="of it")
    options.set_defaults(
        documents=[], window=[], graphs=False, all_peers=False, no_peers=False, device="cuda"
    )
    asked = options.parse_args(argv)
    with joined(asked.device) as device:
        run = Run("timeline", argv, device_name(device), asked.save, **gpus(device))
        for shape in shapes(asked, device):
            (case,) = cases(shape, asked)
            like = shape.tensors(shape.tokens, seed=dist.get_rank())
            every = ours(shape, case.ours, asked, like) | theirs(case, shape, asked)
            for subject, attend in every.items():
                found = attempt(lambda attend=attend, shape=shape: timed(shape, attend))
                run.add(rows(shape, subject, found))
        run.finish()
