"""Runs that are cut, followed through maps of numbers: each adds its tokens to a position."""

from itertools import pairwise

import pytest
import torch

from ring_attention_pytorch.recurrent import cuts
from ring_attention_pytorch.recurrent.cuts import Cuts, longest_of, pieces_of
from ring_attention_pytorch.recurrent.levels import followed
from tests.support import threads
from tests.support.recurrent_cases import Spread


@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("pieces", [1, 2, 3, 4, 5])
def test_maps_of_pieces_lead_to_them_and_through_their_runs(monkeypatch, pieces, final) -> None:
    monkeypatch.setattr(cuts, "CHUNK", 2)
    monkeypatch.setattr(cuts, "_SHORTEST", 1)
    monkeypatch.setattr(cuts, "_PIECES", pieces)

    def main(ring):
        plan = spread.plan(ring)
        found, longest = (
            Cuts.of(plan, final),
            longest_of(spread.batch * plan.runs.tokens[ring.rank]),
        )
        spans = found.how.spans.tolist()
        assert [token for first, end in spans for token in range(first, end)] == [
            token for first, length in plan.spans for token in range(first, first + length)
        ]
        run_of = [run for run, span in zip(plan.mine, plan.spans)
                  for first, _ in spans if span[0] <= first < sum(span)]  # fmt: skip
        whole = {run for chain in plan.runs.chains if len(chain) == 1 for run in chain}
        assert len(run_of) == len(spans)
        assert all(run_of.count(run) == 1 for run in plan.mine if run in whole)
        assert all(end - first <= longest for run, (first, end) in zip(run_of, spans)
                   if run not in whole)  # fmt: skip
        assert all((end - first) % 2 == 0 for (run, (first, end)), (after, _) in
                   pairwise(zip(run_of, spans)) if run == after)  # fmt: skip
        sent = [plan.mine[number] for number in plan.runs.sent(ring.rank, final)]
        with_maps = [spans[piece] for piece in found.pieces.tolist()]
        assert found.spans.tolist() == with_maps
        assert len(with_maps) == len(spans) - len({*plan.mine} - {*sent})
        assert found.whole == (len(spans) == len(plan.mine))
        u = torch.tensor([end - first for first, end in with_maps]).double().view(-1, 1, 1, 1)
        begin = torch.tensor([run.position for run in plan.mine]).double().view(-1, 1, 1, 1)
        before = followed(torch.ones_like(u), u, begin, found.within).flatten().tolist()
        first_of = dict(zip(plan.mine, plan.spans))
        assert before == [run.position + first - first_of[run][0]
                          for run, (first, _) in zip(run_of, spans)]  # fmt: skip
        through = followed(torch.ones_like(u), u, u[found.first], found.rest)[found.composed]
        assert through.flatten().tolist() == [run.length for run in sent]
        assert found.ends.tolist() == found.pieces[found.last].tolist()
        ends = [with_maps[place][1] for place in found.last.tolist()]
        assert ends == [sum(first_of[run]) for run in sent]
        return len(spans) - len(plan.mine)

    more = 0
    for seed in range(20):
        spread = Spread.drawn(seed)
        more += sum(threads.run(spread.size, main)[0])
    assert (more > 0) == (pieces > 1)


def test_a_rank_has_about_four_pieces_of_whole_chunks() -> None:
    assert [longest_of(tokens) for tokens in (1, 2**14, 2**17 + 1)] == [2048, 4096, 32832]
    assert [length for _, length in pieces_of((5, 2**17 + 1), 32832)] == [32832] * 3 + [32577]
    assert pieces_of((5, 64), 64) == [(5, 64)]
    assert pieces_of((5, 300), 150) == [(5, 192), (197, 108)]
