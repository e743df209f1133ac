"""What benchmarks of rings have in common: tensors, times of the slowest rank, errors.

Times are the median of three rounds of calls back to back, or of rounds in which subjects take
turns (`by_turns`); backward is both less forward. Errors are those of out and dq against float32,
on some rows of every rank.
"""

import os
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attention_pytorch import positions, unshard_sequence
from ring_attention_pytorch.comm.ring import Ring
from ring_attention_pytorch.geometry.layouts import Layout

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Hidden = Callable[[Tensor, Tensor], Tensor]  # of (positions of rows, of columns)
Runs = Mapping[str, tuple[Callable[[], object], Callable[[], object]]]  # forward, both
ROWS = 16  # of each rank, whose errors are looked at


class Shape(NamedTuple):
    """What is measured; `tokens` are those of one rank."""

    tokens: int
    causal: bool
    heads: int
    key_heads: int
    d: int
    device: torch.device
    dtype: torch.dtype

    @property
    def layout(self) -> str:
        return "zigzag" if self.causal else "contiguous"

    def flops(self, ranks: int) -> float:
        """Of one rank, forward."""
        length = self.tokens * ranks
        return 4.0 * length**2 * self.heads * self.d * (0.5 if self.causal else 1.0) / ranks

    def tensors(self, length: int, seed: int) -> list[Tensor]:
        """q, k, v and the cotangent of out."""
        draw = torch.Generator(self.device).manual_seed(seed)
        kinds = dict(device=self.device, dtype=self.dtype, generator=draw)
        heads = (self.heads, self.key_heads, self.key_heads, self.heads)
        return [torch.randn(1, length, h, self.d, **kinds) for h in heads]


class Result(NamedTuple):
    """Seconds forward and both ways, the peak in GiB, and the errors of out and dq."""

    forward: float
    both: float
    peak: float
    errors: tuple[float, float] | None


def begun(name: str) -> tuple[torch.device, torch.dtype]:
    """This rank's device of that kind, "cuda" or "cpu", once it has joined the others that torchrun
    started; and the dtype that is measured there."""
    if name == "cpu":
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        return torch.device("cpu"), torch.float32
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device, torch.bfloat16


def passes(
    attend: Attend, tensors: list[Tensor]
) -> tuple[Callable[[], None], Callable[[], tuple[Tensor, ...]]]:
    """Forward alone; and both ways, which gives out, dq, dk and dv."""
    q, k, v, dout = tensors
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]

    def forward() -> None:
        with torch.no_grad():
            attend(q, k, v)

    def both() -> tuple[Tensor, ...]:
        out = attend(*leaves)
        return out, *torch.autograd.grad(out, leaves, dout)

    return forward, both


def seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Of one call, the slowest rank's: the median of three rounds of calls back to back."""
    found = []
    run()  # whatever is compiled or allocated once
    for _ in range(3 if repeats > 1 else 1):
        synchronize(device)
        dist.barrier()
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        synchronize(device)
        found.append((time.perf_counter() - start) / repeats)
    return median(_slowest(found, device))


class Times(NamedTuple):
    """Seconds of a call, and of the host to launch the first one both ways."""

    forward: float
    both: float
    host: float


def by_turns(
    runs: Runs,
    device: torch.device,
    rounds: int,
    repeats: int,
    load: float = 0.0,
    beside: Mapping[str, Callable[[], None]] = MappingProxyType({}),
) -> dict[str, Times]:
    """Medians of rounds of the slowest rank; subjects take turns, for clocks change.

    A turn is so many calls, or more: as many as take `load` seconds. `beside` has what the host
    does over and over while the device computes, of some subjects; it must not take long.
    """
    turns = [(name, i) for name in runs for i in (0, 1)]
    calls: dict[tuple[str, int], int] = {}
    found: dict[tuple[str, int], list[list[float]]] = {turn: [] for turn in turns}
    for name, i in turns:  # whatever is made once, and a guess
        _turn(runs[name][i], 1, device)
        guess, _ = _slowest(_turn(runs[name][i], repeats, device), device)
        calls[name, i] = max(repeats, round(load / guess))
    for number in range(rounds):
        random.Random(number).shuffle(turns)
        for name, i in turns:
            took = _turn(runs[name][i], calls[name, i], device, beside.get(name))
            found[name, i].append(_slowest(took, device))
    at = {turn: [*map(median, zip(*each))] for turn, each in found.items()}
    return {name: Times(at[name, 0][0], *at[name, 1]) for name in runs}


def _turn(
    run: Callable[[], object],
    calls: int,
    device: torch.device,
    beside: Callable[[], None] | None = None,
) -> tuple[float, float]:
    """Seconds of a call, and of the host to launch the first."""
    synchronize(device)
    dist.barrier()
    synchronize(device)
    start = time.perf_counter()
    run()
    host = time.perf_counter() - start
    for _ in range(calls - 1):
        run()
    if beside is not None:
        end = torch.cuda.current_stream(device).record_event()
        while not end.query():  # over and over, or the time would not be that of the device
            beside()
    synchronize(device)
    return (time.perf_counter() - start) / calls, host


def _slowest(times: Iterable[float], device: torch.device) -> list[float]:
    """Of each, the slowest rank's."""
    found = torch.tensor([*times], device=device, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.tolist()


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """What replays a call as a CUDA graph, and gives what the call gave."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()  # whatever is made once
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = run()

    def replay() -> object:
        graph.replay()
        return result

    return replay


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measured(
    attend: Attend,
    tensors: list[Tensor],
    repeats: int,
    errors: Callable | None,
    graph: bool = False,
) -> Result | str:
    """The result; or what went wrong on this rank, which must not happen to it alone."""
    device = tensors[0].device
    problem, result, cuda = "", None, device.type == "cuda"
    try:
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        forward, both = passes(attend, tensors)
        if graph:
            forward, both = captured(forward), captured(both)
        alone = seconds(forward, device, repeats)
        found = None if errors is None else errors(*both()[:2])
        whole = seconds(both, device, repeats)
        peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
        result = Result(alone, whole, peak, found)
    except (
        RuntimeError, ValueError, NotImplementedError, AttributeError, TypeError, AssertionError,
    ) as error:  # fmt: skip
        problem = f"{type(error).__name__}: {error}".splitlines()[0][:120]
    return problem or result


def checker(
    shape: Shape, tensors: list[Tensor], layout: Layout, hidden: Hidden | None
) -> Callable[[Tensor, Tensor], tuple]:
    """Errors of out and dq on some of this rank's rows, the worst rank's."""
    ring = Ring()
    q, k, v, dout = tensors
    length = shape.tokens * ring.size
    whole = [unshard_sequence(t, length=length, layout=layout) for t in (k, v)]
    k, v = (t.float().repeat_interleave(shape.heads // shape.key_heads, 2) for t in whole)
    held = positions(layout, rank=ring.rank, ring_size=ring.size, length=length)
    rows = torch.linspace(0, shape.tokens - 1, ROWS).long()
    some = q[:, rows.to(q.device)].float().requires_grad_()
    scores = torch.einsum("bihd,bjhd->bhij", some, k) * shape.d**-0.5
    if hidden is not None:
        unseen = hidden(held[rows].unsqueeze(1), torch.arange(length))
        scores = scores.masked_fill(unseen.to(q.device), -torch.inf)
    want = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)
    (want_dq,) = torch.autograd.grad(want, some, dout[:, rows.to(q.device)].float())
    want = want.detach()

    def errors(out: Tensor, dq: Tensor) -> tuple[float, ...]:
        at = rows.to(q.device)
        found = [
            (got[:, at].float() - exact).norm() / exact.norm()
            for got, exact in ((out.detach(), want), (dq, want_dq))
        ]
        worst = torch.stack(found)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        return tuple(worst.tolist())

    return errors


def speeds(flops: float, forward: float, both: float) -> list[str]:
    """TF/s forward, backward and both ways, by seconds and by forward's FLOPs.

    >>> speeds(4e12, 2.0, 7.0), speeds(4e12, 2.0, 1.5)[1]
    (['2', '2', '2'], 'nan')
    """
    backward = both - forward
    found = (
        flops / forward,
        2.5 * flops / backward if backward > 0 else float("nan"),  # lost in noise
        3.5 * flops / both,
    )
    return [f"{s / 1e12:.3g}" for s in found]


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def markdown(head: Sequence[str], table: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *table]
    return "\n".join("| " + " | ".join(line).replace("\n", " ") + " |" for line in lines)
