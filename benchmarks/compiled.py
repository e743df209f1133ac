"""Time a step that is compiled beside eager ones: a call, a layer, a small model, by turns.

    torchrun --nproc-per-node 2 -m benchmarks compiled --tokens 2048
    torchrun --nproc-per-node 2 -m benchmarks compiled --device cpu --tokens 64 --heads 4 2

A step is forward and backward, causal, with a plan. Times are medians of rounds of the slowest
rank; "host" is how long it takes to launch a step, the device being idle. "error" is that of the
result and the gradient of the first input against the eager step. "skipped" counts graphs of
inductor that are not CUDA graphs though they should be.
"""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters

from benchmarks.lib.options import parser
from benchmarks.lib.rings import Shape, device_name, joined, make_plan, shapes, turn
from ring_attention_pytorch import RingAttention, RingPlan, RingTransformer, ring_attn

Step = Callable[[], tuple[Tensor, ...]]
_DEPTH, _VOCABULARY = 2, 1024


class Work(NamedTuple):
    """The work that is timed: a function of (inputs, plan), its inputs, leaves and plan."""

    run: Callable[..., Tensor]
    given: list[Tensor]
    leaves: list[Tensor]
    plan: RingPlan | tuple[RingPlan, ...]

    def step(self, run: Callable[..., Tensor], plan: object) -> Step:
        """Return a step of `run`, which may be this function compiled."""
        torch.manual_seed(0)
        dout = torch.randn_like(self.run(*self.given, self.plan))

        def step() -> tuple[Tensor, ...]:
            torch.compiler.cudagraph_mark_step_begin()
            out = run(*self.given, plan)
            return out, *torch.autograd.grad(out, self.leaves, dout)

        return step


def call(shape: Shape) -> Work:
    """Make a call of `ring_attn`."""
    given = shape.tensors(shape.tokens, seed=dist.get_rank())
    plan = make_plan(shape, given, layout=shape.layout)
    leaves = [t.requires_grad_() for t in given[:3]]
    return Work(lambda q, k, v, plan: ring_attn(q, k, v, plan=plan), leaves, leaves, plan)


def _options(shape: Shape) -> dict[str, object]:
    return dict(
        dim_head=shape.d, heads=shape.heads, ring_attn=True, auto_shard_seq=False, causal=True,
        num_grouped_query_heads=shape.heads // shape.key_heads, layout=shape.layout,
    )  # fmt: skip


def layer(shape: Shape) -> Work:
    """Make a call of `RingAttention`, with its projections."""
    dim = shape.heads * shape.d
    module: nn.Module = RingAttention(dim, rotary_embed=True, **_options(shape))
    module.to(shape.device, shape.dtype)
    x = torch.randn(1, shape.tokens, dim, device=shape.device, dtype=shape.dtype)
    x.requires_grad_()
    plan = module.plan(x)
    return Work(lambda x, plan: module(x, plan=plan), [x], [x, *module.parameters()], plan)


def model(shape: Shape) -> Work:
    """Make a call of `RingTransformer`, to its loss."""
    dim = shape.heads * shape.d // 2
    module = RingTransformer(num_tokens=_VOCABULARY, dim=dim, depth=_DEPTH, **_options(shape))
    module.to(shape.device, shape.dtype)
    ids = torch.randint(0, _VOCABULARY, (1, shape.tokens), device=shape.device)
    plans = module.plans(ids)

    def run(ids: Tensor, plans: tuple[RingPlan, ...]) -> Tensor:
        return module(ids, labels=ids, plans=plans)

    return Work(run, [ids], list(module.parameters()), plans)


WHAT = {"call": call, "layer": layer, "model": model}


def steps(work: Work) -> dict[str, Step]:
    """Make the step in each way in which it can be run here."""
    plans = work.plan if isinstance(work.plan, tuple) else (work.plan,)
    found = {"eager": work.step(work.run, work.plan)}
    found["compiled"] = work.step(torch.compile(work.run, fullgraph=True), work.plan)
    if plans[0].capturable:
        overhead = torch.compile(work.run, fullgraph=True, mode="reduce-overhead")
        found["reduce-overhead"] = work.step(overhead, work.plan)
    return found


def report(name: str, shape: Shape, rounds: int, repeats: int) -> None:
    """Time all ways by turns, and print a table."""
    torch._dynamo.reset()
    begun = time.perf_counter()
    timed = steps(WHAT[name](shape))
    exact, errors, skipped, took = None, {}, {}, {}
    for way, step in timed.items():
        counters.clear()
        start = time.perf_counter()
        for _ in range(4):  # whatever is compiled, allocated, recorded
            got = [t.detach().clone() for t in step()[:2]]
        took[way] = time.perf_counter() - start
        skipped[way] = counters["inductor"]["cudagraph_skips"]
        exact = exact or got
        errors[way] = max(_error(a, b) for a, b in zip(got, exact))
    times: dict[str, list[list[float]]] = {way: [] for way in timed}
    for _ in range(rounds):
        for way, step in timed.items():
            times[way].append(turn(step, repeats, shape.device))
    if dist.get_rank():
        return
    print(f"\n{name}, {shape.tokens} tokens a rank, {dist.get_world_size()} ranks, ms:")
    print(f"{'':24}{'step':>9}{'host':>9}{'error':>10}{'skipped':>9}{'first s':>9}")
    for way, each in times.items():
        step_ms, host_ms = (1e3 * median(of) for of in zip(*each))
        print(
            f"{way:24}{step_ms:9.3f}{host_ms:9.3f}{errors[way]:10.1e}{skipped[way]:9}"
            f"{took[way]:9.1f}"
        )
    print(f"({time.perf_counter() - begun:.0f} s)", flush=True)


def _error(got: Tensor, want: Tensor) -> float:
    return ((got - want).double().norm() / want.double().norm()).item()


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    options = parser(
        "compiled", __doc__, device="cuda", tokens=[2048], heads=[32, 8], dim_head=128, dtype=None,
        rounds=9, repeats=10,
    )  # fmt: skip
    options.add_argument("--what", nargs="+", default=list(WHAT), choices=list(WHAT))
    options.set_defaults(mask=["causal"])
    asked = options.parse_args(argv)
    with joined(asked.device) as device:
        if dist.get_rank() == 0:
            print(f"{device_name(device)}, torch {torch.__version__}")
        for shape in shapes(asked, device):
            for name in asked.what:
                report(name, shape, asked.rounds, asked.repeats)
