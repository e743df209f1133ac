"""The delta rule by fla's kernels in two passes: the maps of runs first, then all from its state.

    forward    the maps of own runs ─► ranks exchange them ─► fla's forward, from the states before
    backward   gradients of the states before own runs, of these runs' outputs alone ─► ranks
               exchange them ─► fla's backward, from the gradients of the states after

Each direction costs one more walk through the states than fla alone. The kernels compute pieces of
runs (`cuts.py`), of which no other rank knows. A phase is a rank's work before or after an
exchange, a function of tensors alone: on GPUs tapes repeat it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from ring_attention_pytorch.comm.collectives import fill_in, sum_on_owners
from ring_attention_pytorch.ranks.ring import Caller
from ring_attention_pytorch.recurrent.chunks import Chunks, How, Inputs, Returned
from ring_attention_pytorch.recurrent.cuts import Cuts
from ring_attention_pytorch.recurrent.fla_rules import Rule, part, rule_of
from ring_attention_pytorch.recurrent.levels import in_full_precision
from ring_attention_pytorch.recurrent.pieces import Pieces
from ring_attention_pytorch.recurrent.plan import RunPlan
from ring_attention_pytorch.recurrent.runs import gathers
from ring_attention_pytorch.recurrent.scan import scanned, scanned_as_gathered
from ring_attention_pytorch.recurrent.state_maps import gradients_of, store_maps
from ring_attention_pytorch.runtime.launches import launches_recorded
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype
from ring_attention_pytorch.runtime.streams import capturing
from ring_attention_pytorch.runtime.tape import Tapes, Tensors
from ring_attention_pytorch.runtime.torch_func import refuse_second_order


class Call(NamedTuple):
    """Settings of the passes, which are no tensors."""

    plan: RunPlan
    scale: float
    normalize: bool
    final: bool
    back: bool  # whether a backward may follow
    caller: Caller


class Scan(NamedTuple):
    """The states before pieces and after samples, with the graph that leads to them.

    Attributes:
        before, last: these states.
        u: of the maps of runs that are here: of all ranks, or beyond 16 of this one alone.
        pieces: the maps of pieces.
        initial: the states before samples.
        caller: who sums the gradients of maps.
    """

    before: Tensor
    last: Tensor | None
    u: Tensor
    pieces: Pieces
    initial: Tensor | None
    caller: Caller

    def back(self, own: Tensor, dlast: Tensor | None, call: Call) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of the states after pieces, and of initial states.

        `own` are the gradients of the states before pieces, of these pieces' outputs alone.
        """
        outputs, grads, inputs = [self.before], [own], [self.u]
        if self.last is not None and dlast is not None:
            outputs.append(self.last)
            grads.append(dlast)
        if self.initial is not None:
            inputs.append(self.initial)
        du, *dinitial = torch.autograd.grad(
            outputs, inputs, grads, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        if len(du) and gathers(call.plan.ring.size):
            counts = call.plan.route(call.final).counts
            (du,) = sum_on_owners(du.split(list(counts)), self.caller)
        du = self.pieces.back(self.before, own, du)
        after = _of_all(du, self.pieces.cuts.pieces, len(self.before))
        return after, dinitial[0] if dinitial else None


def two_passes(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor | None, call: Call
) -> tuple[Tensor, Tensor | None]:
    """Return the outputs of tokens, like v, and the states after samples or None.

    Args:
        q, k: `[b, n, h_k, d_k]`, of 16 bits; v: `[b, n, h, d_v]`.
        g: float32 logarithms of gates, `[b, n, h]` or, for KDA, `[b, n, h, d_k]`; beta:
            `[b, n, h]`.
        initial: float32 `[b, h, d_k, d_v]`, the states before each sample; None is 0.
        call: the rest.
    """
    with torch.cuda.device_of(v):
        out, last = _TwoPasses.apply(call, q, k, v, g, beta, initial)
    return out, last


class _TwoPasses(Function):
    """(call, q, k, v, g, beta, initial) -> outputs and last states."""

    @staticmethod
    def forward(ctx: Any, call: Call, *given: Any) -> tuple[Tensor, Tensor | None]:
        *tensors, initial = given
        q, k, v, g, beta = map(_in_one_row, tensors)
        of_q = of_k = None
        work = Chunks(q, k, v.new_empty(1, 0, v.shape[2], k.shape[3]), v, g, ())
        if v.shape[1]:
            q, k, g, of_q, of_k, *chunks = _run(_chunked, call, q, k, v, g, beta)
            work = Chunks(q, chunks[0], chunks[1], chunks[2], g, tuple(chunks[3:]))
        scan = _scanned(work, call, initial)
        ctx.call, ctx.scan = call, scan
        ctx.given = [(t.shape, t.dtype) for t in tensors]
        ctx.save_for_backward(q, k, v, g, beta, of_q, of_k, *work.kept)
        last = None if scan.last is None else scan.last.detach().clone()
        if not v.shape[1]:
            return tensors[2].clone(), last
        before = scan.before.detach().contiguous()
        (out,) = _run(_read, call, q, k, v, g, beta, before, *work[1:4], *work.kept)
        # of a view PyTorch would refuse changes in place
        return torch.ops.aten._unsafe_view(out, tensors[2].shape), last

    @staticmethod
    def backward(ctx: Any, do: Tensor, dlast: Tensor | None) -> tuple[Any, ...]:
        refuse_second_order("the delta rule by kernels of fla")
        with in_full_precision(do.device):
            return _TwoPasses._backward(ctx, do, dlast)

    @staticmethod
    def _backward(ctx: Any, do: Tensor, dlast: Tensor | None) -> tuple[Any, ...]:
        call, scan = ctx.call, ctx.scan
        crosses = scan.before.requires_grad
        if not ctx.given[2][0].numel():
            dinitial = scan.back(torch.zeros_like(scan.before), dlast, call)[1] if crosses else None
            return None, *(do.new_zeros(shape, dtype=kind) for shape, kind in ctx.given), dinitial
        q, k, v, g, beta, *norms_and_kept = ctx.saved_tensors
        given, do = (q, k, v, g, beta), _in_one_row(do)
        before = scan.before.detach().contiguous()
        phase = _local_and_states if crosses else _local
        *computed, own = _run(phase, call, *given, before, do, *norms_and_kept[2:])
        after, dinitial = scan.back(own, dlast, call) if crosses else (None, None)
        after = None if after is None else after.contiguous()
        grads = _run(_gradients, call, *given, do, after, *norms_and_kept[:2], *computed)
        of_given = (t.to(dtype).view(shape) for t, (shape, dtype) in zip(grads, ctx.given))
        return None, *of_given, dinitial


def _chunked(call: Call, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensors:
    """Return q, k, and sums of gates as kernels take them, two norms or None, and chunks."""
    how = _how(call)
    x, norms = _prepared(Inputs(q, k, v, g, beta, call.scale), call, how)
    work = rule_of(x.g).chunks(x, how)
    return x.q, x.k, x.g, *(norms or (None, None)), work.k, work.w, work.u, *work.kept


def _read(
    call: Call, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, before: Tensor,
    of_k: Tensor, w: Tensor, u: Tensor, *kept: Tensor,
) -> Tensors:  # fmt: skip
    """Return the outputs of tokens, from the states before pieces."""
    x, work, how = Inputs(q, k, v, g, beta, call.scale), Chunks(q, of_k, w, u, g, kept), _how(call)
    h, values = _states(work, before, how)
    return (rule_of(g).outputs(x, values, h, work, how).to(v.dtype),)


def _local_and_states(call: Call, *given: Tensor, crosses: bool = True) -> Tensors:
    """Return the inputs of `_gradients`, then gradients of the states before pieces.

    These are of these pieces' outputs alone; None if no state crosses.
    """
    q, k, v, g, beta, before, do, *kept = given
    x, rule, how = Inputs(q, k, v, g, beta, call.scale), rule_of(g), _how(call)
    work = rule.again(x, tuple(kept), how)
    h, values = _states(work, before, how)
    dv, local = rule.local(x, values, do, work, how)
    own = gradients_of(work, do, dv, how.spans, call.scale) if crosses else None
    return h, values, dv, local, *work[:4], *kept, own


def _local(call: Call, *given: Tensor) -> Tensors:
    return _local_and_states(call, *given, crosses=False)


def _gradients(call: Call, *given: Tensor | Any) -> Tensors:
    """Return the gradients of q, k, v, g and beta; `after` has the ones of states after pieces."""
    q, k, v, g, beta, do, after, of_q, of_k, h, values, dv, local, *rest = given
    x, rule, how = Inputs(q, k, v, g, beta, call.scale), rule_of(g), _how(call)
    work = Chunks(rest[0], rest[1], rest[2], rest[3], g, tuple(rest[4:]))
    dh, dv = _state_gradients(work, x, after, do, dv, how)
    norms = (of_q, of_k) if call.normalize else ()
    return _unprepared(rule, x, work, Returned(h, values, dh, dv, do, local), norms, how)


class _Phase:
    """A phase of calls alike, repeated by a tape, which has no results that are arguments."""

    def __init__(self, phase: Callable[..., Tensors]) -> None:
        self.phase = phase
        self.tapes = Tapes()
        self.same: dict[int, int] = {}  # results that are arguments

    def __call__(self, call: Call, *given: Tensor | Any) -> Tensors:
        results, same = self.tapes.run(self._apart, call, *given), self.same
        return tuple([given[same[i]] if i in same else t for i, t in enumerate(results)])

    def _apart(self, call: Call, *given: Tensor | Any) -> Tensors:
        with launches_recorded():
            results = [*self.phase(call, *given)]
        for i, t in enumerate(results):
            for number, argument in enumerate(given):
                if t is not None and t is argument:
                    results[i], self.same[i] = None, number
        return tuple(results)


def _run(phase: Callable[..., Tensors], call: Call, *given: Tensor | Any) -> Tensors:
    """Return `phase(call, *given)`, on GPUs by a tape once there is one."""
    if not given[0].is_cuda or capturing(given[0].device):
        return phase(call, *given)
    kinds = tuple([None if t is None else (t.shape, t.dtype) for t in given])
    key = phase, call.scale, call.normalize, call.final, kinds
    return call.plan.once(key, lambda: _Phase(phase))(call, *given)


def _in_one_row(x: Tensor) -> Tensor:
    """Return `[b, n, ...]` as `[1, b * n, ...]`, contiguous."""
    return x.contiguous().view(1, -1, *x.shape[2:])


def _cuts(call: Call) -> Cuts:
    return call.plan.once(("pieces", call.final), lambda: Cuts.of(call.plan, call.final))


def _how(call: Call) -> How:
    return _cuts(call).how


def _prepared(x: Inputs, call: Call, how: How) -> tuple[Inputs, tuple[Tensor, ...]]:
    """Return inputs with normalized q and k and summed gates, and the norms' reciprocals."""
    norms: tuple[Tensor, ...] = ()
    if call.normalize:
        (q, of_q), (k, of_k) = map(part("modules.norm.l2norm.l2norm_fwd"), (x.q, x.k))
        x, norms = x._replace(q=q, k=k), (of_q, of_k)
    base_2 = part("ops.utils.constant.RCP_LN2")
    g = part("ops.utils.chunk_local_cumsum")(x.g, scale=base_2, **how.sized)
    return x._replace(g=g), norms


def _unprepared(
    rule: Rule, x: Inputs, work: Chunks, returned: Returned, norms: tuple[Tensor, ...], how: How
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, g and beta as they were given."""
    dq, dk, dv, dg, db = rule.gradients(x, work, returned, how)
    dg = part("ops.utils.chunk_local_cumsum")(dg, reverse=True, **how.sized)
    if norms:
        dq, dk = map(part("modules.norm.l2norm.l2norm_bwd"), (x.q, x.k), norms, (dq, dk))
    return dq, dk, dv, dg, db


def _scanned(work: Chunks, call: Call, initial: Tensor | None) -> Scan:
    """Return the states before pieces, with a graph for gradients of U and of initial states."""
    plan, cuts, (heads, d_v), d_k = call.plan, _cuts(call), work.u.shape[2:], work.w.shape[3]
    route, gathered = plan.route(call.final), gathers(plan.ring.size)
    shape, wide = (heads, d_k, d_v + d_k), accumulation_dtype(work.u.dtype)
    rows = sum(route.counts) if gathered else len(route.sent)
    maps = work.w.new_empty(rows, *shape, dtype=wide)
    own = maps.split([*route.counts])[plan.ring.rank] if gathered else maps
    pieces = Pieces.of(own if cuts.whole else maps.new_empty(len(cuts.spans), *shape), d_v, cuts)
    store_maps(work, cuts.spans, pieces.maps)
    pieces.compose(own)
    if gathered and len(maps):
        fill_in(maps, route.counts, call.caller)
    caller = call.caller.back()
    u, m = maps.split((d_v, d_k), -1)
    for offsets in (u, pieces.u):
        offsets.requires_grad_(call.back)
    first = None if initial is None else initial.detach().requires_grad_(call.back)
    with torch.set_grad_enabled(call.back):
        if gathered:
            before, last = scanned_as_gathered(m, u, plan, first, call.final)
        else:
            all_m, all_u = (_of_all(t, route.sent, len(plan.mine)) for t in (m, u))
            before, last = scanned(all_m, all_u, plan, first, call.final, call.caller)
        before = pieces.states(before)
    return Scan(before, last, u, pieces, first, caller)


def _of_all(x: Tensor, held: Tensor, rows: int) -> Tensor:
    """Return rows of all, 0 for those without any."""
    return x.new_zeros(rows, *x.shape[1:]).index_copy(0, held, x) if len(x) < rows else x


def _states(work: Chunks, before: Tensor, how: How) -> tuple[Tensor, Tensor]:
    """Return the states before chunks, and values after the delta rule."""
    h, values, _ = part("ops.common.chunk_delta_h.chunk_gated_delta_rule_fwd_h")(
        k=work.k, w=work.w, u=work.u, initial_state=before,
        output_final_state=False, **work.gates, **how.stepped,
    )  # fmt: skip
    return h, values


def _state_gradients(
    work: Chunks, x: Inputs, after: Tensor | None, do: Tensor, dv: Tensor, how: How
) -> tuple[Tensor, Tensor]:
    """Return the gradients of states and values; `after` are of states after pieces, None is 0."""
    dh, _, dv = part("ops.common.chunk_delta_h.chunk_gated_delta_rule_bwd_dhu")(
        q=work.q, k=work.k, w=work.w, h0=None, dht=after, do=do, dv=dv, scale=x.scale,
        **work.gates, **how.stepped,
    )  # fmt: skip
    return dh, dv
