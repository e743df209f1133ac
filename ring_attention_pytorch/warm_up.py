"""Warm a plan up: compile and record before the first step.

It calls attention a few times, so it is above it. `RingPlan.warm_up` is its only caller.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.autograd.anomaly_mode import set_detect_anomaly

from ring_attention_pytorch.attention import attention
from ring_attention_pytorch.plan.checks import Signature, check_qkv
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.progress import counted, say
from ring_attention_pytorch.ranks.agreement import agree, error_of
from ring_attention_pytorch.runtime.launches import compile_only, compile_together
from ring_attention_pytorch.runtime.uncopied import replaced
from ring_attention_pytorch.shared_keys import attend_with_shared

_CALLS = 4  # the first one, two that are recorded, one that replays the recording


def warm_up(plan: RingPlan, given: Sequence[Tensor], sinks: Tensor | None) -> None:
    """Implement `RingPlan.warm_up`."""
    if plan.codec is not None:
        raise ValueError(
            f"warm_up has no parameters of {plan.codec}; run one call of the layer, with backward"
        )
    differentiable = torch.is_grad_enabled()
    same = {"plan": plan.number, "grad mode": differentiable, "sinks": sinks is not None}
    agree(plan.ring, "warming up a plan", same, check=lambda: _check(plan.signature, given))
    shards = given or _shards(plan.signature, plan.device)
    shared = [] if plan.shared is None else _shards(plan.shared.signature, plan.device)[1:]
    tensors = [t.detach().requires_grad_(differentiable) for t in (*shards, *shared)]
    if _launches_ours(plan):
        _compile(plan, tensors, sinks)
    for _ in counted(range(_CALLS), "warming up", _CALLS, "calls"):
        _call(plan, tensors, sinks)
    if plan.device.type == "cuda":
        torch.cuda.synchronize(plan.device)


def _call(plan: RingPlan, tensors: list[Tensor], sinks: Tensor | None) -> None:
    """Make a call with q, k, v, and shared keys and values if there are any."""
    q, k, v, *shared = tensors
    if shared:
        out, _ = attend_with_shared(plan, (q, k, v, sinks), (shared[0], shared[1]))
    else:
        out, _ = attention(plan, q, k, v, sinks)
    if out.requires_grad:  # of a scalar: with a cotangent, PyTorch imports sympy, which takes 1 s
        torch.autograd.grad(out.square().sum(), tensors)


def _launches_ours(plan: RingPlan) -> bool:
    """True if a plan launches kernels that we compile; the same on all ranks."""
    kernels = [each.kernel.name for each in (plan, plan.shared) if each is not None]
    return plan.device.type == "cuda" and "triton" in "+".join(kernels).split("+")


def _compile(plan: RingPlan, tensors: list[Tensor], sinks: Tensor | None) -> None:
    """Compile the kernels of calls, by one rank of each host first; others load its disk cache."""
    with compile_only() as calls:
        wrong = error_of(lambda: _dry_run(plan, tensors, sinks))
    agree(plan.ring, "compiling kernels", {}, check=wrong)
    machines = plan.ring.machines
    is_first = machines.index(machines[plan.ring.rank]) == plan.ring.rank
    kernels = [*calls.values()]
    say("compiling %d kernels", len(kernels))
    for now in (kernels, []) if is_first else ([], kernels):
        with torch.cuda.device_of(tensors[0]):
            agree(plan.ring, "compiled kernels", {}, check=partial(compile_together, now))


def _dry_run(plan: RingPlan, tensors: list[Tensor], sinks: Tensor | None) -> None:
    """Run a call within `compile_only`: no kernel is launched, so results are undefined.

    Backward runs in this thread, because `compile_only` is per thread. The plan is a copy: the
    original would count this as its first call. For swaps of heads, which do run, it is the first.
    """
    with torch.autograd.set_multithreading_enabled(False), set_detect_anomaly(False):
        shared = None if plan.shared is None else replaced(plan.shared)
        _call(replaced(plan, shared=shared), tensors, sinks)


def _check(wanted: Signature, given: Sequence[Tensor]) -> None:
    """Raise ValueError if the given tensors, if any, don't fit the plan."""
    if not given:
        return
    if len(given) != 3:
        raise ValueError(f"give q, k and v, or none of them; got {len(given)} tensors")
    check_qkv(*given)
    if (got := Signature.of(*given)) != wanted:
        raise ValueError(
            f"the plan was made for {wanted!r}; got {got!r}; warm it up with such tensors"
        )


def _shards(signature: Signature, device: torch.device) -> list[Tensor]:
    """Make contiguous q, k and v that fit a plan; not zeros, which a kernel can treat specially."""
    b, n, m, h, h_kv, d, d_v, dtype, _ = signature
    shapes = (b, n, h, d), (b, m, h_kv, d), (b, m, h_kv, d_v)
    dtype = getattr(torch, dtype.removeprefix("torch."))
    return [torch.full(shape, 0.5, dtype=dtype, device=device) for shape in shapes]
