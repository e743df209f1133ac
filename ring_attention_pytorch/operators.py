"""Attention as operators: torch.compile's graphs contain them in place of the two loops.

    user's code      linear ──────────── ring_attn(plan=plan) ──────────── linear
    traced graph     linear ── ring_attention::forward(q, k, v, 7340032) ── linear      shapes only
    when it runs                       attention.forward(plan, q, k, v)                 exchanges

Tracing sees only shapes and dtypes. An operator finds the plan by its handle when it runs, so a
graph that was traced with one plan runs with others. Results are contiguous and never share memory
with inputs, as tracing assumes.

Only traced code uses operators: an autograd Function costs the host 30 us less, and has second
derivatives. Each operator has two overloads: `messages` is tagged as unsafe for CUDA graphs, which
can't capture messages.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ring_attention_pytorch.attention import Gradients, backward
from ring_attention_pytorch.attention import attention as attend
from ring_attention_pytorch.comm.ulysses import QKV_TO_HEADS, QKV_TO_SEQUENCE, Ulysses
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.ranks.ring import Caller, Ring
from ring_attention_pytorch.runtime.handles import object_of
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype
from ring_attention_pytorch.runtime.torch_func import refuse_export

_FORWARD = "(Tensor q, Tensor k, Tensor v, Tensor? sinks, SymInt plan) -> (Tensor, Tensor, Tensor)"
_BACKWARD = (
    "(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor dout, Tensor? dlse, Tensor out, "
    "Tensor lse, Tensor number, SymInt plan) -> (Tensor, Tensor, Tensor, Tensor)"
)
_TOTAL = "(Tensor x, bool back, SymInt plan) -> Tensor"
_POSITIONS = "(Tensor x, bool in_documents, SymInt plan) -> Tensor"

ops = torch.ops.ring_attention


def attention(
    plan: RingPlan, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute (out, lse) by an operator, for code that is being traced.

    Raises:
        NotImplementedError: the code is traced by torch.export.
    """
    refuse_export()
    out, lse, _ = _of(plan, ops.forward)(q, k, v, sinks, plan.handle)
    return out, lse


class TracedRing:
    """All ranks of a plan's group, for code that can be traced."""

    def __init__(self, plan: RingPlan) -> None:
        self.plan = plan

    def total(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' x, on every rank; backward sums the gradients."""
        return _of(self.plan, ops.total)(x, False, self.plan.handle)


def positions(plan: RingPlan, x: Tensor, in_documents: bool) -> Tensor:
    """Return `RingPlan.positions` of tokens x `[b, n, ...]`, for code that can be traced.

    In a trace positions in documents are `[b, n]` even if all samples have the same documents.
    """
    if not is_compiling():
        return plan.positions(x.device, in_documents=in_documents)
    in_documents = in_documents and plan.packing is not None
    return ops.positions(x, in_documents, plan.handle)


Ranks = Ring | TracedRing


def _of(plan: RingPlan, operator: Any) -> Any:
    """Return an operator's overload for the plan: with or without messages."""
    return operator.default if plan.capturable else operator.messages


def _plan(handle: int) -> RingPlan:
    plan, layer = object_of(handle)
    return plan if layer is None else plan.for_layer(layer)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, handle: int
) -> tuple[Tensor, Tensor, Tensor]:
    plan = _plan(handle)
    out, lse = attend(plan, q, k, v, sinks, return_lse=True)
    # a CUDA graph repeats calls without new numbers, and records no tensors of the host
    by_graph = plan.capturable
    number = (
        q.new_zeros((), dtype=torch.int64) if by_graph else torch.tensor(plan.ring.steps.number)
    )
    return out.contiguous(), lse.contiguous(), number


def _backward(*given: Any) -> tuple[Tensor, ...]:
    *tensors, number, handle = given
    plan, like = _plan(handle), given[0]
    back_of = 0 if plan.capturable else int(number)
    swap = plan.ulysses
    if swap is None:
        found = _run_backward(plan, tensors, back_of)
    else:
        found = _swapped(plan, swap, tensors, back_of)
    *grads, dsinks = found
    dsinks = like.new_empty(0) if dsinks is None else dsinks
    return *(grad.contiguous() for grad in grads), dsinks


def _run_backward(plan: RingPlan, given: Sequence[Tensor | Any], back_of: int) -> Gradients:
    *qkv, sinks, dout, dlse, out, lse = given
    return plan.run("backward", backward, *qkv, sinks, out, lse, dout, dlse, back_of=back_of)


def _swapped(
    plan: RingPlan, swap: Ulysses, given: Sequence[Tensor | Any], back_of: int
) -> Gradients:
    """Compute gradients where ranks swap heads for sequence: forward's tensors are swapped again.

    A graph can save only tensors with the shapes of this rank's shards.
    """
    q, k, v, sinks, dout, dlse, out, lse = given
    qkv = swap.exchange(QKV_TO_HEADS, q, k, v, back_of=back_of)
    dout, dlse = swap.rows_to_heads(dout, dlse, back_of)
    out, lse = swap.rows_to_heads(out, lse, back_of)
    of_heads = None if sinks is None else sinks[swap.heads]
    *grads, dof_heads = _run_backward(plan, (*qkv, of_heads, dout, dlse, out, lse), back_of)
    dsinks = None
    if sinks is not None:
        dsinks = torch.zeros_like(sinks)
        dsinks[swap.heads] = dof_heads
    return *swap.exchange(QKV_TO_SEQUENCE, *grads, back_of=back_of), dsinks


def _total(x: Tensor, back: bool, handle: int) -> Tensor:
    ring = _plan(handle).ring
    if ring.group is None:
        return x.clone(memory_format=torch.contiguous_format)
    # a graph has no room for the number of forward's call
    return Caller(ring, "mean over ranks", 0, 0 if back else None).total(x)


def _positions(x: Tensor, in_documents: bool, handle: int) -> Tensor:
    found = _plan(handle).positions(x.device, in_documents=in_documents)
    if in_documents and found.ndim == 1:
        found = found.expand(x.shape[0], -1)
    return found.clone(memory_format=torch.contiguous_format)


# shapes and dtypes of results, for tracing


def _fake_forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, handle: int
) -> tuple[Tensor, Tensor, Tensor]:
    b, n, h, _ = q.shape
    lse = q.new_empty((b, h, n), dtype=accumulation_dtype(q.dtype))
    return q.new_empty((b, n, h, v.shape[3])), lse, q.new_empty((), dtype=torch.int64)


def _fake_forward_by_messages(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    out, lse, _ = _fake_forward(*given)
    return out, lse, torch.empty((), dtype=torch.int64)  # on the host


def _fake_backward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    dsinks = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return *(t.new_empty(t.shape) for t in (q, k, v)), dsinks


def _fake_total(x: Tensor, back: bool, handle: int) -> Tensor:
    return x.new_empty(x.shape)


def _fake_positions(x: Tensor, in_documents: bool, handle: int) -> Tensor:
    return x.new_empty(x.shape[:2] if in_documents else x.shape[1:2], dtype=torch.int64)


# derivatives: of first order only


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *given, ctx.handle = inputs
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(*given, *output)
    ctx.set_materialize_grads(False)


def _differentiate(operator: Any, ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Gradients:
    *given, out, lse, number = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    *grads, dsinks = operator(*given, dout, dlse, out, lse, number, ctx.handle)
    return *grads, None if given[3] is None else dsinks, None


def _keep_handle(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *_, ctx.handle = inputs


def _define(overload: str, *tags: torch.Tag) -> None:
    """Define one overload of each operator that communicates."""

    def differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: None) -> Gradients:
        return _differentiate(getattr(ops.backward, overload or "default"), ctx, dout, dlse)

    def sum_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return getattr(ops.total, overload or "default")(grad, True, ctx.handle), None, None

    for name, schema, function, fake in (
        ("forward", _FORWARD, _forward, _fake_forward_by_messages if overload else _fake_forward),
        ("backward", _BACKWARD, _backward, _fake_backward),
        ("total", _TOTAL, _total, _fake_total),
    ):
        full_name = f"{name}.{overload}" if overload else name
        _register(full_name, schema, function, fake, tags)
    suffix = f".{overload}" if overload else ""
    register = torch.library.register_autograd
    register(f"ring_attention::forward{suffix}", differentiate, setup_context=_keep, lib=_library)
    register(
        f"ring_attention::total{suffix}", sum_gradients, setup_context=_keep_handle, lib=_library
    )


def _register(name: str, schema: str, function: Any, fake: Any, tags: tuple[Any, ...]) -> None:
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ring_attention::{name}", fake, lib=_library)


_library = torch.library.Library("ring_attention", "DEF")
_define("")
_define("messages", torch.Tag.cudagraph_unsafe)
_register("positions", _POSITIONS, _positions, _fake_positions, ())

# for `torch.utils.checkpoint.create_selective_checkpoint_contexts`: operators whose results should
# be saved, because recomputing them communicates again
SAVED = (ops.forward.default, ops.forward.messages)
