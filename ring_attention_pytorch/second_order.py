"""Second derivatives and forward mode: tangents of attention, and tangents of its gradients.

Attention is (out, lse) = F(q, k, v, sinks). Its gradients for cotangents (dout, dlse) are the
gradients of the number L = <dout, out> + <dlse, lse>. Their derivative is the Hessian of L, which
is symmetric: the gradient of <u, gradients> is the tangent of the gradients along u. Therefore
three kinds of passes over keys give all second derivatives: gradients, tangents of F, and tangents
of the gradients. The last two kinds send keys with their tangents, and reuse F's out and lse.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ring_attention_pytorch.kernels import eager_jvp
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.runtime.accumulate import GradAccumulator
from ring_attention_pytorch.runtime.interfaces import (
    Grads,
    Residuals,
    grad_of_sinks,
    sink_weights,
    tangent_of_delta,
)
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype
from ring_attention_pytorch.runtime.torch_func import Function, keep

Some = Sequence[Tensor | Any]  # can be None: sinks, dlse, and tensors without derivative
Found = tuple[Tensor | Any, ...]


class RingTangents(Function):
    """(plan, back_of, q, k, v, sinks, tq, tk, tv, tsinks, out, lse) -> (tout, tlse)."""

    @staticmethod
    def forward(plan: RingPlan, back_of: int, *given: Tensor | Any) -> tuple[Tensor, Tensor]:
        q, k, v, sinks, tq, tk, tv, tsinks, out, lse = given
        if {*plan.kernel.name.split("+")} != {"eager"}:
            raise NotImplementedError(
                f"ring attention: kernel={plan.kernel.name!r} has no second derivatives and no "
                'forward mode; kernel="eager" has both'
            )
        tout = torch.zeros_like(out, dtype=accumulation_dtype(out.dtype))
        tlse = torch.zeros_like(lse)
        with plan.call("tangents", back_of), torch.autocast(q.device.type, enabled=False):
            pairs = plan.keys(*_with_tangents((k, v), (tk, tv)))
            for keys in plan.transport_of_pairs.stream(pairs):
                for samples, tiles in plan.tiles(keys.segments):
                    rows = q[samples], tq[samples], lse[samples]
                    sums = tout[samples], tlse[samples]
                    eager_jvp.forward(*rows, keys.samples(samples), tiles, plan.terms, sums)
        if sinks is not None:
            tlse += sink_weights(sinks, lse) * tsinks.to(lse.dtype).unsqueeze(1)
        tout -= tlse.transpose(1, 2).unsqueeze(-1) * out
        return tout.to(out.dtype), tlse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        plan, _, *given = inputs
        keep(ctx, plan, *given, *output)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Found:
        *given, out, lse, tout, tlse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        at = *given[:4], dout, dlse, out, lse
        along = *given[4:], torch.zeros_like(out), None, tout.detach(), tlse.detach()
        moved = RingGradientTangents.apply(ctx.plan, ctx.number, *at, *along)
        return None, None, *moved, None, None

    @staticmethod
    def jvp(ctx: Any, *along: Tensor | None) -> Found:
        raise NotImplementedError(
            "ring attention has no third derivatives and no forward mode over forward mode; for "
            "second derivatives take torch.func.jvp of torch.func.grad, or the reverse"
        )


class RingGradientTangents(Function):
    """(plan, back_of, q, k, v, sinks, dout, dlse, out, lse, and the tangents of these) -> the
    tangents of (dq, dk, dv, dsinks), and these gradients themselves."""

    @staticmethod
    def forward(plan: RingPlan, back_of: int, *given: Tensor | Any) -> Found:
        q, k, v, sinks, dout, dlse, out, lse = given[:8]
        tq, tk, tv, tsinks, tdout, tdlse, tout, tlse = given[8:]
        saved = Residuals(q, out, lse, dout, dlse)
        along = Residuals(tq, tout, tlse, tdout, tdlse)
        both = _with_tangents((q, k, v), (tq, tk, tv))
        own = Grads(*map(GradAccumulator, both))
        call = plan.call("tangents of gradients", back_of)
        with call, torch.autocast(q.device.type, enabled=False):
            stream = plan.transport_of_pairs.stream_back(plan.keys(*both[1:]), own[1:])
            for keys, of_keys in stream:
                for samples, tiles in plan.tiles(keys.segments):
                    rows = saved.samples(samples), along.samples(samples)
                    kv = keys.samples(samples)
                    grads = Grads(own.dq, *of_keys).samples(samples)
                    eager_jvp.backward(*rows, kv, tiles, plan.terms, grads)
        moved, themselves = [], []
        for total in own:
            tangent, grad = total.finalize().chunk(2, dim=-1)
            # copies, because results that are views of one tensor can't be changed in place
            moved.append(tangent.clone())
            themselves.append(grad.clone())
        tdsinks = dsinks = None
        if sinks is not None:
            with torch.autocast(q.device.type, enabled=False):
                tdsinks = _of_sinks(sinks, tsinks, saved, along)
                dsinks = grad_of_sinks(sinks, saved)
        return *moved, tdsinks, *themselves, dsinks

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Found) -> None:
        """Save nothing: there are no third derivatives."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Found:
        raise NotImplementedError("ring attention can be differentiated twice, not three times")

    jvp = backward


def tangents(
    plan: RingPlan, back_of: int, given: Some, along: Some, results: Sequence[Tensor]
) -> Any:
    """Compute (tout, tlse), the tangents of `results` for tangents `along` of q, k, v, sinks.

    `back_of` is as for `Ring.call`.

    Raises:
        NotImplementedError: keys are encoded, or the kernel has no tangents.
    """
    if plan.codec is not None:
        raise NotImplementedError(
            "ring attention: encoded keys have no second derivatives and no forward mode; expand "
            'them and call ring_attn with kernel="eager"'
        )
    out, lse = (t.detach() for t in results)
    return RingTangents.apply(plan, back_of, *given, *_filled(along, given), out, lse)


def gradient_tangents(
    plan: RingPlan,
    back_of: int,
    saved: Some,
    along: Some,
    tdout: Tensor | None = None,
    tdlse: Tensor | None = None,
) -> tuple[Found, Tensor, Tensor]:
    """Compute the tangents of gradients, out and lse, for tangents `along` of q, k, v and sinks.

    `saved` is (q, k, v, sinks, out, lse, dout, dlse); tdout and tdlse are tangents of cotangents.
    """
    *given, out, lse, dout, dlse = saved
    along = _filled(along, given)
    tout, tlse = tangents(plan, back_of, given, along, (out, lse))
    (tdout,) = _filled((tdout,), (dout,))
    moved = RingGradientTangents.apply(
        plan, back_of, *given, dout, dlse, out, lse, *along, tdout, tdlse, tout, tlse
    )
    return moved[:4], tout, tlse


def _filled(along: Some, given: Some) -> list[Tensor | Any]:
    """List the tangents `along`, with zeros where a given tensor has none."""
    filled = []
    for tangent, t in zip(along, given):
        if tangent is None and t is not None:
            tangent = torch.zeros_like(t)
        filled.append(tangent)
    return filled


def _with_tangents(given: Sequence[Tensor], along: Sequence[Tensor]) -> list[Tensor]:
    """Concatenate each tensor and its tangent along the head size: `[..., 2 * d]`."""
    return [torch.cat(pair, dim=-1) for pair in zip(given, along)]


def _of_sinks(sinks: Tensor, tsinks: Tensor, saved: Residuals, along: Residuals) -> Tensor:
    """Compute the tangent of the sinks' gradient, which is -p * delta, `[h]`."""
    p = sink_weights(sinks, saved.lse)
    tp = p * (tsinks.to(p.dtype).unsqueeze(1) - along.lse)
    moved = tp * saved.delta + p * tangent_of_delta(saved, along)
    return -moved.sum(dim=(0, 2)).to(sinks.dtype)
