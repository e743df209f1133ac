"""Measure attention near exactly and far in summary, against exact attention, by tokens.

    python -m benchmarks summaries --save                                # one GPU
    torchrun --nproc-per-node 2 -m benchmarks summaries                  # the sequence over two
    python -m benchmarks summaries --device cpu --lengths 2048 4096      # a rough idea

Time is of forward and backward, summaries and their gradients included, for keys and values that
are projected already. "keys" are those that a query sees on average by the formula: window + half
a stride + select * stride + min(N / 2, distance) / stride, or N / 2 exactly. If time follows the
formula, "tflops" stays as it is while tokens grow. The plan, "plan_ms", is made once for all
layers.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.lib.clock import all_done, slowest_rank
from benchmarks.lib.options import parser
from benchmarks.lib.results import Row, Run, rounded
from benchmarks.lib.rings import device_name, gpus, joined
from ring_attention_pytorch import RingPlan, ring_attn
from ring_attention_pytorch.summaries import SummaryPlan, summarize, summary_attn

LENGTHS = [2**14, 2**15, 2**16, 2**17, 2**18, 2**19, 2**20]
SUBJECTS = ("bounded", "summaries", "exact")
LAYOUT = "zigzag"


@dataclass(frozen=True)
class Setting:
    """Say what is measured."""

    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    heads: int = 8
    key_heads: int = 2
    dim_head: int = 64
    window: int = 1024
    stride: int = 16
    distance: int = 2**16
    select: int = 0

    def bound(self, subject: str) -> int | None:
        """Return how far summaries are seen: whole cells beyond the window."""
        return self.window + self.distance if subject == "bounded" else None

    def keys(self, subject: str, length: int) -> float:
        """Return how many keys a query sees by the formula."""
        if subject == "exact":
            return length / 2
        bound = self.bound(subject)
        far = length / 2 if bound is None else min(length / 2, bound)
        near = self.window + self.stride / 2 + self.select * self.stride
        return min(length / 2, near) + far / self.stride

    def flops(self, subject: str, length: int) -> float:
        """Return FLOPs of forward and backward, which has 2.5 times forward's."""
        return 3.5 * 4 * self.heads * self.dim_head * length * self.keys(subject, length)


class Case:
    """Hold the tensors of one length, and make the plan and step of a subject."""

    def __init__(self, setting: Setting, subject: str, length: int, ranks: int) -> None:
        self.setting, self.subject = setting, subject
        torch.manual_seed(0)
        own, kinds = length // ranks, dict(device=setting.device, dtype=setting.dtype)
        heads = setting.heads, setting.key_heads, setting.key_heads
        shapes = [(1, own, h, setting.dim_head) for h in heads]
        self.q, self.k, self.v = (torch.randn(s, **kinds, requires_grad=True) for s in shapes)
        self.dout = torch.randn_like(self.q)
        weights = setting.key_heads, setting.stride
        self.weights = tuple(
            torch.zeros(weights, device=setting.device, requires_grad=True) for _ in range(2)
        )

    def plan(self) -> RingPlan:
        """Make the plan."""
        tensors, layout = (self.q, self.k, self.v), LAYOUT
        if self.subject == "exact":
            return RingPlan.make(*tensors, causal=True, layout=layout)
        rule = {name: getattr(self.setting, name) for name in ("window", "stride", "select")}
        return SummaryPlan.make(
            *tensors, **rule, distance=self.setting.bound(self.subject), layout=layout
        )

    def step(self, plan: RingPlan) -> Callable[[], None]:
        """Make a call of forward and backward."""
        leaves = [self.q, self.k, self.v]
        if isinstance(plan, SummaryPlan):
            leaves += self.weights

        def run() -> None:
            if isinstance(plan, SummaryPlan):
                far = summarize(self.k, self.v, plan=plan, weights=self.weights)
                out = summary_attn(self.q, self.k, self.v, *far, plan=plan)
            else:
                out = ring_attn(self.q, self.k, self.v, plan=plan)
            torch.autograd.grad(out, leaves, self.dout, allow_unused=True)

        return run


def measured(setting: Setting, subject: str, length: int, ranks: int) -> Row:
    """Measure one subject at one length: the least time of some calls, after one that warms up."""
    case, cuda = Case(setting, subject, length, ranks), setting.device == "cuda"
    start = all_done(setting.device)
    plan = case.plan()
    planned = all_done(setting.device) - start
    held = 0
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    run, times = case.step(plan), []
    run()
    while not times or (len(times) < 3 and sum(times) < 3.0):
        start = all_done(setting.device)
        run()
        times.append(all_done(setting.device) - start)
    (seconds,) = slowest_rank([min(times)], setting.device)
    row = {
        "tokens": length, "mask": "causal", "pass": "both", "subject": subject, "ranks": ranks,
        "keys": round(setting.keys(subject, length)), "ms": rounded(1e3 * seconds),
        "tflops": rounded(setting.flops(subject, length) / ranks / seconds / 1e12),
        "plan_ms": rounded(1e3 * planned),
    }  # fmt: skip
    if cuda:
        row["peak_gib"] = round((torch.cuda.max_memory_allocated() - held) / 2**30, 2)
    return row


def error(setting: Setting) -> Tensor:
    """Return the relative error of out and gradients against the same in float32 on the CPU."""
    found = []
    for device, dtype in ((setting.device, setting.dtype), ("cpu", torch.float32)):
        case = Case(setting, "summaries", 2**12, 1)
        leaves = [t.detach().to(device, dtype).requires_grad_() for t in (case.q, case.k, case.v)]
        rule = dict(window=setting.window, stride=setting.stride)
        plan = SummaryPlan.make(*leaves, **rule)
        out = summary_attn(*leaves, *summarize(*leaves[1:], plan=plan), plan=plan)
        grads = torch.autograd.grad(out, leaves, case.dout.to(device, dtype))
        found.append([t.detach().float().cpu() for t in (out, *grads)])
    return torch.stack([(a - b).norm() / b.norm() for a, b in zip(*found)])


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and with `--save` keep."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    options = parser("summaries", __doc__, save="summaries", device=default, heads=[8, 2])
    options.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    options.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=SUBJECTS)
    for name in ("dim_head", "window", "stride", "distance", "select"):
        shown = name.replace("_", "-")
        options.add_argument(f"--{shown}", type=int, default=getattr(Setting, name))
    options.add_argument("--exact-up-to", type=int, default=2**19, help="the longest exact run")
    asked = options.parse_args(argv)
    together = dist.is_torchelastic_launched()
    with joined(asked.device) if together else nullcontext(torch.device(asked.device)) as device:
        dtype = torch.bfloat16 if asked.device == "cuda" else torch.float32
        rule = asked.dim_head, asked.window, asked.stride, asked.distance, asked.select
        setting = Setting(asked.device, dtype, *asked.heads, *rule)
        about = dict(heads=asked.heads, head_dim=asked.dim_head, window=asked.window)
        run = Run("summaries", argv, device_name(device), asked.save, **gpus(device), **about)
        ranks = dist.get_world_size() if together else 1
        if not together:
            print("errors of out, dq, dk, dv against float32:", error(setting).tolist())
        for subject in asked.subjects:
            for length in asked.lengths:
                if subject != "exact" or length <= asked.exact_up_to:
                    run.add([measured(setting, subject, length, ranks)])
        run.finish()
