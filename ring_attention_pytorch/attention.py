"""Ring attention: queries stay, keys and values travel; one loop forward and one backward.

Liu et al. 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context", section 3;
partial results are merged as in flash attention (Dao et al. 2022). These two loops serve every
layout, mask, kernel and transport.

    rank 0  | own keys   | keys of 3  | keys of 2  | keys of 1  |    each rank keeps its queries;
    rank 1  | own keys   | keys of 0  | keys of 3  | keys of 2  |    while it computes with the keys
    rank 2  | own keys   | keys of 1  | keys of 0  | keys of 3  |    that arrived, the next ones
    rank 3  | own keys   | keys of 2  | keys of 1  | keys of 0  |    are in flight

Words:

    rank       a place in the ring
    layout     which tokens each rank holds
    segment    positions start, start + stride, ... that a rank holds
    owner      the rank whose keys these are
    block      keys in memory together: one owner's in a ring, several owners' in a gather
    tile       a rectangle of scores with a band: its row i sees column j if -left <= j - i <= right
    plan       all decisions before the call, agreed by all ranks, shared by all layers
    transport  sends keys to the ranks that need them, and gradients to the keys' owners
    kernel     computes attention on the tiles of one block
    terms      how a score is computed: scale, clamp, slopes, dropout
    result     out and lse of the keys so far, accumulated in a wide dtype, rounded once

Read on in this order: geometry/layouts.py, geometry/tiles.py, comm/scheduled_transport.py,
comm/send_recv.py, kernels/eager.py, runtime/accumulate.py. The rest are variants of these, and the
code that makes the plan (plan/ring_plan.py).
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ring_attention_pytorch.plan.placement import check_began_here, current, opened
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.runtime.accumulate import Deferred, GradAccumulator, OutputAccumulator
from ring_attention_pytorch.runtime.codec import Codec
from ring_attention_pytorch.runtime.interfaces import Grads, Residuals, grad_of_sinks
from ring_attention_pytorch.runtime.torch_func import Function, forward_mode, resolved
from ring_attention_pytorch.second_order import (
    gathered_attention,
    gathered_gradients,
    pulled_back,
    pushed_forward,
)

# q, k, v, sinks, and parameters of the plan's kernel, if it has some
Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None, *tuple[Tensor, ...]]
Result = tuple[Tensor, Tensor]  # out, lse
Saved = tuple[  # and out, lse, dout, dlse
    Tensor, Tensor, Tensor, Tensor | None, *tuple[Tensor, ...],
    Tensor, Tensor, Tensor, Tensor | None,
]  # fmt: skip
Gradients = tuple[Tensor | Any, ...]  # None where the input was None


def forward(plan: RingPlan, *inputs: *Inputs) -> Result:
    """Compute (out, lse) of this rank's (q, k, v, sinks).

    q `[b, n, h, d]`, k `[b, m, h_kv, d]`, v `[b, m, h_kv, d_v]`, sinks `[h]` or None -> out
    `[b, n, h, d_v]`, lse `[b, h, n]`. Parameters of the plan's kernel, if it has some, follow.
    """
    q, k, v, sinks, *params = inputs
    kernel = plan.kernel.begin(params)
    calls = plan.calls(back=False) if sinks is None else None
    result = OutputAccumulator(q, plan.d_v, calls)
    with torch.autocast(q.device.type, enabled=False):
        for keys in plan.transport.stream(plan.keys(k, v)):
            for samples, tiles in plan.tiles(keys.segments):
                kv, so_far = keys.samples(samples), result.samples(samples)
                kernel.forward(q[samples], kv, tiles, plan.terms, so_far)
    if sinks is not None:
        result.add_sinks(sinks)
    return result.finalize()


def backward(plan: RingPlan, *saved: *Saved) -> Gradients:
    """Compute (dq, dk, dv, dsinks) of this rank's (q, k, v, sinks, out, lse, dout, dlse).

    Parameters of the plan's kernel come after sinks, and so do their gradients, which are of this
    rank's queries alone.
    """
    q, k, v, sinks, *params, out, lse, dout, dlse = saved
    kernel, calls, deferred = plan.kernel.begin(params), plan.calls(back=True), Deferred()
    kv_calls = calls if plan.alone else None
    own = Grads(
        GradAccumulator(q, calls, deferred=deferred),
        GradAccumulator(k, kv_calls),
        GradAccumulator(v, kv_calls),
    )
    with torch.autocast(q.device.type, enabled=False):
        residuals = Residuals(q, out, lse, dout, dlse)
        for keys, (dk, dv) in plan.transport.stream_back(plan.keys(k, v), own[1:], deferred):
            for samples, tiles in plan.tiles(keys.segments):
                rows, kv = residuals.samples(samples), keys.samples(samples)
                grads = Grads(own.dq, dk, dv).samples(samples)
                kernel.backward(rows, kv, tiles, plan.terms, grads)
        deferred.do()
        dsinks = None if sinks is None else grad_of_sinks(sinks, residuals)
    return *(total.finalize() for total in own), dsinks, *kernel.grads()


def attention(
    plan: RingPlan, *given: *Inputs, codec: Codec | None = None, return_lse: bool = False
) -> tuple[Tensor, Tensor | Any]:
    """Compute (out, lse) of (q, k, v, sinks), with autograd where an input needs derivatives.

    With a codec, the plan's, k and v are encoded keys, and its parameters follow sinks. Under
    Ulysses a rank uses, and has gradients of, its own heads' parameters only. lse can be None
    without `return_lse`.

    Raises:
        ValueError: the plan was made for other tensors, or for another codec.
    """
    q, k, v, sinks, *params = given
    swap = plan.ulysses
    plain = plan.check(q, k, v, sinks, codec) and not params
    if swap is not None:
        q, k, v = swap.to_heads(q, k, v)
        sinks = None if sinks is None else sinks[swap.heads]
        params = [p[swap.heads] for p in params]
    given = q, k, v, sinks, *params
    if not plain:
        given = resolved(q), resolved(k), resolved(v), resolved(sinks), *map(resolved, params)
    if torch.is_grad_enabled() or forward_mode():
        out, lse = RingAttentionFunction.apply(plan, *given)
    else:
        out, lse = plan.run("forward", forward, *given, back_of=None)
    if swap is None:
        return out, lse
    return swap.to_sequence(out, lse if return_lse else None)


class RingAttentionFunction(Function):
    """(plan, q, k, v, sinks, and parameters of a codec) -> (out, lse)."""

    @staticmethod
    def forward(plan: RingPlan, *given: *Inputs) -> Result:
        out, lse = plan.run("forward", forward, *given, back_of=None)
        if forward_mode():  # tangents must have the strides of results
            return out.contiguous(), lse.contiguous()
        return out, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        plan, *given = inputs
        ctx.plan, ctx.number = plan, plan.ring.steps.number  # of the call that was just made
        ctx.block = current() if opened else None
        ctx.save_for_backward(*given, *output)
        if forward_mode():
            ctx.save_for_forward(*given, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Gradients:
        *given, out, lse = ctx.saved_tensors
        if ctx.block is not None:
            check_began_here(ctx.block)
            ctx.block = None  # nothing in the block will be recomputed any more
        dout, dlse = torch.zeros_like(out) if dout is None else resolved(dout), resolved(dlse)
        if torch.is_grad_enabled() or forward_mode():  # this is differentiated itself
            saved = *given, out.detach(), lse.detach(), dout, dlse
            return None, *RingGradients.apply(ctx.plan, ctx.number, *saved)
        saved = *given, out, lse, dout, dlse
        return None, *ctx.plan.run("backward", backward, *saved, back_of=ctx.number)

    @staticmethod
    def jvp(ctx: Any, _: None, *along: Tensor | None) -> Result:
        *given, _, _ = ctx.saved_tensors
        attend = partial(gathered_attention, ctx.plan, ctx.number)
        tout, tlse = pushed_forward(attend, given, along)
        return tout.contiguous(), tlse.contiguous()


class RingGradients(Function):
    """(plan, back_of, q, k, v, sinks, ..., out, lse, dout, dlse) -> (dq, dk, dv, dsinks, ...)."""

    @staticmethod
    def forward(plan: RingPlan, back_of: int, *saved: *Saved) -> Gradients:
        return plan.run("backward", backward, *saved, back_of=back_of)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Gradients) -> None:
        plan, _, *saved = inputs
        RingAttentionFunction.setup_context(ctx, (plan, *saved), ())

    @staticmethod
    def backward(ctx: Any, *along: Tensor | None) -> Gradients:
        *given, _, _, dout, dlse = ctx.saved_tensors  # once: checkpointing unpacks them once only
        gradients = partial(gathered_gradients, ctx.plan, ctx.number)
        *grads, of_dout, of_dlse = pulled_back(gradients, (*given, dout, dlse), along)
        return None, None, *grads, None, None, of_dout, of_dlse

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, *along: Tensor | None) -> Gradients:
        *given, _, _, dout, dlse = ctx.saved_tensors
        gradients = partial(gathered_gradients, ctx.plan, ctx.number)
        return pushed_forward(gradients, (*given, dout, dlse), (*along[:-4], *along[-2:]))
