"""Attention to encoded keys: the two loops of `attention`, for a codec with parameters.

The loops get encoded keys in place of k and v, and a kernel that decodes them.
"""

from copy import copy
from typing import Any

import torch
from torch import Tensor

from ring_attention_pytorch.attention import Gradients, Result, backward, forward
from ring_attention_pytorch.plan.placement import check_began_here, current
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.runtime.codec import Decoding, Pair, Tensors
from ring_attention_pytorch.runtime.resolved import resolved
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype
from ring_attention_pytorch.runtime.torch_func import (
    Function,
    forward_mode,
    is_first_order,
    keep,
    needs_derivatives,
)


def decoding(plan: RingPlan, params: Tensors, sums: Tensors = ()) -> RingPlan:
    """Return a plan for one call, whose kernel decodes by these parameters.

    The parameters' gradients are added to `sums`, if given.
    """
    found = copy(plan)  # `replace` would make a handle and recordings
    kernel = Decoding(plan.kernel, plan.codec, params, sums)
    object.__setattr__(found, "kernel", kernel)
    return found


def coded_forward(plan: RingPlan, *given: Tensor | Any) -> Result:
    """Compute (out, lse) of (q, two encoded tensors, sinks, the codec's parameters)."""
    q, first, second, sinks, *params = given
    return forward(decoding(plan, tuple(params)), q, first, second, sinks)


def coded_backward(plan: RingPlan, *given: Tensor | Any) -> Gradients:
    """Compute the gradients of all that `coded_forward` got, given that and (out, lse, dout, dlse).

    Gradients of parameters come from this rank's queries alone.
    """
    params = given[4:-4]
    sums = [torch.zeros_like(p, dtype=accumulation_dtype(p.dtype)) for p in params]
    found = backward(decoding(plan, params, tuple(sums)), *given[:4], *given[-4:])
    return *found, *(total.to(p.dtype) for total, p in zip(sums, params))


def coded_attention(
    plan: RingPlan,
    q: Tensor,
    encoded: Pair,
    params: Tensors,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | Any]:
    """Compute (out, lse) of queries to encoded keys, as `attention.attention` does.

    Under Ulysses ranks get some heads of q, and decode the same ones: only those parameters are
    used, and have a gradient, on this rank.

    Raises:
        ValueError: the plan was made for other tensors.
        NotImplementedError: forward mode.
    """
    plan.check(q, *encoded, sinks, plan.codec)
    if forward_mode():
        raise NotImplementedError(
            "attention to encoded keys has no forward mode; expand them and call ring_attn"
        )
    first, second = encoded
    if (swap := plan.ulysses) is not None:
        q, first, second = swap.to_heads(q, first, second)
        sinks = None if sinks is None else sinks[swap.heads]
        params = tuple(p[swap.heads] for p in params)
    tensors = q, first, second, sinks, *params
    given = tuple(resolved(t) for t in tensors)
    if needs_derivatives(given):
        out, lse = CodedAttentionFunction.apply(plan, *given)
    else:
        out, lse = plan.run("forward", coded_forward, *given)
    return (out, lse) if swap is None else swap.to_sequence(out, lse if return_lse else None)


class CodedAttentionFunction(Function):
    """(plan, q, two encoded tensors, sinks, parameters) -> (out, lse)."""

    @staticmethod
    def forward(plan: RingPlan, *given: Tensor | Any) -> Result:
        return plan.run("forward", coded_forward, *given)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Result) -> None:
        keep(ctx, *inputs, *output)
        ctx.block = current()

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Gradients:
        *given, out, lse = ctx.saved_tensors
        check_began_here(ctx.block)
        ctx.block = None
        if not is_first_order():
            raise NotImplementedError(
                "attention to encoded keys can't be differentiated twice (create_graph); expand "
                'them and call ring_attn with kernel="eager"'
            )
        dout = torch.zeros_like(out) if dout is None else resolved(dout)
        saved = *given, out, lse, dout, resolved(dlse)
        return None, *ctx.plan.run("backward", coded_backward, *saved)
