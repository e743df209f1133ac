"""Runs that are cut, counted."""

import random

from ring_attention_pytorch.recurrent.cuts import cut, longest_of
from ring_attention_pytorch.recurrent.runs import Runs
from tests.support import threads
from tests.support.recurrent_cases import Spread


def tokens(runs: Runs) -> list[list[tuple[int, ...]]]:
    """Each rank's tokens in order: their sample, document, place and position."""
    return [
        [
            (run.sample, run.document, run.start + token, run.position + token)
            for run in held
            for token in range(run.length)
        ]
        for held in runs.held
    ]


def test_pieces_are_the_tokens_of_their_runs_in_order() -> None:
    for seed in range(20):
        spread, draw = Spread.drawn(seed), random.Random(seed)
        (plan, *_), _ = threads.run(spread.size, spread.plan)
        unit = draw.randrange(1, 4)
        longest = unit * draw.randrange(1, 4)
        pieces = cut(plan.runs, longest, unit)
        assert tokens(pieces) == tokens(plan.runs)
        starts = {run.position: run for held in plan.runs.held for run in held}
        whole = {run for chain in plan.runs.chains if len(chain) == 1 for run in chain}
        for held in pieces.held:
            assert all(run.length <= longest or run in whole for run in held)
        assert len(starts) <= sum(map(len, pieces.held))
        assert pieces.ends() == [
            run and next(p for held in pieces.held for p in held
                         if (p.rank, p.sample, p.start + p.length)
                         == (run.rank, run.sample, run.start + run.length))
            for run in plan.runs.ends()
        ]  # fmt: skip


def test_few_maps_travel() -> None:
    for ranks in (1, 2, 3, 4, 8, 16):
        longest = longest_of(2**17 // ranks, ranks, 64)
        assert longest % 64 == 0
        assert ranks * -(-(2**17 // ranks) // longest) <= max(8, ranks)
