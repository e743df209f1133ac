"""Keys that all ranks hold, beside those that are spread over the ring: `shared_keys`.

    ring attention   this rank's queries, everyone's keys  ─┐
                                                            ├─ merged by lse: one softmax
    no messages      this rank's queries, shared keys      ─┘

They have a plan of their own, of this process alone: all queries see them.

Each rank gives the same shared keys. Their gradients are sums over ranks, and the same bits on all
of them: one more exchange in backward, after the ring's.
"""

from typing import Any

import torch
from torch import Tensor

from ring_attention_pytorch.arguments import checks_of
from ring_attention_pytorch.attention import Inputs, RingAttentionFunction, attention
from ring_attention_pytorch.comm.collectives import replicated
from ring_attention_pytorch.plan.checks import check_tensors
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.plan.shared import Shared
from ring_attention_pytorch.ranks.agreement import agree, reporting
from ring_attention_pytorch.ranks.ring import Caller
from ring_attention_pytorch.runtime.digests import digest
from ring_attention_pytorch.runtime.merging import merge_attention
from ring_attention_pytorch.runtime.torch_func import needs_derivatives, resolved

_CALL = "summing gradients of shared keys"


def attend_with_shared(
    plan: RingPlan, given: Inputs, shared: Shared | Any
) -> tuple[Tensor, Tensor]:
    """Compute (out, lse) of (q, k, v, sinks) and keys that all ranks hold.

    Raises:
        ValueError: the plan was made for other tensors, or ranks that compare values differ.
    """
    check_shared_plan(plan, given[0], shared)
    shared_k, shared_v = map(resolved, shared)
    if plan.agreed.always:
        _compare(plan, shared_k, shared_v)
    of_ring = attention(plan, *given, return_lse=True)
    if plan.ring.size > 1 and needs_derivatives((shared_k, shared_v)):
        caller = Caller(plan.ring, _CALL, plan.number)
        shared_k, shared_v = replicated((shared_k, shared_v), caller)
    # no `attention`: a batch's block would check where the batch's tokens are, and these are none
    q = resolved(given[0])
    of_shared = RingAttentionFunction.apply(plan.shared, q, shared_k, shared_v, None)
    return merge_attention(*of_ring, *of_shared)


def check_shared_plan(plan: RingPlan, q: Tensor, shared: Shared | None) -> None:
    """Raise ValueError unless the plan is for such shared keys, or for none."""
    with checks_of("ring attention: shared_keys"), reporting(plan.ring.report_failure):
        if shared is None or plan.shared is None:
            made, got = ("without", "some") if plan.shared is None else ("with", "none")
            raise ValueError(f"the plan was made {made} shared_keys, got {got}; make one for these")
        check_tensors(plan.shared.expected, (q, *shared), None)


def _compare(plan: RingPlan, k: Tensor, v: Tensor) -> None:
    """Raise on all ranks if their shared keys, or masks of these, have different values."""
    mask = None if plan.shared is None else plan.shared.key_mask
    values = {
        "the values of shared_keys": [digest(k), digest(v)],
        "the values of shared_key_mask": None if mask is None else digest(mask.to(torch.uint8)),
    }
    agree(plan.ring, "ring attention", values)
