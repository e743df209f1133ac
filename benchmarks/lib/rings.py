"""Measure attention over a group: tensors, times of the slowest rank, errors.

Times are the median of three rounds of calls back to back, or of rounds in which subjects take
turns (`by_turns`); backward is both less forward. Errors are those of out and dq against float32,
on some rows of every rank.
"""

import gc
import os
import random
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.lib.attempts import attempt, ending_at_once
from benchmarks.lib.clock import all_done, slowest_rank, wait
from benchmarks.lib.machines import take_gpu
from benchmarks.lib.peers import one_gpu
from benchmarks.lib.results import GRAPH, ONE_BY_ONE, Row, Subject, named_errors
from ring_attention_pytorch import RingPlan, positions, ring_attn, unshard_sequence
from ring_attention_pytorch.geometry.layouts import Layout
from ring_attention_pytorch.plan.explain import predicted
from ring_attention_pytorch.progress import counted
from ring_attention_pytorch.ranks.ring import Ring

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Errors = Callable[[Tensor, Tensor], tuple[float, ...]]  # of out and dq
Hidden = Callable[[Tensor, Tensor], Tensor]  # of (positions of rows, of columns)
Runs = Mapping[Subject, tuple[Callable[[], object], Callable[[], object]]]  # forward, both
ROWS = 16  # of each rank, whose errors are looked at
THEORY = "theory"  # the kernel alone over the whole sequence, its time divided by the ranks


class Shape(NamedTuple):
    """Hold the sizes of what is measured; `tokens` are those of one rank."""

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

    def about(self) -> Row:
        """Return what rows say of it."""
        return {
            "tokens": self.tokens,
            "mask": "causal" if self.causal else "full",
            "heads": [self.heads, self.key_heads],
            "head_dim": self.d,
            "dtype": str(self.dtype).removeprefix("torch."),
        }

    def flops(self, ranks: int) -> float:
        """Return the FLOPs of one rank, forward."""
        length = self.tokens * ranks
        return 4.0 * length**2 * self.heads * self.d * (0.5 if self.causal else 1.0) / ranks

    def tensors(self, length: int, seed: int) -> list[Tensor]:
        """Draw q, k, v and the cotangent of out."""
        draw = torch.Generator(self.device).manual_seed(seed)
        kinds = dict(device=self.device, dtype=self.dtype, generator=draw)
        heads = (self.heads, self.key_heads, self.key_heads, self.heads)
        return [torch.randn(1, length, h, self.d, **kinds) for h in heads]


class Result(NamedTuple):
    """Hold seconds forward and both ways, the peak in GiB, and the errors of out and dq.

    `predicted` is what the cost model says of both ways, in seconds.
    """

    forward: float
    both: float
    peak: float
    errors: tuple[float, float] | None
    predicted: float | None = None

    def memory_and_errors(self) -> Row:
        """Return what the row of both passes says of it."""
        said: Row = {"peak_gib": round(self.peak, 1)}
        if self.errors is not None:
            said["errors"] = named_errors(("out", "dq"), self.errors)
        return said


@contextmanager
def joined(name: str) -> Iterator[torch.device]:
    """Join the processes that torchrun started; yield this one's device, "cuda" or "cpu".

    Ranks share GPUs where these are fewer.

    An error in the block ends this process at once.
    """
    if not dist.is_torchelastic_launched():
        raise SystemExit("start it by torchrun: torchrun --nproc-per-node 2 -m benchmarks ...")
    if name == "cpu":
        torch.set_num_threads(1)
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    else:
        device = take_gpu(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
        dist.init_process_group("nccl", device_id=device)
    with ending_at_once():
        yield device
    gc.collect()  # or a cycle could have the group: its threads are to end before Python does
    dist.destroy_process_group()


def shapes(asked: Namespace, device: torch.device) -> list[Shape]:
    """Make a shape of each mask and number of tokens that were asked for."""
    name = asked.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    dtype = getattr(torch, name)
    return [
        Shape(tokens, mask == "causal", *asked.heads, asked.dim_head, device, dtype)
        for mask in asked.mask
        for tokens in asked.tokens
    ]


def gpus(device: torch.device) -> Row:
    """Count the processes, as rows say it."""
    return {"gpus" if device.type == "cuda" else "ranks": ranks()}


def ranks() -> int:
    """Return how many processes there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def make_plan(shape: Shape, like: list[Tensor], **options: Any) -> RingPlan:
    """Make a plan for such tensors, with their gradients."""
    q, k, v = (t.detach().requires_grad_() for t in like[:3])
    return RingPlan.make(q, k, v, causal=shape.causal, **options)


def planned(plan: RingPlan) -> Attend:
    """Return attention by a plan that is made once, as layers have it."""
    return lambda q, k, v: ring_attn(q, k, v, plan=plan)


def predicted_seconds(plan: RingPlan, mode: str) -> float | None:
    """Predict a GPU's seconds forward and backward, the slowest rank's: None on CPUs.

    Launched one by one, it is those of the host, if they are more.
    """
    if plan.device.type != "cuda":
        return None
    found = predicted(plan)
    seconds = found.gpu if mode == GRAPH else max(found.gpu, found.host)
    return slowest_rank([seconds], plan.device)[0]


def alone(shape: Shape, kernel: str, like: list[Tensor], **mask: Any) -> Attend:
    """Return a kernel on this GPU: PyTorch's own operator where it is that, else by our loop."""
    bare = None if mask else one_gpu(kernel, shape.causal)
    return bare or planned(make_plan(shape, like, kernel=kernel, group=Ring.alone(), **mask))


def theory_of(subject: Subject) -> Subject:
    """Return what a subject is compared with: the kernel alone, in a graph if it is."""
    return Subject(THEORY, subject.kernel, ONE_BY_ONE if subject.mode == ONE_BY_ONE else GRAPH)


def passes(
    attend: Attend, tensors: list[Tensor]
) -> tuple[Callable[[], None], Callable[[], tuple[Tensor, ...]]]:
    """Make two calls: forward alone; and both ways, which gives out, dq, dk and dv."""
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
    """Time one call on the slowest rank: the median of three rounds of calls back to back."""
    found = []
    run()  # whatever is compiled or allocated once
    for _ in range(3 if repeats > 1 else 1):
        start = all_done(device)
        for _ in range(repeats):
            run()
        wait(device)
        found.append((time.perf_counter() - start) / repeats)
    return median(slowest_rank(found, device))


class Times(NamedTuple):
    """Hold seconds of a call, and of the host to launch the first one both ways."""

    forward: float
    both: float
    host: float


def by_turns(
    runs: Runs,
    device: torch.device,
    rounds: int,
    repeats: int,
    load: float = 0.0,
    host_work: Mapping[Subject, Callable[[], None]] = MappingProxyType({}),
) -> dict[Subject, Times]:
    """Take medians of rounds of the slowest rank; subjects take turns, for clocks change.

    A turn is so many calls, or more: as many as take `load` seconds. `host_work` has what the host
    does over and over while the device computes, of some subjects; it must not take long.
    """
    turns = [(name, i) for name in runs for i in (0, 1)]
    calls: dict[tuple[Subject, int], int] = {}
    found: dict[tuple[Subject, int], list[list[float]]] = {turn: [] for turn in turns}
    for name, i in turns:  # whatever is made once, and a guess
        turn(runs[name][i], 1, device)
        guess, _ = turn(runs[name][i], repeats, device)
        calls[name, i] = max(repeats, round(load / guess))
    for number in counted(range(rounds), "by turns", rounds, "rounds"):
        random.Random(number).shuffle(turns)
        for name, i in turns:
            took = turn(runs[name][i], calls[name, i], device, host_work.get(name))
            found[name, i].append(took)
    at = {turn: [*map(median, zip(*each))] for turn, each in found.items()}
    return {name: Times(at[name, 0][0], *at[name, 1]) for name in runs}


def turn(
    run: Callable[[], object],
    calls: int,
    device: torch.device,
    host_work: Callable[[], None] | None = None,
) -> list[float]:
    """Return seconds of a call, and of the host to launch the first, of the slowest rank."""
    start = all_done(device)
    run()
    host = time.perf_counter() - start
    for _ in range(calls - 1):
        run()
    if host_work is not None:
        end = torch.cuda.current_stream(device).record_event()
        while not end.query():  # over and over, or the time would not be that of the device
            host_work()
    wait(device)
    return slowest_rank([(time.perf_counter() - start) / calls, host], device)


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """Return what replays a call as a CUDA graph, and gives what the call gave."""
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


def measured(
    attend: Attend,
    tensors: list[Tensor],
    repeats: int,
    errors: Errors | None,
    graph: bool = False,
) -> Result | str:
    """Return the result; or what went wrong on every rank, all of which call this together.

    Raises:
        FailedAloneError: it went wrong on some ranks, and others would wait for them.
    """
    device = tensors[0].device
    cuda = device.type == "cuda"

    def measure() -> Result:
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
        return Result(alone, whole, peak, found)

    return attempt(measure)


def checker(shape: Shape, tensors: list[Tensor], layout: Layout, hidden: Hidden | None) -> Errors:
    """Make what tells the errors of out and dq on some rows of each rank: the worst rank's."""
    ring = Ring()
    q, k, v, dout = tensors
    length = shape.tokens * ring.size
    whole = [unshard_sequence(t, length=length, layout=layout) for t in (k, v)]
    # of two million tokens these are 16 GiB, so query heads share them
    k, v = (t.float() for t in whole)
    held = positions(layout, rank=ring.rank, ring_size=ring.size, length=length)
    rows = torch.linspace(0, shape.tokens - 1, ROWS).long()
    some = q[:, rows.to(q.device)].float().requires_grad_()
    groups = some.unflatten(2, (shape.key_heads, -1))
    scores = torch.einsum("bigrd,bjgd->bgrij", groups, k) * shape.d**-0.5
    if hidden is not None:
        unseen = hidden(held[rows].unsqueeze(1), torch.arange(length))
        scores = scores.masked_fill(unseen.to(q.device), -torch.inf)
    want = torch.einsum("bgrij,bjgd->bigrd", scores.softmax(-1), v).flatten(2, 3)
    (want_dq,) = torch.autograd.grad(want, some, dout[:, rows.to(q.device)].float())
    want = want.detach()

    def errors(out: Tensor, dq: Tensor) -> tuple[float, ...]:
        at = rows.to(q.device)
        found = [
            (got[:, at].float() - exact).norm() / exact.norm()
            for got, exact in ((out.detach(), want), (dq, want_dq))
        ]
        return tuple(slowest_rank(torch.stack(found).tolist(), q.device))

    return errors


def device_name(device: torch.device) -> str:
    """Return what the device is sold as."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
