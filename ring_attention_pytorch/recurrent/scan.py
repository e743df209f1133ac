"""The scan over runs: from the map of each run to the state before it.

    S_out = M S_in + U        a run of tokens maps the state before it to the state after it

Up to 16 ranks gather the maps of runs, whose size does not depend on the number of tokens, and each
follows the documents that it has tokens of. More ranks compose maps by doubling. Derivatives of any
order go the way back: the gradients of a map are summed on its owner.
"""

from torch import Tensor

from ring_attention_pytorch.comm.collectives import all_gather_along
from ring_attention_pytorch.ranks.agreement import report_to_group, typed
from ring_attention_pytorch.ranks.ring import Caller
from ring_attention_pytorch.recurrent.doubling import doubled
from ring_attention_pytorch.recurrent.levels import (
    first_states,
    followed,
    in_full_precision,
    last_states,
    mapped,
    packed,
    unpacked,
)
from ring_attention_pytorch.recurrent.plan import Route, RunPlan, needs_gradients
from ring_attention_pytorch.recurrent.runs import gathers
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype

_CALLER = "ring_scan"


@typed(report_to_group(_CALLER, agreed=("plan", ...)), apart=True)
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
    caller = plan.agree_once(
        _CALLER, shapes=(m.shape[1:], u.shape[1:]), dtype=wide, final=final,
        initial=initial is not None, requires_grad=needs_gradients(m, u),
    )  # fmt: skip
    first = None if initial is None else initial.to(wide)
    return scanned(m.to(wide), u.to(wide), plan, first, final, caller)


def scanned(
    m: Tensor, u: Tensor, plan: RunPlan, initial: Tensor | None, final: bool, caller: Caller
) -> tuple[Tensor, Tensor | None]:
    """Compute `ring_scan` of maps that fit, in one dtype, on which ranks have agreed."""
    with in_full_precision(u.device):
        if not gathers(plan.ring.size):
            return doubled(m, u, plan, initial, final, caller)
        route, travelling = plan.route(final), None
        if sum(route.counts):
            m, u = (t.index_select(0, route.sent) for t in (m, u))
            every = all_gather_along(0, packed(m, u), route.counts, caller)
            travelling = unpacked(every, m, u)
        return _followed(travelling, u, plan, initial, route)


def scanned_as_gathered(
    m: Tensor, u: Tensor, plan: RunPlan, initial: Tensor | None, final: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute `ring_scan` of maps that all ranks have, for up to 16: this rank's gradients of them.

    Args:
        m, u: `[all, h, d_k, d_k]` and `[all, h, d_k, d_v]`, of all that travel, in the order of
            ranks.
        The rest: as for `ring_scan`.
    """
    with in_full_precision(u.device):
        travelling = (m, u) if len(u) else None
        return _followed(travelling, u, plan, initial, plan.route(final))


def _followed(
    travelling: tuple[Tensor, Tensor] | None,
    u: Tensor,
    plan: RunPlan,
    initial: Tensor | None,
    route: Route,
) -> tuple[Tensor, Tensor | None]:
    """Return the states before this rank's runs and the last ones; u is like a U of this rank."""
    states = first = first_states(u, route.chains, route.starts, initial)
    if travelling is not None:
        states = followed(*travelling, first, route.levels)
        if not route.levels.steps:
            # backward exchanges on all ranks, also on one that needs no other rank's map
            states = states + travelling[1].flatten()[:0].sum()
    before = states.index_select(0, route.mine)
    if route.ends is None:
        return before, None
    samples, state_places, map_places = route.ends
    ended = states[state_places]
    if travelling is not None:
        m, u = (t[map_places] for t in travelling)
        ended = mapped(m, u, ended)
    return before, last_states(plan.runs.batch, samples, ended, initial)


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
