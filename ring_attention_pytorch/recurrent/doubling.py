"""The scan over runs by doubling: each run's map is composed with the 1, 2, 4, ... runs before it.

    (M2, U2) after (M1, U1)  =  (M2 M1, M2 U1 + U2)

A run's map then covers twice as many runs (Hillis and Steele 1986, "Data parallel algorithms"), so
a rank gets a map for each of its runs and doubling, and not the maps of all ranks.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ring_attention_pytorch.comm.collectives import fetch_rows
from ring_attention_pytorch.ranks.ring import Caller
from ring_attention_pytorch.recurrent.levels import (
    first_states,
    last_states,
    mapped,
    packed,
    unpacked,
)
from ring_attention_pytorch.recurrent.plan import RunPlan
from ring_attention_pytorch.recurrent.runs import HeldRun, Runs, distances


class Fetch(NamedTuple):
    """Which maps travel at once.

    Attributes:
        sends: for each rank, the numbers of this rank's runs whose maps it gets.
        lands: for each rank, where its maps are stored.
        at: for each stored map, the number of this rank's run that needs it, or the sample.
    """

    sends: tuple[Tensor, ...]
    lands: tuple[Tensor, ...]
    at: Tensor


class Doubling(NamedTuple):
    """How maps travel and which first states they map.

    Attributes:
        steps: one for each doubling.
        results: the maps of all that is before each run, then those through the last run of each
            sample. One exchange, so that backward makes it whichever of them a rank's loss needs.
        runs: this rank's runs with another one before them; samples: those whose last states are
            asked for, or None. Their maps come in this order.
        starts: this rank's runs that begin with a sample's initial state, and the samples.
        follow: for each of the maps, whether its document begins so, and the sample.
    """

    steps: tuple[Fetch, ...]
    results: Fetch
    runs: Tensor
    samples: Tensor | None
    starts: tuple[Tensor, Tensor]
    follow: tuple[Tensor, Tensor]


def pairs_of(runs: Runs, distance: int) -> list[tuple[HeldRun, HeldRun]]:
    """List the runs that have another one so far before them in their document, with that one.

    >>> runs = Runs.of((((0, 1, 2),), ((2, 1, 1),), ((3, 1, 4),)), None, 1)
    >>> [(source.rank, run.rank) for source, run in pairs_of(runs, 2)]
    [(0, 2)]
    """
    return [pair for chain in runs.chains for pair in zip(chain, chain[distance:])]


def doubled(
    m: Tensor, u: Tensor, plan: RunPlan, initial: Tensor | None, final: bool, caller: Caller
) -> tuple[Tensor, Tensor | None]:
    """Compute `ring_scan` by doubling, of maps in one dtype."""
    route = plan.once(("doubling", final), lambda: _route(plan, final))
    for step in route.steps:
        earlier_m, earlier_u = _fetched(m, u, step, caller)
        own_m, own_u = m[step.at], u[step.at]
        u = u.index_copy(0, step.at, mapped(own_m, own_u, earlier_u))
        m = m.index_copy(0, step.at, composed(own_m, earlier_m))
    of_m, of_u = _fetched(m, u, route.results, caller)
    if initial is not None:
        whether, samples = route.follow
        of_u = mapped(of_m, of_u, _where(whether, initial[samples]))
    states = first_states(u, len(plan.mine), route.starts, initial)
    states = states.index_copy(0, route.runs, of_u[: len(route.runs)])
    if route.samples is None:
        return states, None
    ended = of_u[len(route.runs) :]
    return states, last_states(plan.runs.batch, route.samples, ended, initial)


def composed(after: Tensor, before: Tensor) -> Tensor:
    """Return the M of two maps one after the other, full or diagonal.

    >>> composed(torch.full((1, 2), 3.0), torch.full((1, 2), 2.0)).tolist()
    [[6.0, 6.0]]
    """
    return torch.matmul(after, before) if after.ndim == 4 else after * before


def _where(whether: Tensor, states: Tensor) -> Tensor:
    return torch.where(whether.view(-1, *(1,) * (states.ndim - 1)), states, 0.0)


def _fetched(m: Tensor, u: Tensor, fetch: Fetch, caller: Caller) -> tuple[Tensor, Tensor]:
    """Return the maps that this rank needs."""
    rows = packed(m, u)[None]
    fetched = fetch_rows(rows, fetch.sends, fetch.lands, len(fetch.at), caller)
    return unpacked(fetched, m, u)


def _route(plan: RunPlan, final: bool) -> Doubling:
    runs, rank, device = plan.runs, plan.ring.rank, plan.device
    sample_of: dict[HeldRun, int | None] = {}  # whose initial state a run's document begins with
    for chain in runs.chains:
        sample_of |= dict.fromkeys(chain, runs.begins(chain[0]))

    def wanted(pairs: list[tuple[HeldRun, HeldRun]]) -> list[tuple[HeldRun, int, int]]:
        return [(source, run.rank, plan.number_of.get(run, -1)) for source, run in pairs]

    before = pairs_of(runs, 1)
    last = [run for run in runs.ends() if run is not None] if final else []
    of_samples = [(run, to, run.sample) for run in last for to in range(plan.ring.size)]
    results = _fetch(plan, wanted(before) + of_samples)
    mine = [run for _, run in before if run.rank == rank]
    samples = [sample_of[run] for run in (*mine, *last)]
    follows = torch.tensor([sample is not None for sample in samples], device=device).bool()
    starts, first_samples = [], []
    for number, run in enumerate(plan.mine):
        sample = runs.begins(run)
        if sample is not None:
            starts.append(number)
            first_samples.append(sample)
    return Doubling(
        steps=tuple(_fetch(plan, wanted(pairs_of(runs, each))) for each in distances(runs)),
        results=results,
        runs=results.at[: len(mine)],
        samples=results.at[len(mine) :] if final else None,
        starts=(plan.indices(starts), plan.indices(first_samples)),
        follow=(follows, plan.indices([sample or 0 for sample in samples])),
    )


def _fetch(plan: RunPlan, wanted: list[tuple[HeldRun, int, int]]) -> Fetch:
    """Return how maps of runs travel to ranks, for the run or sample `at` there."""
    rank, size = plan.ring.rank, plan.ring.size
    sends: list[list[int]] = [[] for _ in range(size)]
    lands: list[list[int]] = [[] for _ in range(size)]
    at: list[int] = []
    for source, to, needs in wanted:
        if source.rank == rank:
            sends[to].append(plan.number_of[source])
        if to == rank:
            lands[source.rank].append(len(at))
            at.append(needs)
    return Fetch(tuple(map(plan.indices, sends)), tuple(map(plan.indices, lands)), plan.indices(at))
