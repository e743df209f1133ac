"""Measure a gated delta net over a ring, against flash-linear-attention on the whole sequence.

    python -m benchmarks recurrent                                       # one GPU: kernels, errors
    python -m benchmarks recurrent --of 2                                # and the work of one rank
    torchrun --nproc-per-node 2 -m benchmarks recurrent                  # the sequence over two
    torchrun --nproc-per-node 2 -m benchmarks recurrent --graphs         # and in CUDA graphs
    torchrun --nproc-per-node 2 -m benchmarks recurrent --device cpu --lengths 256 --heads 2 4

Shapes are of Qwen3-Next: 16 key heads and 32 value heads of 128. Times are of forward, and with
backward; "host" is what launching them takes when the device is idle, "GPU" how long that is busy
in them. "share" is the time of fla alone on the whole sequence (fla-core, if it is installed; else
the eager kernel on the whole), divided by the ranks, over the time in the row. "scan" is the
exchange of states by itself. With `--of` rows are the work of single ranks of so many, on one GPU,
whose messages are copies of equal size. "fla's context" is fla's own context parallelism. "hybrid"
is three of these layers and one causal attention of 16 heads of 256, with 2 of keys, by
`ring_attn`. With `--graphs` a whole call, forward or with backward, is also one CUDA graph; its
share is of fla in a graph. Memory is the most beyond the tensors, of rank 0, of a call without a
graph. Errors, of one process, are against float64. Where fla refuses its own backward, it is timed
all the same: what it computes there is wrong, and is not used.
"""

import cProfile
import pstats
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.util import find_spec
from io import StringIO
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.lib.attempts import attempt
from benchmarks.lib.clock import all_done
from benchmarks.lib.imagined import Imagined
from benchmarks.lib.options import parser
from benchmarks.lib.rings import captured, joined
from benchmarks.lib.spans import covered, recorded
from ring_attention_pytorch import (
    RingPlan,
    RunPlan,
    positions,
    ring_attn,
    ring_gated_delta_rule,
    ring_scan,
)
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.recurrent.fla import backward_refused

LENGTHS = [2**15, 2**13, 2**17]
CALLS = 3  # back to back, between two waits for all ranks
FLA = "fla's context"
ATTENTION = 16, 2, 256  # heads, of keys, their size, in a hybrid
GRAPH = ", a graph"  # of a row's name
Function = Callable[..., Tensor]


class Layer(NamedTuple):
    """Hold a layer as a function of its tensors, and what must be around its calls."""

    run: Function
    around: Callable[[], AbstractContextManager[object]] = nullcontext


class Pass(NamedTuple):
    """Hold seconds of a call: of all, of the host's part, and in which the GPU is busy."""

    all: float
    host: float
    busy: float


class Times(NamedTuple):
    """Hold a call forward, one with backward, and the GiB of the latter."""

    forward: Pass
    both: Pass
    memory: float

    def said(self, alone: "Times | None", ranks: int) -> str:
        """Return a row's text; `alone` is of the whole sequence on one rank."""
        all_of, host, busy = zip(self.forward, self.both)
        text = f"{_ms(all_of, 8)} ms, host {_ms(host)}, GPU {_ms(busy)} ms, {self.memory:.2f} GiB"
        if alone is None:
            return text
        pairs = (alone.forward, self.forward), (alone.both, self.both)
        return (
            f"{text}  share {' '.join(f'{one.all / ranks / our.all:4.0%}' for one, our in pairs)}"
        )


def _ms(seconds: Sequence[float], width: int = 5) -> str:
    return " ".join(f"{1e3 * each:{width}.2f}" for each in seconds)


def inputs(n: int, heads: Sequence[int], d: int, device: str, dtype: torch.dtype) -> list[Tensor]:
    """Return q, k, v, g and beta of a whole sequence, the same on all ranks."""
    torch.manual_seed(0)
    key_heads, value_heads = heads
    q, k = (torch.randn(1, n, key_heads, d, device=device, dtype=dtype) for _ in range(2))
    v = torch.randn(1, n, value_heads, d, device=device, dtype=dtype)
    g = -0.1 * torch.rand(1, n, value_heads, device=device)
    return [q, k, v, g, torch.rand(1, n, value_heads, device=device, dtype=dtype)]


def seconds(run: Callable[[], Any], device: str, repeats: int) -> Pass:
    """Return the median times of a call that all ranks make together."""
    for _ in range(2):
        run()
    times, hosts = [], []
    for _ in range(repeats):
        start = all_done(device)
        run()
        hosts.append(time.perf_counter() - start)
        start = all_done(device)
        for _ in range(CALLS):
            run()
        times.append((all_done(device) - start) / CALLS)
    busy = 0.0
    if device == "cuda":
        busy = covered(recorded(run, CALLS, partial(all_done, device))) / CALLS / 1e6
    return Pass(sorted(times)[repeats // 2], sorted(hosts)[repeats // 2], busy)


def host_profile(run: Callable[[], Any]) -> str:
    """Return the functions that take the host's main thread longest in a call, with the calls."""
    profiler = cProfile.Profile()
    run()
    profiler.enable()
    for _ in range(20):
        run()
    profiler.disable()
    text = StringIO()
    pstats.Stats(profiler, stream=text).strip_dirs().sort_stats("tottime").print_stats(40)
    return f"20 calls\n{text.getvalue()}"


def step(function: Function, tensors: Sequence[Tensor], back: bool) -> Callable[[], Any]:
    """Return a call of forward, or of forward and backward."""
    leaves = [t.detach().requires_grad_(back) for t in tensors]
    cotangent: list[Tensor] = []

    def run() -> None:
        out = function(*leaves)
        if back:
            cotangent[:] = cotangent or [torch.ones_like(out)]
            torch.autograd.grad(out, leaves, cotangent)

    return run


def timed(layer: Layer, tensors: Sequence[Tensor], given: Any, graph: bool = False) -> Times:
    """Measure a layer, forward and with backward, as a graph or launched one by one."""
    with layer.around():
        runs = [step(layer.run, tensors, back) for back in (False, True)]
        if graph:
            runs = [captured(run) for run in runs]
        forward, both = (seconds(run, given.device, given.repeats) for run in runs)
        if given.device != "cuda":
            return Times(forward, both, 0.0)
        run = step(layer.run, tensors, True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return Times(forward, both, (torch.cuda.max_memory_allocated() - before) / 2**30)


def whole(device: str) -> Layer:
    """Return the layer of a whole sequence in one process, by fla where it is installed."""
    if device == "cuda" and find_spec("fla"):
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        options: Any = dict(use_qk_l2norm_in_kernel=True)
        return Layer(lambda *t: chunk_gated_delta_rule(*t, **options)[0], refusals_lifted)

    def eager(*tensors: Tensor) -> Tensor:
        plan = RunPlan.make(tensors[0], group=Ring.alone())
        return ring_gated_delta_rule(*tensors, plan=plan, normalize=True)[0]

    return Layer(eager)


def context(length: int, layout: str, device: str) -> Layer | None:
    """Return the layer by fla's own context parallelism; None where it can't be run."""
    if device != "cuda" or not find_spec("fla") or not dist.is_initialized():
        return None
    from fla.ops.cp import build_cp_context
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    borders = torch.tensor([0, length], device=device)
    try:
        made = build_cp_context(borders, group=dist.group.WORLD, layout=layout)
    except TypeError:  # before 0.6 it has no zigzag
        return None
    options: Any = dict(use_qk_l2norm_in_kernel=True, cp_context=made)
    return Layer(lambda *t: chunk_gated_delta_rule(*t, **options)[0], refusals_lifted)


def refusals_lifted() -> AbstractContextManager[object]:
    """Let fla compute a backward that it refuses with this Triton and GPU, to be timed."""
    if not find_spec("fla") or not backward_refused():
        return nullcontext()
    from fla.ops.common import chunk_o

    return mock.patch.object(chunk_o, "TRITON_ABOVE_3_7_1", True)


def ours(plan: RunPlan) -> Layer:
    """Return the layer over the ring."""
    return Layer(lambda *t: ring_gated_delta_rule(*t, plan=plan, normalize=True)[0])


def hybrid(layer: Layer, attention: RingPlan) -> Layer:
    """Return three such layers and one attention; the last three tensors are of attention."""

    def run(*tensors: Tensor) -> Tensor:
        *of_layer, q, k, v = tensors
        outs = [layer.run(*of_layer).sum() for _ in range(3)]
        return torch.stack([*outs, ring_attn(q, k, v, plan=attention).sum()])

    return layer._replace(run=run)


def scan(plan: RunPlan, given: Any) -> tuple[Layer, list[Tensor]]:
    """Return the exchange of states by itself, and its tensors."""
    d = given.dim
    m = torch.randn(len(plan.mine), given.heads[1], d, d, device=given.device) / d
    return Layer(lambda *t: ring_scan(*t, plan=plan)[0]), [m, m]


def measured(length: int, given: Any, ranks: int, rank: int) -> None:
    """Print the times of one length."""
    tensors = inputs(length, given.heads, given.dim, given.device, torch.bfloat16)
    alone = row(f"{length:7} tokens, whole", whole(given.device), tensors, given, {}, 1)
    if given.of:
        of_ranks(tensors, alone, given)
    for layout in ("zigzag", "contiguous") if ranks > 1 else ("contiguous",):
        at = positions(layout, rank=rank, ring_size=ranks, length=length).to(given.device)
        mine = [t[:, at].contiguous() for t in tensors]
        plan = RunPlan.make(mine[0], layout=layout)
        layers = {"ours": ours(plan), FLA: context(length, layout, given.device)}
        for name, layer in layers.items():
            if layer is None:
                continue
            row(f"  {layout:10} {name}", layer, mine, given, alone, ranks)
            if length in given.hybrid:
                attention, qkv = for_attention(mine[0], layout)
                of_both = hybrid(layer, attention), [*mine, *qkv]
                row(f"  {layout:10} hybrid of it", *of_both, given, {}, ranks)
        if given.profile:
            report(host_profile(step(layers["ours"].run, mine, False)))
        if ranks > 1:
            row(f"  {layout:10} scan", *scan(plan, given), given, {}, ranks)


def row(
    name: str, layer: Layer, of: Sequence[Tensor], given: Any, alone: dict[str, Times], ranks: int
) -> dict[str, Times]:
    """Print and return the times of a layer, by how it is launched.

    `alone` are those of the whole sequence on one rank, for the share.
    """
    times = {}
    for mode in ("", GRAPH)[: 1 + given.graphs]:
        found = attempt(lambda mode=mode: timed(layer, of, given, bool(mode)))
        if not isinstance(found, str):
            times[mode], found = found, found.said(alone.get(mode), ranks)
        report(f"{name + mode:38} {found}")
    return times


def of_ranks(tensors: Sequence[Tensor], alone: dict[str, Times], given: Any) -> None:
    """Print the times of single ranks, in one process, beside the same tokens by themselves."""
    n, ranks = tensors[0].shape[1], given.of
    mine = [t[:, : n // ranks].contiguous() for t in tensors]
    row("  these tokens alone", whole(given.device), mine, given, alone, ranks)
    for layout, rank in product(("zigzag", "contiguous"), range(ranks)):
        plan = RunPlan.make(mine[0], layout=layout, group=Imagined(rank, ranks))
        row(f"  {layout:10} rank {rank} of {ranks}", ours(plan), mine, given, alone, ranks)
        row(f"  {layout:10} scan", *scan(plan, given), given, {}, ranks)


def for_attention(like: Tensor, layout: Any) -> tuple[RingPlan, list[Tensor]]:
    """Return the plan and the tensors of a hybrid's attention."""
    heads, key_heads, d = ATTENTION
    q, k, v = (like.new_ones(*like.shape[:2], h, d) for h in (heads, key_heads, key_heads))
    return RingPlan.make(q, k, v, causal=True, layout=layout), [q, k, v]


def errors(given: Any) -> None:
    """Print relative errors of results and gradients, of 5 documents, against float64."""
    n = min(1000, given.lengths[0])
    tensors = inputs(n, given.heads, given.dim, given.device, torch.bfloat16)
    plan = RunPlan.make(tensors[0], cu_seqlens=[0, n // 3, n // 3 + 1, n // 2, n])
    results = []
    for of in ([t.double() for t in tensors], [t.float() for t in tensors], tensors):
        leaves = [t.requires_grad_() for t in of]
        initial = torch.ones(1, given.heads[1], given.dim, given.dim, device=given.device)
        out, last = ring_gated_delta_rule(
            *leaves, plan=plan, normalize=True, initial=initial / 50, final=True
        )
        assert last is not None
        loss = out.double().square().sum() + last.double().sum()
        grads = torch.autograd.grad(loss, leaves)
        results.append([out.detach(), last.detach(), *grads])
    for name, found in zip(("float32", "bfloat16"), results[1:]):
        parts = [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, results[0])]
        report(f"errors in {name} (out, last, dq, dk, dv, dg, dbeta):",
             *(f"{part:.1e}" for part in parts))  # fmt: skip


def report(*words: str) -> None:
    """Print a line on the first rank."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(*words, flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all lengths."""
    options = parser("recurrent", __doc__ or "")
    options.add_argument("--device", default="cuda")
    options.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    options.add_argument("--hybrid", type=int, nargs="*", default=LENGTHS[::2], help="lengths")
    options.add_argument("--heads", type=int, nargs=2, default=[16, 32], help="of keys, of values")
    options.add_argument("--dim", type=int, default=128)
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--graphs", action="store_true", help="also as CUDA graphs")
    options.add_argument("--of", type=int, default=0, help="ranks, of which one works at a time")
    options.add_argument("--profile", action="store_true", help="of the host, of forward")
    given = options.parse_args(argv)
    if given.graphs and given.device != "cuda":
        options.error("--graphs needs --device cuda")
    with joined(given.device) if dist.is_torchelastic_launched() else nullcontext():
        rank, ranks = 0, 1
        if dist.is_initialized():
            rank, ranks = dist.get_rank(), dist.get_world_size()
        report(f"{given.device}, {ranks} ranks; times of forward, and with backward")
        if ranks == 1:
            errors(given)
        for length in given.lengths:
            measured(length, given, ranks, rank)
