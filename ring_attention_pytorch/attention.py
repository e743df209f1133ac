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
    shared     keys that all ranks hold: a block that does not travel, with a plan of its own

Read on in this order: geometry/layouts.py, geometry/tiles.py, comm/scheduled_transport.py,
comm/send_recv.py, kernels/eager.py, runtime/accumulate.py. The rest are variants of these, and the
code that makes the plan (plan/ring_plan.py).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ring_attention_pytorch.plan.placement import check_began_here, current
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.runtime.accumulate import GradAccumulator, OutputAccumulator
from ring_attention_pytorch.runtime.codec import Codec, Decoding
from ring_attention_pytorch.runtime.deferred import Deferred
from ring_attention_pytorch.runtime.interfaces import (
    Grads,
    KVBlock,
    Residuals,
    ScoreMods,
    Tiles,
    grad_of_sinks,
)
from ring_attention_pytorch.runtime.resolved import resolved
from ring_attention_pytorch.runtime.streams import reset_side_streams
from ring_attention_pytorch.runtime.torch_func import (
    Function,
    is_first_order,
    keep,
    needs_derivatives,
)
from ring_attention_pytorch.second_order import gradient_tangents, tangents

Given = tuple[Tensor, Tensor, Tensor, Tensor | None]  # q, k, v, sinks
Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None, *tuple[Tensor, ...]]  # and more
Result = tuple[Tensor, Tensor]  # out, lse
Saved = tuple[  # and out, lse, dout, dlse
    Tensor, Tensor, Tensor, Tensor | None, *tuple[Tensor, ...],
    Tensor, Tensor, Tensor, Tensor | None,
]  # fmt: skip
Gradients = tuple[Tensor | Any, ...]  # None where the input was None
SampleTiles = list[tuple[slice, Tiles]]  # samples with the same mask, and their tiles
Block = tuple[Any, ScoreMods, KVBlock, SampleTiles]  # a kernel, its terms, keys


def forward(plan: RingPlan, *given: *Inputs, into: Result | None = None) -> Result:
    """Compute (out, lse) of this rank's (q, k, v, sinks), into the tensors `into` if given.

    q `[b, n, h, d]`, k `[b, m, h_kv, d]`, v `[b, m, h_kv, d_v]`, sinks `[h]` or None -> out
    `[b, n, h, d_v]`, lse `[b, h, n]`. If the plan has a codec, k and v are encoded keys, and the
    codec's parameters follow. Without one, keys and values that all ranks hold can follow.
    """
    q, k, v, sinks, *more = given
    plan_kernel, shared = _kernel(plan, more, Decoding)
    reset_side_streams(q.device)
    calls = plan.with_shared.calls[False] if shared else plan.calls(back=False)
    result = OutputAccumulator(q, plan.values(v), calls if sinks is None else None, into)
    with torch.autocast(q.device.type, enabled=False):
        stream = plan.transport.stream(plan.keys(k, v))
        for kernel, terms, keys, by_samples in _blocks(plan, plan_kernel, stream, shared):
            for samples, tiles in by_samples:
                kv, so_far = keys.samples(samples), result.samples(samples)
                kernel.forward(q[samples], kv, tiles, terms, so_far)
    if sinks is not None:
        result.add_sinks(sinks)
    return result.finalize()


def backward(plan: RingPlan, *given: *Saved, into: Gradients | None = None) -> Gradients:
    """Compute (dq, dk, dv, dsinks) of this rank's (q, k, v, sinks, out, lse, dout, dlse).

    The gradients are written to the tensors `into`, if given. A codec's parameters, or shared keys
    and values, come after sinks, and so do their gradients, which are of this rank's queries alone.
    """
    q, k, v, sinks, *more, out, lse, dout, dlse = given
    dq, dk, dv, dsinks, *places = into or (None,) * (4 + len(more))
    plan_kernel, shared = _kernel(plan, more, Decoding.with_sums)
    reset_side_streams(q.device)
    calls, deferred = plan.calls(back=True), Deferred()
    q_calls = plan.with_shared.calls[True] if shared else calls
    kv_calls = calls if plan.alone else None
    own = Grads(
        GradAccumulator(q, q_calls, place=dq, deferred=deferred),
        GradAccumulator(k, kv_calls, place=dk),
        GradAccumulator(v, kv_calls, place=dv),
    )
    shared_grads = [GradAccumulator(t, place=place) for t, place in zip(shared, places)]
    with torch.autocast(q.device.type, enabled=False):
        saved = Residuals(q, out, lse, dout, dlse)
        stream = plan.transport.stream_back(plan.keys(k, v), own[1:], deferred)
        blocks = _blocks_back(plan, plan_kernel, stream, shared, shared_grads, deferred)
        for (kernel, terms, keys, by_samples), kv_grads in blocks:
            for samples, tiles in by_samples:
                rows, kv = saved.samples(samples), keys.samples(samples)
                grads = Grads(own.dq, *kv_grads).samples(samples)
                kernel.backward(rows, kv, tiles, terms, grads)
        deferred.do()
        dsinks = None if sinks is None else grad_of_sinks(sinks, saved, dsinks)
    dq, dk, dv, *more_grads = (total.finalize() for total in (*own, *shared_grads))
    if plan.codec is not None:
        more_grads = plan_kernel.grads()
    return dq, dk, dv, dsinks, *more_grads


def _kernel(
    plan: RingPlan, more: Sequence[Tensor], decoding: Callable[..., Decoding]
) -> tuple[Any, Sequence[Tensor]]:
    """Return the kernel of keys that travel, and the shared keys and values, if any.

    `more` is shared keys and values, or a codec's parameters, which `decoding` takes.
    """
    if plan.codec is None:
        return plan.kernel, more
    return decoding(plan.kernel, plan.codec, more), ()


def _blocks(
    plan: RingPlan, kernel: Any, stream: Iterable[KVBlock], shared: Sequence[Tensor]
) -> Iterator[Block]:
    """Yield all blocks to compute on. Shared keys follow this rank's own in memory, or come last.

    In one call with own keys they cost no more than their scores. In a call for them alone queries
    are read once more, and a result is merged.
    """
    for keys in stream:
        joined = plan.with_shared.joined.get(keys.segments) if shared else None
        if joined is None:
            yield kernel, plan.terms, keys, plan.tiles(keys.segments)
        else:
            yield kernel, plan.terms, keys.followed_by(*shared), joined
            shared = ()
    if shared:
        yield _shared_block(plan.shared, shared)


def _blocks_back(
    plan: RingPlan,
    kernel: Any,
    stream: Iterable[tuple[KVBlock, Sequence[GradAccumulator]]],
    shared: Sequence[Tensor],
    shared_grads: Sequence[GradAccumulator],
    deferred: Deferred,
) -> Iterator[tuple[Block, Sequence[GradAccumulator]]]:
    """Yield the blocks of `_blocks`, each with accumulators of its dk and dv."""
    for keys, kv_grads in stream:
        joined = plan.with_shared.joined.get(keys.segments) if shared else None
        if joined is None:
            yield (kernel, plan.terms, keys, plan.tiles(keys.segments)), kv_grads
            continue
        both = keys.followed_by(*shared)
        both_grads = [GradAccumulator(t, 1 if plan.alone else None) for t in both[:2]]
        yield (kernel, plan.terms, both, joined), both_grads
        for total, own_part, shared_part in zip(both_grads, kv_grads, shared_grads):
            total.move_to((own_part, 0), (shared_part, -keys.k.shape[1]))
        shared = ()
    if shared:
        deferred.do()  # their kernel can be another one, which adds to dq at once
        yield _shared_block(plan.shared, shared), shared_grads


def _shared_block(plan: RingPlan | Any, shared: Sequence[Tensor]) -> Block:
    """Return the block of shared keys and values alone; `plan` is theirs."""
    keys = plan.keys(*shared)
    return plan.kernel, plan.terms, keys, plan.tiles(keys.segments)


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
    plan.check(q, k, v, sinks, codec)
    if swap is not None:
        q, k, v = swap.to_heads(q, k, v)
        sinks = None if sinks is None else sinks[swap.heads]
        params = [p[swap.heads] for p in params]
    given = resolved(q), resolved(k), resolved(v), resolved(sinks), *map(resolved, params)
    if needs_derivatives(given):
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
        return plan.run("forward", forward, *given, back_of=None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Result) -> None:
        keep(ctx, *inputs, *output)
        ctx.block = current()

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Gradients:
        *given, out, lse = ctx.saved_tensors
        check_began_here(ctx.block)
        ctx.block = None  # nothing in the block will be recomputed any more
        dout, dlse = torch.zeros_like(out) if dout is None else resolved(dout), resolved(dlse)
        if is_first_order():
            saved = *given, out, lse, dout, dlse
            return None, *ctx.plan.run("backward", backward, *saved, back_of=ctx.number)
        saved = *given, out.detach(), lse.detach(), dout, dlse
        return None, *RingGradients.apply(ctx.plan, ctx.number, *saved)

    @staticmethod
    def jvp(ctx: Any, _: None, *along: Tensor | None) -> Result:
        *given, out, lse = ctx.saved_tensors
        return tangents(ctx.plan, ctx.number, given, along, (out, lse))


class RingGradients(Function):
    """(plan, back_of, q, k, v, sinks, ..., out, lse, dout, dlse) -> (dq, dk, dv, dsinks, ...)."""

    @staticmethod
    def forward(plan: RingPlan, back_of: int, *given: *Saved) -> Gradients:
        return plan.run("backward", backward, *given, back_of=back_of)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Gradients) -> None:
        plan, _, *saved = inputs
        keep(ctx, plan, *saved)

    @staticmethod
    def backward(ctx: Any, *along: Tensor | None) -> Gradients:
        saved = ctx.saved_tensors  # once: checkpointing unpacks them once only
        grads, tout, tlse = gradient_tangents(ctx.plan, ctx.number, saved, along)
        return None, None, *grads, None, None, tout, None if saved[7] is None else tlse

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, *along: Tensor | None) -> Gradients:
        number, saved = ctx.number, ctx.saved_tensors
        return gradient_tangents(ctx.plan, number, saved, along[:4], *along[6:8])[0]
