"""Time kernels on packed documents by their lengths, on one GPU, beside the one that a plan takes.

    torchrun --nproc-per-node 1 -m benchmarks documents --save
    torchrun --nproc-per-node 1 -m benchmarks documents --heads 16 16 --dim-head 192 --dim-value 128
    torchrun --nproc-per-node 1 -m benchmarks documents --device cpu --tokens 64 --heads 4 2

FLOPs are those of visible pairs, backward 2.5 times forward. Kernels take turns, for clocks change;
times are medians of rounds. Errors are of out and dq on some rows, against float32. A plan without
a named kernel takes the one that is "chosen"; where it compares two by the cost model,
"predicted_us" is what that says of both passes.
"""

import random
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise

from torch import Tensor

from benchmarks.lib.attempts import attempt
from benchmarks.lib.options import parser
from benchmarks.lib.results import (
    GRAPH,
    Row,
    Run,
    Subject,
    by_pass,
    failed,
    named_errors,
    tflops,
)
from benchmarks.lib.rings import (
    Shape,
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
from benchmarks.lib.sequences import Mask, borders, of_documents

KINDS: dict[str, Callable[[int], list[int]]] = {
    "two, one of 84 %": lambda n: [27 * n // 32, n - 27 * n // 32],
    "one of half the tokens, 17 short": lambda n: [n - n // 2, *evenly(n // 2, 17)],
    "log-normal around 4k": lambda n: drawn("log-normal around 4k", n),
    "four alike": lambda n: evenly(n, 4),
    "eight alike": lambda n: evenly(n, 8),
    "of 1 to 999 tokens": lambda n: drawn("of 1 to 999 tokens", n),
}  # lengths, of a number of tokens


def evenly(tokens: int, parts: int) -> list[int]:
    """Cut a number of tokens into lengths that differ by one at most.

    >>> evenly(11, 3)
    [4, 4, 3]
    """
    return [(tokens + i) // parts for i in reversed(range(parts))]


def drawn(kind: str, tokens: int) -> list[int]:
    """Draw lengths of a kind that other benchmarks have, too."""
    cut = borders(kind, tokens, random.Random(0))
    return [stop - start for start, stop in pairwise(cut)]


def tensors_of(shape: Shape, d_v: int) -> list[Tensor]:
    """Draw q, k, v and the cotangent of out; values have a head size of their own."""
    q, k, v, dout = shape.tensors(shape.tokens, seed=0)
    _, _, wide, wide_dout = shape._replace(d=d_v).tensors(shape.tokens, seed=0)
    return [q, k, *((v, dout) if d_v == shape.d else (wide, wide_dout))]


def rows(shape: Shape, d_v: int, kind: str, asked: Namespace) -> Iterator[Row]:
    """Measure each kernel on documents of a kind."""
    cut = [0, *accumulate(KINDS[kind](shape.tokens))]
    mask, tensors = of_documents(cut, 1), tensors_of(shape, d_v)
    plan = make_plan(shape, tensors, **mask.options)
    errors = checker(shape, tensors, mask.layout, mask.hidden)
    about = shape.about() | {"mask": f"documents {kind}"}
    about |= {} if d_v == shape.d else {"dim_value": d_v}
    runs, found = {}, {}
    for kernel in asked.kernels:
        subject = Subject("kernel", kernel)
        calls = attempt(partial(called, shape, kernel, mask, tensors))
        if isinstance(calls, str):
            yield from failed(about | subject.about(), calls)
            continue
        found[kernel] = named_errors(("out", "dq"), errors(*calls[1]()[:2]))
        runs[subject] = calls
        if asked.graphs:
            runs[subject._replace(mode=GRAPH)] = tuple(map(captured, calls))
    flops = 2.0 * mask.pairs * shape.heads * (shape.d + d_v)
    times = by_turns(runs, shape.device, asked.rounds, asked.repeats, asked.load)
    for subject, (forward, both, host) in times.items():
        said: Row = {"host_us": round(host * 1e6), "errors": found[subject.kernel]}
        said |= of_plan(plan.chosen.by_kernel, plan.kernel.name, subject.kernel)
        figures = tflops(flops, forward, both)
        yield from by_pass(about | subject.about(), "tflops", figures, us=round(both * 1e6), **said)


def called(
    shape: Shape, kernel: str, mask: Mask, tensors: Sequence[Tensor]
) -> tuple[Callable[[], object], Callable[[], tuple[Tensor, ...]]]:
    """Make a kernel's calls, forward and both ways, and call it once."""
    plan = make_plan(shape, [*tensors], kernel=kernel, **mask.options)
    calls = passes(planned(plan), [*tensors])
    calls[1]()
    return calls


def of_plan(predicted: Mapping[str, float], chosen: str, kernel: str) -> Row:
    """Return what a row says of the choice of a plan for which no kernel was named."""
    said: Row = {"chosen": True} if kernel == chosen else {}
    if kernel in predicted:
        said["predicted_us"] = round(1e6 * predicted[kernel])
    return said


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and with `--save` keep."""
    options = parser(
        "documents", __doc__, save="documents", device="cuda", tokens=[16384], mask=["causal"],
        heads=[32, 8], dim_head=128, dtype=None, kernels=["triton", "sdpa-cudnn"], graphs=False,
        rounds=5, repeats=2,
    )  # fmt: skip
    options.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    options.add_argument("--dim-value", type=int, help="of a head; dim-head unless given")
    options.add_argument("--load", type=float, default=0.05, help="seconds of a turn, at least")
    asked = options.parse_args(argv)
    if asked.device == "cpu" and "sdpa-cudnn" in asked.kernels:
        asked.kernels = ["eager", "sdpa"]
    with joined(asked.device) as device:
        run = Run("documents", argv, device_name(device), asked.save, **gpus(device))
        for shape in shapes(asked, device):
            for kind in asked.kinds:
                run.add(rows(shape, asked.dim_value or shape.d, kind, asked))
        run.finish()
