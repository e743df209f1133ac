"""The scan over runs: from the map of each run to the state before it.

    S_out = M S_in + U        a run of tokens maps the state before it to the state after it

Up to 16 ranks gather the maps of runs, whose size does not depend on the number of tokens, and each
follows the documents that it has tokens of. More ranks compose maps by doubling. Derivatives of any
order go the way back: the gradients of a map are summed on its owner.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ring_attention_pytorch.comm.exchange import all_gather, all_to_all, sum_parts
from ring_attention_pytorch.ranks.agreement import report_to_group, typed
from ring_attention_pytorch.recurrent.doubling import doubled
from ring_attention_pytorch.recurrent.levels import (
    followed,
    in_full_precision,
    mapped,
    packed,
    unpacked,
)
from ring_attention_pytorch.recurrent.plan import Route, RunPlan, needs_gradients
from ring_attention_pytorch.recurrent.runs import gathers
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype

_CALLER = "ring_scan"


@typed(report_to_group(_CALLER, agreed=("plan", ...)))
def ring_scan(
    m: Tensor,
    u: Tensor,
    *,
    plan: RunPlan,
    initial: Tensor | None = None,
    final: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the state before each of this rank's runs, from the maps S -> M S + U of all runs.

    All ranks of the ring call this together. Memory is the maps of all runs that another run
    follows, of all ranks; beyond 16 ranks that of this rank's runs, for each doubling.

    Args:
        m: `[runs, h, d_k, d_k]`, or a diagonal `[runs, h]` or `[runs, h, d_k]` that multiplies the
            leading dimensions of a state, of the runs `plan.mine`.
        u: `[runs, h, d_k, d_v]`; with a diagonal, `[runs, h, ...]`.
        plan: from `RunPlan.make` or `RunPlan.of`.
        initial: `[b, h, d_k, d_v]`, the state before the first token of each sample, the same on
            all ranks; None is 0. A gradient is of this rank's use: sum it over ranks.
        final: also return the state after the last token of each sample.

    Returns:
        `[runs, h, d_k, d_v]`, 0 where documents begin; and `[b, h, d_k, d_v]`, the same on all
        ranks, or None. Both in float32, or float64 if u is.

    Raises:
        ValueError: shapes don't fit the plan or one another, or differ between ranks.

    >>> plan = RunPlan.make(torch.empty(1, 6), cu_seqlens=[0, 2, 6])
    >>> m, u = torch.full((2, 1), 0.5), torch.ones(2, 1, 1, 1)
    >>> state, last = ring_scan(m, u, plan=plan, initial=torch.ones(1, 1, 1, 1), final=True)
    >>> state.flatten().tolist(), last.item()
    ([1.0, 0.0], 1.0)
    """
    _check(m, u, plan, initial)
    plan.check_numbers(_CALLER, u, u=u, m=m, initial=initial)
    wide = accumulation_dtype(u.dtype)
    plan.agree_once(
        _CALLER, shapes=[m.shape[1:], u.shape[1:]], dtype=wide, final=final,
        initial=initial is not None, requires_grad=needs_gradients(m, u),
    )  # fmt: skip
    first = None if initial is None else initial.to(wide)
    return scanned(m.to(wide), u.to(wide), plan, first, final)


def scanned(
    m: Tensor, u: Tensor, plan: RunPlan, initial: Tensor | None, final: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute `ring_scan` of maps that fit, in one dtype, on which ranks have agreed."""
    with in_full_precision(u.device):
        if not gathers(plan.ring.size):
            return doubled(m, u, plan, initial, final)
        route, travelling = plan.route(final), None
        if sum(route.counts):
            m, u = (t.index_select(0, route.sent) for t in (m, u))
            travelling = unpacked(_every(packed(m, u), plan, route), m, u)
        return _followed(travelling, u, plan, initial, route)


def scanned_as_sent(
    maps: Tensor, u: Tensor, plan: RunPlan, initial: Tensor | None, final: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute `ring_scan` of maps whose M has no gradient, for up to 16 ranks.

    Args:
        maps: `[sent, h, d_k, d_v + d_k]`, U beside M of the runs that are sent.
        u: `[sent, h, d_k, d_v]`, the same U, which gets its gradient.
        The rest: as for `ring_scan`.
    """
    route, travelling = plan.route(final), None
    with in_full_precision(u.device):
        if sum(route.counts):
            of_u, of_m = _every(maps, plan, route).split(
                (u.shape[3], maps.shape[3] - u.shape[3]), 3
            )
            travelling = of_m, _Gathered.apply(u, of_u, plan, route.counts)
        return _followed(travelling, u, plan, initial, route)


def _every(maps: Tensor, plan: RunPlan, route: Route) -> Tensor:
    """Return the maps that travel, of all ranks in order."""
    shapes = [(count, *maps.shape[1:]) for count in route.counts]
    return torch.cat(all_gather(maps, shapes, plan.ring, _CALLER))


def _followed(
    travelling: tuple[Tensor, Tensor] | None,
    u: Tensor,
    plan: RunPlan,
    initial: Tensor | None,
    route: Route,
) -> tuple[Tensor, Tensor | None]:
    """Return the states before this rank's runs and the last ones; u is like a U of this rank."""
    first = u.new_zeros(route.chains, *u.shape[1:])
    if initial is not None:
        numbers, samples = route.starts
        first = first.index_copy(0, numbers, initial[samples])
    states = first
    if travelling is not None:
        states = followed(*travelling, first, route.levels)
        if not route.levels.places:
            # backward exchanges on all ranks, also on one that needs no other rank's map
            states = states + travelling[1].flatten()[:0].sum()
    last = None
    if route.ends is not None:
        samples, state_places, map_places = route.ends
        last = u.new_zeros(plan.runs.batch, *u.shape[1:]) if initial is None else initial
        if travelling is not None:
            last_m, last_u = travelling[0][map_places], travelling[1][map_places]
            ended = mapped(last_m, last_u, states[state_places])
            last = last.index_copy(0, samples, ended)
    return states.index_select(0, route.mine), last


class _Gathered(Function):
    """(U of this rank's runs that are sent, U of all that travel, plan, counts) -> the latter."""

    @staticmethod
    def forward(
        ctx: Any, mine: Tensor, every: Tensor, plan: RunPlan, counts: tuple[int, ...]
    ) -> Tensor:
        ctx.plan, ctx.counts, ctx.shape = plan, counts, tuple(mine.shape)
        return every.view_as(every)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ring, shapes = ctx.plan.ring, [ctx.shape] * len(ctx.counts)
        return sum_parts(all_to_all(list(grad.split(ctx.counts)), shapes, ring)), None, None, None


def _check(m: Tensor, u: Tensor, plan: RunPlan, initial: Tensor | None) -> None:
    """Raise ValueError if shapes don't fit the plan or one another."""
    runs, state = len(plan.mine), tuple(u.shape[1:])
    whole = m.ndim == 4 and u.ndim == 4 and tuple(m.shape[1:]) == (*state[:2], state[1])
    diagonal = m.ndim in (2, 3) and m.ndim <= u.ndim and m.shape[1:] == u.shape[1 : m.ndim]
    if u.ndim < 3 or len(m) != runs or len(u) != runs or not (whole or diagonal):
        raise plan.error(
            f"ring_scan: m must be [{runs}, h, d_k, d_k] or a diagonal [{runs}, h] or "
            f"[{runs}, h, d_k], and u [{runs}, h, d_k, d_v], for this rank's {runs} runs; got "
            f"{list(m.shape)} and {list(u.shape)}"
        )
    if initial is not None and tuple(initial.shape) != (plan.runs.batch, *state):
        raise plan.error(
            f"ring_scan: initial must be {[plan.runs.batch, *state]}, got {list(initial.shape)}"
        )
