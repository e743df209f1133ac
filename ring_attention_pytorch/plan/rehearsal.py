"""A rehearsal of a plan's calls: what it makes on its first ones is made before the first step.

Attention itself is above plans. It says here how a plan is called: `rehearsed`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ring_attention_pytorch.comm.agreement import agree, problem_of
from ring_attention_pytorch.plan.checks import Signature, qkv_problem

_CALLS = 4  # the first one, two that are recorded, one that repeats what they did

Attend = Callable[..., tuple[Tensor, Any]]
_attend: list[Attend] = []


def rehearsed(attend: Attend) -> Attend:
    """Decorate attention by a plan: `(plan, (q, k, v), sinks) -> (out, lse)`."""
    _attend[:] = [attend]
    return attend


def warm_up(plan: Any, given: Sequence[Tensor], sinks: Tensor | None) -> None:
    """Do what `RingPlan.warm_up` says."""
    problem = problem_of(lambda: _problem(plan.signature, given))
    differentiable = torch.is_grad_enabled()
    same = {"plan": plan.number, "grad mode": differentiable, "sinks": sinks is not None}
    agree(plan.ring, "warming up a plan", same, problem=problem)
    shards = given or _shards(plan.signature, plan.device)
    qkv = [t.detach().requires_grad_(differentiable) for t in shards]
    for _ in range(_CALLS):
        out, _ = _attend[0](plan, qkv, sinks)
        if differentiable:
            torch.autograd.grad(out, qkv, torch.ones_like(out))
    if plan.device.type == "cuda":
        torch.cuda.synchronize(plan.device)


def _problem(wanted: Signature, given: Sequence[Tensor]) -> str | None:
    """Say what is wrong with the tensors given; None if nothing is, or if there are none."""
    if not given:
        return None
    if len(given) != 3:
        return f"give q, k and v, or none of them; got {len(given)} tensors"
    problem = qkv_problem(*given)
    if problem is None and (got := Signature.of(*given)) != wanted:
        problem = f"the plan was made for {wanted!r}; got {got!r}; warm it up with such tensors"
    return problem


def _shards(signature: Signature, device: torch.device) -> list[Tensor]:
    """Make q, k and v that fit a plan, contiguous; of zeros a kernel may do otherwise."""
    b, n, m, h, h_kv, d, d_v, dtype, _ = signature
    shapes = (b, n, h, d), (b, m, h_kv, d), (b, m, h_kv, d_v)
    dtype = getattr(torch, dtype.removeprefix("torch."))
    return [torch.full(shape, 0.5, dtype=dtype, device=device) for shape in shapes]
