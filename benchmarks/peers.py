"""Measure ours beside other libraries, by turns: TF/s a GPU, errors and memory.

    torchrun --nproc-per-node 4 -m benchmarks peers --save
    torchrun --nproc-per-node 4 -m benchmarks peers --tokens 8192 --graphs --theory-up-to 70000
    torchrun --nproc-per-node 4 -m benchmarks peers --heads 64 8 --mask causal full
    torchrun --nproc-per-node 4 -m benchmarks peers --documents "one long, many short"
    torchrun --nproc-per-node 4 -m benchmarks peers --window 4096
    torchrun --nproc-per-node 2 -m benchmarks peers --device cpu --tokens 64 --heads 4 2

FLOPs are those of visible pairs, backward 2.5 times forward. All subjects take turns, for clocks
change; times are medians of rounds of the slowest rank. "default" marks the kernel that a plan
takes by itself, the transport being its choice always. "theory" is PyTorch's cuDNN kernel on one
GPU over the whole sequence, its time divided by the ranks. Errors are of the first call, against
float32. "peak_gib" is the most that a first call needs, with q, k, v and what comes into backward;
memory shared among ranks is counted, buffers of NCCL are not; nor is it known of graphs.

With `--rounds 0` there are first calls alone: errors and memory.

Lengths of documents are multiples of twice the ranks, so that TransformerEngine pads none: it has
two chunks of each document on each rank, ours has them dealt evenly. PyTorch's `context_parallel`
is not here: it changes what others call (`ring` has it).
"""

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.lib.attempts import attempt
from benchmarks.lib.options import parser
from benchmarks.lib.peers import peers as installed_peers
from benchmarks.lib.results import (
    GRAPH,
    ONE_BY_ONE,
    Row,
    Run,
    Subject,
    by_pass,
    failed,
    named_errors,
    rounded,
    tflops,
)
from benchmarks.lib.rings import (
    THEORY,
    Attend,
    Errors,
    Runs,
    Shape,
    Times,
    alone,
    by_turns,
    captured,
    checker,
    device_name,
    gpus,
    joined,
    make_plan,
    passes,
    planned,
    shapes,
)
from benchmarks.lib.sequences import KINDS, Mask, of_all, packed, window
from benchmarks.lib.transformer_engine import MODES, Asked, each_in_zigzag, engine
from benchmarks.ring import modes, shared_gib

Calls = tuple[Callable[[], None], Callable[[], tuple[Tensor, ...]]]  # forward, both


class Case(NamedTuple):
    """A mask as ours have it and as other libraries have it, the tokens laid out for each."""

    name: str
    ours: Mask
    theirs: Mask
    asked: Asked


class First(NamedTuple):
    """A first call: the errors of out and dq, and the GiB that it needs, if that is known."""

    errors: tuple[float, ...] | None
    peak: float | None

    def about(self) -> Row:
        """Return what rows say of it."""
        said: Row = {} if self.peak is None else {"peak_gib": round(self.peak, 2)}
        return said | {"errors": named_errors(("out", "dq"), self.errors or ())}


def cases(shape: Shape, asked: Namespace) -> Iterator[Case]:
    """Make the masks of a shape: one of documents, or a window, or all of it."""
    ranks = dist.get_world_size()
    length = shape.tokens * ranks
    for kind in asked.documents:
        mask = packed(kind, length, ranks, multiple=2 * ranks)
        cut = mask.options["cu_seqlens"]
        theirs = mask._replace(layout=each_in_zigzag(cut, ranks))
        yield Case(f"documents {kind}", mask, theirs, Asked(True, borders=cut))
    for size in asked.window:
        mask = window(length, size, "zigzag")
        yield Case(f"window {size}", mask, mask, Asked(True, window=size))
    if not asked.documents and not asked.window:
        mask = of_all(length, shape.causal)
        yield Case("causal" if shape.causal else "full", mask, mask, Asked(shape.causal))


def ours(shape: Shape, mask: Mask, asked: Namespace, like: list[Tensor]) -> dict[Subject, Attend]:
    """Make attention by each kernel, launched in each way; refused ones are left out."""
    found: dict[Subject, Attend] = {}
    for kernel in asked.kernels:
        try:
            plan = make_plan(shape, like, layout=mask.layout, kernel=kernel, **mask.options)
        except ValueError as error:  # the same on all ranks
            found[Subject("ours", kernel)] = partial(refuse, str(error))
            continue
        for mode, ready in modes(plan, asked.graphs):
            found[Subject("ours", plan.kernel.name, mode)] = planned(ready)
    return found


def refuse(reason: str, *_: Tensor) -> Tensor:
    raise ValueError(reason)


def theirs(case: Case, shape: Shape, asked: Namespace) -> dict[Subject, Attend]:
    """Return other libraries' attention, but PyTorch's own."""
    if asked.no_peers:
        return {}
    found = engine(case.asked, asked.engine, asked.modes)
    if asked.all_peers and case.name in ("causal", "full"):
        every = installed_peers(shape.causal, shape.tokens, shape.key_heads).items()
        found |= {name: each.__enter__() for name, each in every if not name.startswith("torch")}
    if shape.device.type == "cuda":
        torch.cuda.set_device(shape.device)  # which some change as they are imported
    return {Subject(name): attend for name, attend in found.items()}


def first(calls: Calls, tensors: list[Tensor], errors: Errors | None, shared: float) -> First:
    """Call both ways once; return its errors, and the memory that it needed."""
    cuda = tensors[0].device.type == "cuda"
    if cuda:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    results = calls[1]()[:2]
    found = None if errors is None else errors(*results)
    if not cuda:
        return First(found, 0.0)
    needed = torch.cuda.max_memory_allocated() - before + sum(t.nbytes for t in tensors)
    return First(found, needed / 2**30 + shared)


def measured(
    shape: Shape, case: Case, asked: Namespace
) -> tuple[dict[Subject, First | str], dict[Subject, Times]]:
    """Call each subject once; then have those that did not fail take turns."""
    tensors = shape.tensors(shape.tokens, seed=dist.get_rank())
    runs: Runs = {}
    firsts: dict[Subject, First | str] = {}
    sides = (
        (ours(shape, case.ours, asked, tensors), case.ours),
        (theirs(case, shape, asked), case.theirs),
    )
    for made, mask in sides:
        errors = checker(shape, tensors, mask.layout, mask.hidden) if made else None
        for subject, attend in made.items():
            calls = passes(attend, tensors)
            shared = shared_gib(shape.device) if subject.name == "ours" else 0.0
            result = attempt(partial(first, calls, tensors, errors, shared))
            if isinstance(result, First) and subject.mode != ONE_BY_ONE:
                result = result._replace(peak=None)  # a graph's memory is from before
            firsts[subject] = result
            if isinstance(result, First):
                runs[subject] = tuple(map(captured, calls)) if subject.mode == GRAPH else calls
    if case.name == "causal" and shape.tokens * dist.get_world_size() <= asked.theory_up_to:
        every = shape.tensors(shape.tokens * dist.get_world_size(), seed=0)
        runs[Subject(THEORY, asked.theory)] = passes(alone(shape, asked.theory, every), every)
    turns = asked.rounds, asked.repeats, asked.load
    times = by_turns(runs, shape.device, *turns) if runs and asked.rounds else {}
    return firsts, times


def rows(
    shape: Shape, case: Case, firsts: dict[Subject, First | str], times: dict[Subject, Times]
) -> Iterator[Row]:
    """Make the rows of each subject."""
    ranks = dist.get_world_size()
    flops = 4.0 * case.ours.pairs * shape.heads * shape.d / ranks
    about = shape.about() | {"mask": case.name}
    for subject, result in firsts.items():
        if isinstance(result, str):
            yield from failed(about | subject.about(), result)
        elif subject not in times:
            yield about | subject.about() | {"pass": "both"} | result.about()
    one = [each for s, each in times.items() if s.name == THEORY]
    for subject, (forward, both, host) in times.items():
        parts = ranks if subject.name == THEORY else 1
        said: Row = {"host_us": round(host * 1e6)}
        if one and parts == 1:
            said["share"] = rounded(one[0].both / ranks / both)
        result = firsts.get(subject)
        if isinstance(result, First):
            said |= result.about()
        figures = tflops(flops, forward / parts, both / parts)
        yield from by_pass(about | subject.about(), "tflops", figures, **said)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and with `--save` keep."""
    options = parser(
        "peers", __doc__, save="peers", device="cuda",
        tokens=[2048, 4096, 8192, 16384, 32768], mask=["causal"], heads=[32, 8], dim_head=128,
        dtype=None, kernels=[None], graphs=False, rounds=3, repeats=1,
    )  # fmt: skip
    options.add_argument("--documents", nargs="+", default=[], choices=list(KINDS))
    options.add_argument("--window", type=int, nargs="+", default=[])
    options.add_argument("--load", type=float, default=0.3, help="seconds of a turn, at least")
    options.add_argument("--theory", default="sdpa-cudnn", help="the kernel that is alone")
    options.add_argument("--theory-up-to", type=int, default=0, help="tokens of the whole")
    options.add_argument("--engine", nargs="+", help="kernels in TransformerEngine; all, unless")
    options.add_argument("--modes", nargs="+", default=MODES, choices=MODES, help="of it")
    options.add_argument("--all-peers", action="store_true", help="not TransformerEngine alone")
    options.add_argument("--no-peers", action="store_true")
    asked = options.parse_args(argv)
    with joined(asked.device) as device:
        run = Run("peers", argv, device_name(device), asked.save, **gpus(device))
        for shape in shapes(asked, device):
            for case in cases(shape, asked):
                run.add(rows(shape, case, *measured(shape, case, asked)))
        run.finish()
