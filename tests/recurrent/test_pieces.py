"""Maps of pieces, against loops over the pieces of each run."""

import pytest
import torch
from torch import Tensor

from ring_attention_pytorch.recurrent import cuts
from ring_attention_pytorch.recurrent.cuts import Cuts
from ring_attention_pytorch.recurrent.pieces import Pieces
from tests.support import threads
from tests.support.recurrent_cases import Spread
from tests.support.reference import relative_error

H, D_K, D_V = 2, 3, 4


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, H, D_K, D_V, dtype=torch.float64)


@pytest.mark.parametrize(
    ("layout", "rank"), [("contiguous", 0), ("contiguous", 2), ("zigzag", 0)],
    ids=["a run that is sent", "one that is not", "both"],
)  # fmt: skip
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_maps_of_runs_and_states_and_gradients_of_pieces(monkeypatch, count, layout, rank) -> None:
    monkeypatch.setattr(cuts, "CHUNK", 1)
    monkeypatch.setattr(cuts, "longest_of", lambda tokens: -(-10 // count))
    spread = Spread(3, 60 if layout == "zigzag" else 30, 1, layout, None)  # runs of 10 tokens
    plan = threads.run(3, spread.plan)[0][rank]
    made = Cuts.of(plan, final=False)
    assert len(made.how.spans) == count * len(plan.mine)
    torch.manual_seed(0)
    maps = torch.cat((drawn(len(made.spans)), drawn(len(made.spans))[..., :D_K]), -1)
    runs = maps if made.whole else maps.new_full((len(made.first), *maps.shape[1:]), torch.nan)
    pieces, first = Pieces.of(maps, D_V, made), drawn(len(plan.mine)).requires_grad_()
    pieces.compose(runs)
    pieces.u.requires_grad_()
    before = pieces.states(first)
    want, through, ended = by_hand(plan, made, maps, pieces.u, first)
    assert relative_error(before, torch.stack(want)) < 1e-13
    for got, expected in zip(runs, through, strict=True):
        assert relative_error(got, expected) < 1e-13
    own, du = drawn(len(want)), drawn(len(through))
    total = sum((a * b).sum() for a, b in zip(want + ended, (*own, *du), strict=True))
    if len(maps):
        gradient = torch.autograd.grad(total, pieces.u)[0]
        assert relative_error(pieces.back(before, own, du), gradient) < 1e-13


def by_hand(plan, made, maps, u, first):
    """The states before pieces; of the runs that are sent, the maps and the states after them."""
    before, through, ended = [], [], []
    m, numbers, spans = maps[..., D_V:], made.pieces.tolist(), made.how.spans.tolist()
    for run, (begin, length) in enumerate(plan.spans):
        state, total = first[run], torch.eye(D_K).double().expand(H, D_K, D_K)
        total = torch.cat((torch.zeros(H, D_K, D_V).double(), total), -1)
        for piece, (start, _) in enumerate(spans):
            if not begin <= start < begin + length:
                continue
            before.append(state)
            if piece in numbers:
                place = numbers.index(piece)
                state = torch.einsum("hij,hjv->hiv", m[place], state) + u[place]
                total = torch.einsum("hij,hjv->hiv", m[place], total)
                total = torch.cat((total[..., :D_V] + u[place], total[..., D_V:]), -1)
        if run in plan.runs.sent(plan.ring.rank, final=False):
            through.append(total)
            ended.append(state)
    return before, through, ended
