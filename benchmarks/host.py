"""Split the host's time of a call by cause, where there is next to nothing to compute.

    python -m benchmarks host                  # 16 tokens, one process
    python -m benchmarks host --tokens 128
    python -m benchmarks host --device cuda --tokens 16 2048 --heads 32 8 --dim-head 128

Each line adds something to the line above, so the last column is what that costs. Subjects take
turns, one thread each; times are lower quartiles of the rounds. "operations" are what a call's
tape replays. The first lines are PyTorch's own attention; goals are multiples of them.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.lib.options import parser
from ring_attention_pytorch import RingPlan, attention, ring_attn
from ring_attention_pytorch.plan import plan_cache
from ring_attention_pytorch.runtime.uncopied import replaced

Subject = Callable[[], object]
_GOALS = {
    "a call with a plan": "2.5 times",
    "a call with a plan, and backward": "2 times",
    "a new plan": "120 us",
}


def main(argv: Sequence[str] | None = None) -> None:
    options = parser("host", __doc__, tokens=[16], heads=[4, 4], dim_head=8, rounds=40, repeats=100)
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = options.parse_args(argv)
    torch.set_num_threads(1)
    for tokens in args.tokens:
        timed = subjects(args.device, tokens, *args.heads, args.dim_head)
        print(f"\n{tokens} tokens, one process, a thread of the host, tensors on {args.device}")
        for name, of in chains().items():
            found = quartiles({each: timed[each] for each in of}, args.rounds, args.repeats)
            print(table(name, of, found))


def chains() -> dict[str, list[str]]:
    """Return which subjects add to one another."""
    return {
        "forward": [
            "SDPA", "operations", "finding the tape", "the call", "a call with a plan",
            "a call whose plan is found again",
        ],
        "forward without tapes": ["SDPA", "a call with a plan", "a call without tapes"],
        "forward, to be differentiated": ["SDPA, grad", "a call with a plan, grad"],
        "forward and backward": ["SDPA, and backward", "a call with a plan, and backward"],
        "plans": ["a plan that is found again", "a new plan"],
    }  # fmt: skip


def subjects(device: str, n: int, h: int, h_kv: int, d: int) -> dict[str, Subject]:
    """Return what is timed."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shapes = [(1, n, heads, d) for heads in (h, h_kv, h_kv, h)]
    *given, dout = (torch.randn(shape, device=device, dtype=dtype) for shape in shapes)
    leaves = [t.clone().requires_grad_() for t in given]
    how = dict(causal=True, kernel="sdpa-cudnn" if device == "cuda" else None)
    plan, untaped = (replaced(RingPlan.make(*given, **how)) for _ in range(2))
    object.__setattr__(untaped, "tapes", None)
    whole = (attention.forward, *given, None)
    for _ in range(4):
        plan.run("forward", *whole, back_of=None)
    replay = next(tape.replay for tape in plan.tapes.by_kind.values() if tape.replay)

    def new_plan() -> RingPlan:
        plan_cache.forget()
        return RingPlan.make(*given, **how)

    def differentiated(run: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(run(*leaves), leaves, dout)

    with_plan, without = partial(ring_attn, plan=plan), partial(ring_attn, **how)
    return {
        "SDPA": partial(sdpa, *given),
        "operations": partial(replay, *given, None),
        "finding the tape": partial(plan.tapes.run, attention.forward, plan, *given, None),
        "the call": partial(attention.attention, plan, *given, None),
        "a call with a plan": partial(with_plan, *given),
        "a call without tapes": partial(ring_attn, *given, plan=untaped),
        "a call whose plan is found again": partial(without, *given),
        "SDPA, grad": partial(sdpa, *leaves),
        "a call with a plan, grad": partial(with_plan, *leaves),
        "SDPA, and backward": partial(differentiated, sdpa),
        "a call with a plan, and backward": partial(differentiated, with_plan),
        "a plan that is found again": partial(RingPlan.make, *given, **how),
        "a new plan": new_plan,
    }


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return PyTorch's own attention, of tensors laid out as ours."""
    grouped = q.shape[2] != k.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    return out.transpose(1, 2)


def quartiles(timed: dict[str, Subject], rounds: int, repeats: int) -> dict[str, float]:
    """Return the lower quartile of each subject's microseconds, by turns."""
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(rounds + 1):
        for name, run in timed.items():
            start = time.perf_counter()
            for _ in range(repeats):
                run()
            seconds[name].append((time.perf_counter() - start) / repeats)
            if torch.cuda.is_available():  # the device may be later than the host
                torch.cuda.synchronize()
    return {name: 1e6 * sorted(found[1:])[rounds // 4] for name, found in seconds.items()}


def table(title: str, names: Sequence[str], found: dict[str, float]) -> str:
    """Write one chain: times, multiples of the first, and what each adds to the one before."""
    lines = [f"\n| {title} | us | times the first | more than the line above | goal |"]
    lines.append("| --- | ---: | ---: | ---: | ---: |")
    before = None
    for name in names:
        more = "" if before is None else f"{found[name] - before:.1f}"
        goal = _GOALS.get(name, "")
        times = found[name] / found[names[0]]
        lines.append(f"| {name} | {found[name]:.1f} | {times:.2f} | {more} | {goal} |")
        before = found[name]
    return "\n".join(lines)
