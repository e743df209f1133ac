"""Time what a user gets who names nothing: default kernel and transport, launched one by one.

    torchrun --nproc-per-node 2 -m benchmarks defaults --tokens 2048 4096 8192
    torchrun --nproc-per-node 2 -m benchmarks defaults --device cpu --tokens 64 --heads 4 2

Causal and zigzag; microseconds of the slowest rank, medians of rounds that take turns. "a launch"
is the host's time for a small operation, by which hosts differ. "predicted" is what
`schedule.cost` says of the plan: of the GPU, and of the host that launches one by one.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.lib.options import parser
from benchmarks.lib.results import Subject
from benchmarks.lib.rings import Shape, by_turns, device_name, joined, passes, planned, shapes
from ring_attention_pytorch import RingPlan, ring_attn
from ring_attention_pytorch.plan import plan_cache
from ring_attention_pytorch.plan.explain import predicted

_LAUNCHES = 200


def subjects(shape: Shape, plan: RingPlan, given: list[Tensor]) -> dict[str, Callable[[], object]]:
    """Return what is timed."""
    how = dict(causal=True, layout="zigzag")
    leaves = [t.detach().requires_grad_() for t in given[:3]]
    forward, both = passes(planned(plan), given)
    _, without_plan = passes(partial(ring_attn, **how), given)

    def new_plan() -> RingPlan:
        found = dict(plan_cache._plans)
        plan_cache.forget()
        made = RingPlan.make(*leaves, **how)
        plan_cache._plans.update(found)  # or who has no plan would record its calls anew
        return made

    return {
        "forward": forward,
        "forward and backward": both,
        "forward and backward, without a plan": without_plan,
        "RingPlan.make, once more": partial(RingPlan.make, *leaves, **how),
        "RingPlan.make, anew": new_plan,
    }


def seconds_of_a_launch(device: torch.device) -> float:
    """Return the host's seconds to launch a small operation."""
    t = torch.zeros(1, device=device)
    for _ in range(2):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(_LAUNCHES):
            t.zero_()
        took = time.perf_counter() - start
    return took / _LAUNCHES


def predictions(plan: RingPlan) -> list[str]:
    """Return the rows of what was predicted."""
    found = predicted(plan)
    return [
        f"| predicted of the GPU | {1e6 * found.gpu:.0f} |",
        f"| predicted of the host | {1e6 * found.host:.0f} |",
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    options = parser(
        "defaults", __doc__, device="cuda", tokens=[2048, 8192], heads=[32, 8], dim_head=128,
        dtype=None, rounds=5, repeats=10,
    )  # fmt: skip
    options.set_defaults(mask=["causal"])
    asked = options.parse_args(argv)
    with joined(asked.device) as device:
        launch = 1e6 * seconds_of_a_launch(device)
        said = [f"{device_name(device)}, a launch {launch:.1f} us"]
        for shape in shapes(asked, device):
            given = shape.tensors(shape.tokens, seed=torch.distributed.get_rank())
            leaves = [t.detach().requires_grad_() for t in given[:3]]
            plan = RingPlan.make(*leaves, causal=True, layout="zigzag")
            runs = subjects(shape, plan, given)
            pairs = {Subject(name): (run, run) for name, run in runs.items()}
            times = by_turns(pairs, device, asked.rounds, asked.repeats)
            said += ["", f"| {shape.tokens} tokens a rank, {plan.kernel.name}, "
                     f"{type(plan.transport).__name__} | us |", "| --- | ---: |"]  # fmt: skip
            said += [f"| {each.name} | {1e6 * found.both:.0f} |" for each, found in times.items()]
            if device.type == "cuda":
                said += predictions(plan)
        if torch.distributed.get_rank() == 0:
            print("\n".join(said))
