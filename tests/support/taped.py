"""Results of a plan that are recorded, replayed, or neither."""

import torch
from torch import Tensor

from ring_attention_pytorch import RingPlan, ring_attn
from ring_attention_pytorch.plan import plan_cache


def replayed(plan: RingPlan) -> list[str]:
    """List the functions of a plan that have a tape."""
    kept = plan.tapes.by_kind.items()
    return sorted(kind[0].__name__ for kind, known in kept if known.replay)


def untaped(given: list[Tensor], **options: object) -> RingPlan:
    """Make a plan whose calls are never taped."""
    plan_cache.forget()
    plan = RingPlan.make(*given, **options)
    object.__setattr__(plan, "tapes", None)
    plan_cache.forget()
    return plan


def results(plan: RingPlan, given: list[Tensor], dout: Tensor, **more: Tensor) -> list[Tensor]:
    out, lse = ring_attn(*given, plan=plan, return_lse=True, **more)
    wanted = [*given, *more.values()]
    grads = torch.autograd.grad((out, lse), wanted, (dout, torch.cos(lse).detach()))
    return [out, lse, *grads]
