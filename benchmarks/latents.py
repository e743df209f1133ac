"""Time latent attention (MLA): latents that travel beside expanded keys that do, by turns.

    torchrun --nproc-per-node 2 -m benchmarks latents --save
    python -m benchmarks latents --machines 2 --tokens 8192
    python -m benchmarks latents --machines 2 --device cpu --tokens 64 --heads 4 --sizes 16 8 16 32

Shapes are of DeepSeek V3: 128 heads, keys of 128 and 64 rotated, values of 128, latents of 512.
"expanded" projects own latents to keys and values of all heads, and sends these; gradients of both
return to latents and to the projection. "differ" has the relative difference of out, and the worst
of gradients, between the two. "sent_mib" is what all ranks together send, forward and backward, by
their plans: to other machines if there are several, else to other ranks. "peak_gib" is the most
that a first call needs beyond inputs, with memory shared among ranks.

With `--machines` the GPUs of this host are those of several machines (benchmarks/lib/machines.py);
"loopback_mib" are the bytes that came over the sockets between them. Their times are of sockets.
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.lib.attempts import attempt
from benchmarks.lib.clock import all_done, slowest_rank
from benchmarks.lib.machines import received, start
from benchmarks.lib.options import parser
from benchmarks.lib.results import Row, Run, Subject, by_pass, failed, named_errors
from benchmarks.lib.rings import Times, by_turns, device_name, gpus, joined
from benchmarks.ring import shared_gib
from ring_attention_pytorch import RingPlan, mla_plan, mla_ring_attn, ring_attn
from ring_attention_pytorch.plan.over_machines import plan_crossing
from ring_attention_pytorch.schedule.relays import crossing

CAUSAL = dict(causal=True, layout="zigzag")
SIZES = 128, 64, 128, 512  # of keys, their rotated part, values and latents
Attend = Callable[..., Tensor]


class Case(NamedTuple):
    """This rank's tensors, and the cotangent of out."""

    leaves: list[Tensor]  # q_nope, q_rope, latent, k_rope, w_up
    dout: Tensor

    @classmethod
    def drawn(cls, tokens: int, asked: Namespace, device: torch.device) -> "Case":
        """Draw a rank's tensors; the projection is the same on all."""
        h, (nope, rope, wide, rank) = asked.heads, asked.sizes
        name = asked.dtype or ("bfloat16" if device.type == "cuda" else "float32")
        kinds = dict(device=device, dtype=getattr(torch, name))
        torch.manual_seed(0)
        w_up = torch.randn(h, nope + wide, rank, **kinds) * rank**-0.5
        torch.manual_seed(1 + dist.get_rank())
        shapes = (h, nope), (h, rope), (rank,), (rope,), (h, wide)
        *leaves, dout = (torch.randn(1, tokens, *shape, **kinds) for shape in shapes)
        return cls([t.requires_grad_() for t in (*leaves, w_up)], dout)

    def forward(self, attend: Attend) -> None:
        with torch.no_grad():
            attend(*self.leaves)

    def both(self, attend: Attend) -> tuple[Tensor, ...]:
        """Compute out, and the gradient of each tensor."""
        out = attend(*self.leaves)
        return out.detach(), *torch.autograd.grad(out, self.leaves, self.dout)


class Measured(NamedTuple):
    """One way: its plan, its first results, the GiB that it took, MiB over loopback."""

    plan: RingPlan
    results: tuple[Tensor, ...]
    peak: float
    came: float


def expanded(*tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of all heads."""
    q_nope, q_rope, latent, k_rope, w_up = tensors
    heads, nope = q_nope.shape[2:]
    both = F.linear(latent, w_up.flatten(0, 1)).unflatten(-1, (heads, -1))
    k_nope, v = both.tensor_split((nope,), dim=-1)
    rotated = k_rope[:, :, None].expand(-1, -1, heads, -1)
    return torch.cat((q_nope, q_rope), -1), torch.cat((k_nope, rotated), -1), v


def ways(case: Case, kernel: str | None) -> dict[str, tuple[RingPlan, Attend]]:
    """Make the plan and the call of each way."""
    coded = mla_plan(*case.leaves, kernel=kernel, **CAUSAL)
    plan = RingPlan.make(*expanded(*case.leaves), kernel=kernel, **CAUSAL)
    return {
        "latents": (coded, lambda *tensors: mla_ring_attn(*tensors, plan=coded)),
        "expanded": (plan, lambda *tensors: ring_attn(*expanded(*tensors), plan=plan)),
    }


def first(case: Case, plan: RingPlan, attend: Attend) -> Measured:
    """Call a way, and once more to count what crosses."""
    device, before = case.dout.device, 0
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    results = case.both(attend)
    peak = torch.cuda.max_memory_allocated() - before if device.type == "cuda" else 0
    all_done(device)
    begin = received()
    case.both(attend)
    all_done(device)
    came = (received() - begin) / 2**20
    return Measured(plan, results, peak / 2**30 + shared_gib(device), came)


def sent(plan: RingPlan) -> float:
    """Return the MiB that all ranks send to other machines; on one machine, to other ranks."""
    if any(plan.ring.machines):
        return plan_crossing(plan).total / 2**20
    return crossing(plan.schedule, tuple(range(plan.ring.size)), plan.chosen.shape).total / 2**20


def differences(one: Sequence[Tensor], other: Sequence[Tensor]) -> tuple[float, float]:
    """Return the relative difference of out, and the worst of gradients, of any rank."""
    pairs = [(a.float(), b.float()) for a, b in zip(one, other)]
    for t in pairs[-1]:  # the projection's: each rank has a part of the sum
        dist.all_reduce(t)
    found = [(a - b).norm() / b.norm() for a, b in pairs]
    worst = found[0].item(), torch.stack(found[1:]).max().item()
    out, gradients = slowest_rank(worst, found[0].device)
    return out, gradients


def measured(case: Case, kernel: str | None, asked: Namespace) -> Iterator[Row]:
    """Measure both ways, and make their rows."""
    device = case.dout.device
    about: Row = {"tokens": case.dout.shape[1], "mask": "causal", "heads": asked.heads}
    about |= {"dtype": str(case.dout.dtype).removeprefix("torch.")}
    made = attempt(lambda: ways(case, kernel))
    if isinstance(made, str):
        yield from failed(about | Subject("latents", kernel).about(), made)
        return
    found: dict[Subject, Measured] = {}
    for name, (plan, attend) in made.items():
        subject = Subject(name, plan.kernel.name)
        result = attempt(lambda plan=plan, attend=attend: first(case, plan, attend))
        if isinstance(result, str):
            yield from failed(about | subject.about(), result)
        else:
            found[subject] = result
    runs = {
        subject: tuple(
            lambda call=call, attend=made[subject.name][1]: call(attend)
            for call in (case.forward, case.both)
        )
        for subject in found
    }
    said = differences(*(each.results for each in found.values())) if len(found) == 2 else ()
    times = by_turns(runs, device, asked.rounds, asked.repeats)
    for subject, each in found.items():
        yield from rows(about | subject.about(), each, times[subject], said)


def rows(about: Row, found: Measured, times: Times, differ: Sequence[float]) -> Iterator[Row]:
    """Make the rows of a way."""
    plan, (forward, both, _) = found.plan, times
    more: Row = {"fabric": plan.transport.fabric.name or "messages", "ulysses": plan.degree}
    more |= {"peak_gib": round(found.peak, 2), "sent_mib": round(sent(plan), 3)}
    if any(plan.ring.machines):
        more["loopback_mib"] = round(found.came, 3)
    more["differ"] = named_errors(("out", "gradients"), differ)
    figures = [1e3 * each for each in (forward, both - forward, both)]
    yield from by_pass(about, "milliseconds", figures, **more)


def main(argv: Sequence[str] | None = None) -> int | None:
    """Measure, print, and with `--save` keep."""
    options = parser(
        "latents", __doc__, save="latents", device="cuda", tokens=[8192, 32768], dtype=None,
        kernels=[None], rounds=5, repeats=1,
    )  # fmt: skip
    options.add_argument("--heads", type=int, default=128)
    options.add_argument("--sizes", type=int, nargs=4, default=SIZES, metavar="D", help="of heads")
    options.add_argument("--machines", type=int, default=1)
    asked = options.parse_args(argv)
    words = sys.argv[1:] if argv is None else [*argv]
    if asked.machines > 1 and not dist.is_torchelastic_launched():
        return start(asked.machines, "benchmarks latents", words, asked.device)
    with joined(asked.device) as device:
        facts = gpus(device) | {"machines": asked.machines}
        run = Run("latents", argv, device_name(device), asked.save, **facts)
        if asked.machines > 1:
            _, _, rest = run.facts["command"].partition("-m benchmarks")
            run.facts["command"] = f"python -m benchmarks{rest}"
        for tokens in asked.tokens:
            for kernel in asked.kernels:
                run.add(measured(Case.drawn(tokens, asked, device), kernel, asked))
        run.finish()
    return None
