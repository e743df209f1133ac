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
    block      one owner's keys, in memory together
    tile       a rectangle of scores with a band: query i sees key j if -left <= j - i <= right
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
How = tuple[Any, ScoreMods]  # a kernel and its terms
SampleTiles = list[tuple[slice, Tiles]]


def forward(plan: RingPlan, *given: *Inputs, into: Result | None = None) -> Result:
    """Compute (out, lse) of this rank's (q, k, v, sinks), into the tensors `into` if given.

    q `[b, n, h, d]`, k `[b, m, h_kv, d]`, v `[b, m, h_kv, d_v]`, sinks `[h]` or None -> out
    `[b, n, h, d_v]`, lse `[b, h, n]`. If the plan has a codec, k and v are encoded keys, and the
    codec's parameters follow. Without one, keys and values that all ranks hold can follow.
    """
    q, k, v, sinks, *more = given
    kernel, shared = _kernel(plan, more, Decoding)
    reset_side_streams(q.device)
    calls = plan.with_shared.calls[False] if shared else plan.calls(back=False)
    result = OutputAccumulator(q, plan.values(v), calls if sinks is None else None, into)
    with torch.autocast(q.device.type, enabled=False):
        stream = plan.transport.stream(plan.keys(k, v))
        for (kernel_of, terms), keys, tiles_of in _blocks(plan, kernel, stream, shared):
            for samples, tiles in tiles_of:  # samples with the same mask
                kv, so_far = keys.samples(samples), result.samples(samples)
                kernel_of.forward(q[samples], kv, tiles, terms, so_far)
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
    kernel, shared = _kernel(plan, more, Decoding.with_sums)
    reset_side_streams(q.device)
    calls, deferred = plan.calls(back=True), Deferred()
    of_q = plan.with_shared.calls[True] if shared else calls
    own = Grads(
        GradAccumulator(q, of_q, place=dq, deferred=deferred),
        *(
            GradAccumulator(t, calls if plan.alone else None, place=place)
            for t, place in ((k, dk), (v, dv))
        ),
    )
    of_shared = [GradAccumulator(t, place=place) for t, place in zip(shared, places)]
    with torch.autocast(q.device.type, enabled=False):
        saved = Residuals(q, out, lse, dout, dlse)
        stream = plan.transport.stream_back(plan.keys(k, v), own[1:], deferred)
        blocks = _blocks_back(plan, kernel, stream, shared, of_shared, deferred)
        for (kernel_of, terms), keys, tiles_of, of_keys in blocks:
            for samples, tiles in tiles_of:
                rows, kv = saved.samples(samples), keys.samples(samples)
                grads = Grads(own.dq, *of_keys).samples(samples)
                kernel_of.backward(rows, kv, tiles, terms, grads)
        deferred.do()
        dsinks = None if sinks is None else grad_of_sinks(sinks, saved, dsinks)
    dq, dk, dv, *others = (total.finalize() for total in (*own, *of_shared))
    return dq, dk, dv, dsinks, *others, *(kernel.grads() if plan.codec is not None else ())


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
) -> Iterator[tuple[How, KVBlock, SampleTiles]]:
    """Yield blocks with how they are computed; shared keys join this rank's own, or are the last.

    In one call they cost no more than their scores. In a call of their own queries are read once
    more, and a result is merged.
    """
    how = kernel, plan.terms
    for keys in stream:
        found = plan.with_shared.joined.get(keys.segments) if shared else None
        if found is None:
            yield how, keys, plan.tiles(keys.segments)
        else:
            yield how, keys.followed_by(*shared), found
            shared = ()
    if shared and (of := plan.shared) is not None:
        keys = of.keys(*shared)
        yield (of.kernel, of.terms), keys, of.tiles(keys.segments)


def _blocks_back(
    plan: RingPlan,
    kernel: Any,
    stream: Iterable[tuple[KVBlock, Sequence[GradAccumulator]]],
    shared: Sequence[Tensor],
    of_shared: Sequence[GradAccumulator],
    deferred: Deferred,
) -> Iterator[tuple[How, KVBlock, SampleTiles, Sequence[GradAccumulator]]]:
    """Yield the blocks of `_blocks`, and accumulators of dk and dv."""
    how = kernel, plan.terms
    for keys, of_keys in stream:
        found = plan.with_shared.joined.get(keys.segments) if shared else None
        if found is None:
            yield how, keys, plan.tiles(keys.segments), of_keys
            continue
        both = keys.followed_by(*shared)
        sums = [GradAccumulator(t, 1 if plan.alone else None) for t in both[:2]]
        yield how, both, found, sums
        for total, first, second in zip(sums, of_keys, of_shared):
            total.move_to((first, 0), (second, -keys.k.shape[1]))
        shared = ()
    if shared and (of := plan.shared) is not None:
        deferred.do()  # their kernel can be another one, which adds to dq at once
        keys = of.keys(*shared)
        yield (of.kernel, of.terms), keys, of.tiles(keys.segments), of_shared


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
    (q, k, v, sinks, *params), swap = given, plan.ulysses
    plan.check(q, k, v, sinks, codec)
    if swap is not None:
        q, k, v = swap.to_heads(q, k, v)
        sinks = None if sinks is None else sinks[swap.heads]
        params = [p[swap.heads] for p in params]
    given = resolved(q), resolved(k), resolved(v), resolved(sinks), *map(resolved, params)
    if needs_derivatives(given):
        out, lse = RingAttentionFunction.apply(plan, *given)
    else:
        out, lse = plan.run("forward", forward, *given)
    return (out, lse) if swap is None else swap.to_sequence(out, lse if return_lse else None)


class RingAttentionFunction(Function):
    """(plan, q, k, v, sinks, and parameters of a codec) -> (out, lse)."""

    @staticmethod
    def forward(plan: RingPlan, *given: *Inputs) -> Result:
        return plan.run("forward", forward, *given)

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
            return None, *ctx.plan.run("backward", backward, *given, out, lse, dout, dlse)
        return None, *RingGradients.apply(ctx.plan, *given, out.detach(), lse.detach(), dout, dlse)

    @staticmethod
    def jvp(ctx: Any, _: None, *along: Tensor | None) -> Result:
        *given, out, lse = ctx.saved_tensors
        return tangents(ctx.plan, given, along, (out, lse))


class RingGradients(Function):
    """(plan, q, k, v, sinks, ..., out, lse, dout, dlse) -> (dq, dk, dv, dsinks, ...)."""

    @staticmethod
    def forward(plan: RingPlan, *given: *Saved) -> Gradients:
        return plan.run("backward", backward, *given)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Gradients) -> None:
        keep(ctx, *inputs)

    @staticmethod
    def backward(ctx: Any, *along: Tensor | None) -> Gradients:
        saved = ctx.saved_tensors  # once: checkpointing unpacks them once only
        grads, tout, tlse = gradient_tangents(ctx.plan, saved, along)
        return None, *grads, None, None, tout, None if saved[7] is None else tlse

    @staticmethod
    def jvp(ctx: Any, _: None, *along: Tensor | None) -> Gradients:
        return gradient_tangents(ctx.plan, ctx.saved_tensors, along[:4], *along[6:8])[0]
