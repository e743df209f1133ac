"""Keys that all ranks hold, beside those that are spread over the ring: `shared_keys`.

    ring attention   this rank's queries, everyone's keys  ─┐
                                                            ├─ merge_attention ── one softmax
    no messages      this rank's queries, shared keys      ─┘

Each rank gives the same shared keys. Their gradients are sums over ranks, and the same bits on all
of them: one more exchange in backward, after the ring's.
"""

from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ring_attention_pytorch.attention import RingAttentionFunction, forward
from ring_attention_pytorch.comm.exchange import all_gather_stacked
from ring_attention_pytorch.plan.checks import check_tensors
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.plan.shared import Shared
from ring_attention_pytorch.ranks.agreement import agree
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime.digests import digest
from ring_attention_pytorch.runtime.resolved import resolved
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype, wire_dtype
from ring_attention_pytorch.runtime.torch_func import (
    Function,
    is_first_order,
    needs_derivatives,
)

_CALL = "summing gradients of shared keys"


def attend_shared(plan: RingPlan, q: Tensor, shared: Shared | None) -> tuple[Tensor, Tensor]:
    """Compute (out, lse) of this rank's queries to keys that all ranks hold.

    Raises:
        ValueError: the plan was made for other shared keys, or ranks that compare values differ.
    """
    of_shared = _checked(plan, q, shared)
    k, v = (resolved(t) for t in shared or ())
    if plan.agreed.always:
        _compare(plan, k, v)
    if plan.ring.size > 1 and needs_derivatives((k, v)):
        k, v = _Shared.apply(plan.ring, k, v)
    given = resolved(q), k, v, None
    if needs_derivatives(given):
        return RingAttentionFunction.apply(of_shared, *given)
    return of_shared.run("forward", forward, *given)


def _checked(plan: RingPlan, q: Tensor, shared: Shared | None) -> RingPlan:
    """Return the plan of the shared keys, which must be as in this call."""
    try:
        if shared is None or plan.shared is None:
            made, got = ("without", "some") if plan.shared is None else ("with", "none")
            raise ValueError(f"the plan was made {made} shared_keys, got {got}; make one for these")
        check_tensors(plan.shared.expected, (q, *shared), None)
    except ValueError as error:
        plan.ring.report_failure(f"raised ValueError: {error}")  # others wait for this rank
        raise ValueError(f"ring attention: shared_keys: {error}") from None
    return plan.shared


def _compare(plan: RingPlan, k: Tensor, v: Tensor) -> None:
    """Raise on all ranks if their shared keys, or masks of these, have different values."""
    mask = None if plan.shared is None else plan.shared.key_mask
    values = {
        "the values of shared_keys": [digest(k), digest(v)],
        "the values of shared_key_mask": None if mask is None else digest(mask.to(torch.uint8)),
    }
    agree(plan.ring, "ring attention", values)


class _Shared(Function):
    """(ring, k, v) -> (k, v), whose gradients are summed over ranks."""

    @staticmethod
    def forward(ring: Ring, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k.view_as(k), v.view_as(v)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.ring = inputs[0]

    @staticmethod
    def backward(ctx: Any, dk: Tensor, dv: Tensor) -> tuple[None, Tensor, Tensor]:
        summed = _total if is_first_order() else _Total.apply
        of_k, of_v = summed(ctx.ring, dk, dv)
        return None, of_k, of_v

    @staticmethod
    def jvp(ctx: Any, _: None, tk: Tensor, tv: Tensor) -> tuple[Tensor, Tensor]:
        return tk.view_as(tk), tv.view_as(tv)


class _Total(Function):
    """(ring, dk, dv) -> their sums over ranks; so are the gradients of these."""

    @staticmethod
    def forward(ring: Ring, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        return _total(ring, dk, dv)

    setup_context = _Shared.setup_context

    @staticmethod
    def backward(ctx: Any, a: Tensor, b: Tensor) -> tuple[None, Tensor, Tensor]:
        return None, *_Total.apply(ctx.ring, a, b)

    @staticmethod
    def jvp(ctx: Any, _: None, tdk: Tensor, tdv: Tensor) -> tuple[Tensor, Tensor]:
        return _Total.apply(ctx.ring, tdk, tdv)


def _total(ring: Ring, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
    """Sum over ranks, in their order and in wide numbers, so that all get the same bits."""
    both = torch.cat((dk.flatten(), dv.flatten())).to(wire_dtype(dk.dtype))
    with ring.call(_CALL):
        parts = all_gather_stacked(both, ring).to(accumulation_dtype(dk.dtype))
    total = reduce(torch.add, parts.unbind()).to(dk.dtype)
    of_k, of_v = total.split((dk.numel(), dv.numel()))
    return of_k.view(dk.shape), of_v.view(dv.shape)
