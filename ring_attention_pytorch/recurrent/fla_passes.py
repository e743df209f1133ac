"""The delta rule by fla's kernels in two passes: the maps of runs first, then all from its state.

    forward    the maps of own runs ─► ranks exchange them ─► fla's forward, from the states before
    backward   gradients of the states before own runs, of these runs' outputs alone ─► ranks
               exchange them ─► fla's backward, from the gradients of the states after

Each direction costs one more walk through the states than fla alone, and nothing else.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ring_attention_pytorch.recurrent.chunks import Chunks, How, Inputs, Returned
from ring_attention_pytorch.recurrent.fla_rules import Rule, rule_of
from ring_attention_pytorch.recurrent.levels import in_full_precision
from ring_attention_pytorch.recurrent.plan import RunPlan
from ring_attention_pytorch.recurrent.runs import gathers
from ring_attention_pytorch.recurrent.scan import scanned, scanned_as_sent
from ring_attention_pytorch.recurrent.state_maps import gradients_of, maps_of


class Call(NamedTuple):
    """Settings of the passes, which are no tensors."""

    plan: RunPlan
    scale: float
    normalize: bool
    final: bool
    back: bool  # whether a backward may follow


class Scan(NamedTuple):
    """The states before runs and after samples, with the graph that leads to them."""

    before: Tensor
    last: Tensor | None
    u: Tensor  # of the runs that are sent
    initial: Tensor | None
    sent: Tensor

    def back(self, own: Tensor, dlast: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of the states after runs, and of initial states.

        `own` are the gradients of the states before runs, of these runs' outputs alone.
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
        after = _of_all(du, self.sent, len(self.before))
        return after, dinitial[0] if dinitial else None


def two_passes(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor | None, call: Call
) -> tuple[Tensor, Tensor | None]:
    """Return the outputs of tokens `[n, h, d_v]`, and the states after samples or None.

    Args:
        q, k: `[n, h_k, d_k]`, of 16 bits; v: `[n, h, d_v]`.
        g: float32 logarithms of gates, `[n, h]` or, for KDA, `[n, h, d_k]`; beta: `[n, h]`.
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
        q, k, v, g, beta = (t[None].contiguous() for t in tensors)
        rule, how = rule_of(tensors[3]), _how(call.plan)
        x = Inputs(q, k, v, g, beta, call.scale)
        norms: tuple[Tensor, ...] = ()
        if v.shape[1]:
            x, norms = _prepared(x, call, how)
        work = rule.chunks(x, how) if v.shape[1] else _nothing(x)
        scan = _scanned(work, call, how, initial)
        ctx.call, ctx.scan, ctx.normed = call, scan, bool(norms)
        ctx.dtypes = g.dtype, beta.dtype
        ctx.save_for_backward(*x[:5], *norms, *work.kept)
        last = None if scan.last is None else scan.last.detach().clone()
        if not v.shape[1]:
            return v[0].clone(), last
        h, values = _states(work, scan.before, how)
        return rule.outputs(x, values, h, work, how)[0].to(q.dtype), last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, dlast: Tensor | None) -> tuple[Any, ...]:
        with in_full_precision(do.device):
            return _TwoPasses._backward(ctx, do, dlast)

    @staticmethod
    def _backward(ctx: Any, do: Tensor, dlast: Tensor | None) -> tuple[Any, ...]:
        call, scan, how = ctx.call, ctx.scan, _how(ctx.call.plan)
        q, k, v, g, beta, *kept = ctx.saved_tensors
        norms, kept = kept[: 2 * ctx.normed], tuple(kept[2 * ctx.normed :])
        x, rule = Inputs(q, k, v, g, beta, call.scale), rule_of(g[0])
        do = do[None].contiguous()
        if not v.shape[1]:
            dinitial = None
            if scan.before.requires_grad:
                _, dinitial = scan.back(torch.zeros_like(scan.before), dlast)
            return None, *(torch.zeros_like(t[0]) for t in (q, k, v, g, beta)), dinitial
        work = rule.again(x, kept, how)
        h, values = _states(work, scan.before, how)
        dv, local = rule.local(x, values, do, work, how)
        after, dinitial = torch.zeros_like(scan.before), None
        if scan.before.requires_grad:
            own = gradients_of(work, do, dv, how.spans, call.scale)
            after, dinitial = scan.back(own, dlast)
        dh, dv = _state_gradients(work, x, after, do, dv, how)
        returned = Returned(h, values, dh, dv, do, local)
        grads = _unprepared(rule, x, work, returned, tuple(norms), how)
        pairs = zip(grads, (q.dtype, k.dtype, v.dtype, *ctx.dtypes))
        return None, *(t[0].to(dtype) for t, dtype in pairs), dinitial


def _how(plan: RunPlan) -> How:
    return plan.once("fla's chunks", lambda: How.of(plan.spans, plan.device))


def _nothing(x: Inputs) -> Chunks:
    """Return the chunks of a rank without tokens."""
    wide = x.v.new_empty(1, 0, x.v.shape[2], x.k.shape[3])
    return Chunks(x.q, x.k, wide, x.v, x.g, ())


def _prepared(x: Inputs, call: Call, how: How) -> tuple[Inputs, tuple[Tensor, ...]]:
    """Return inputs with normalized q and k and summed gates, and the norms' reciprocals."""
    from fla.modules.norm.l2norm import l2norm_fwd
    from fla.ops.utils import chunk_local_cumsum
    from fla.ops.utils.constant import RCP_LN2

    norms: tuple[Tensor, ...] = ()
    if call.normalize:
        (q, of_q), (k, of_k) = l2norm_fwd(x.q), l2norm_fwd(x.k)
        x, norms = x._replace(q=q, k=k), (of_q, of_k)
    g = chunk_local_cumsum(x.g, scale=RCP_LN2, **how.sized)
    return x._replace(g=g), norms


def _unprepared(
    rule: Rule, x: Inputs, work: Chunks, returned: Returned, norms: tuple[Tensor, ...], how: How
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, g and beta as they were given."""
    from fla.modules.norm.l2norm import l2norm_bwd
    from fla.ops.utils import chunk_local_cumsum

    dq, dk, dv, dg, db = rule.gradients(x, work, returned, how)
    dg = chunk_local_cumsum(dg, reverse=True, **how.sized)
    if norms:
        dq, dk = l2norm_bwd(x.q, norms[0], dq), l2norm_bwd(x.k, norms[1], dk)
    return dq, dk, dv, dg, db


def _scanned(work: Chunks, call: Call, how: How, initial: Tensor | None) -> Scan:
    """Return the states before runs, with a graph for gradients of U and of initial states."""
    plan, d_v = call.plan, work.u.shape[3]
    sent, spans = plan.once(("sent", call.final), lambda: _sent(plan, call.final, how))
    packed = maps_of(work, spans)
    u = packed[..., :d_v].detach().requires_grad_(call.back)
    first = None if initial is None else initial.detach().requires_grad_(call.back)
    with torch.set_grad_enabled(call.back):
        if gathers(plan.ring.size):
            before, last = scanned_as_sent(packed, u, plan, first, call.final)
        else:
            runs = len(plan.mine)
            of_m, of_u = packed[..., d_v:], u
            of_m, of_u = (_of_all(t, sent, runs) for t in (of_m, of_u))
            before, last = scanned(of_m, of_u, plan, first, call.final)
    return Scan(before, last, u, first, sent)


def _of_all(x: Tensor, sent: Tensor, runs: int) -> Tensor:
    """Return rows of all runs, 0 for those that are not sent."""
    return x.new_zeros(runs, *x.shape[1:]).index_copy(0, sent, x) if len(x) < runs else x


def _sent(plan: RunPlan, final: bool, how: How) -> tuple[Tensor, Tensor]:
    """Return this rank's runs whose maps are sent, and their spans."""
    sent = plan.indices(plan.runs.sent(plan.ring.rank, final))
    return sent, how.spans[sent]


def _states(work: Chunks, before: Tensor, how: How) -> tuple[Tensor, Tensor]:
    """Return the states before chunks, and values after the delta rule."""
    from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_fwd_h

    h, values, _ = chunk_gated_delta_rule_fwd_h(
        k=work.k, w=work.w, u=work.u, initial_state=before.detach().contiguous(),
        output_final_state=False, **work.gates, **how.stepped,
    )  # fmt: skip
    return h, values


def _state_gradients(
    work: Chunks, x: Inputs, after: Tensor, do: Tensor, dv: Tensor, how: How
) -> tuple[Tensor, Tensor]:
    """Return the gradients of states and values, from the gradients of states after runs."""
    from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_bwd_dhu

    dh, _, dv = chunk_gated_delta_rule_bwd_dhu(
        q=work.q, k=work.k, w=work.w, h0=None, dht=after.contiguous(), do=do, dv=dv, scale=x.scale,
        **work.gates, **how.stepped,
    )  # fmt: skip
    return dh, dv
