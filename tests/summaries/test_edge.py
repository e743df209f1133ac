"""The far edge of a window, against loops over queries and their cells."""

import pytest
import torch

from ring_attention_pytorch.geometry.layouts import all_segments, segment_positions
from ring_attention_pytorch.ranks.ring import Caller, Ring
from ring_attention_pytorch.runtime.interfaces import ScoreMods
from ring_attention_pytorch.summaries.cells import Cells, Places
from ring_attention_pytorch.summaries.edge import Edge
from tests.support import threads
from tests.support.reference import relative_error

N, TERMS = 23, ScoreMods(0.5, 3.0, 1)


def by_hand(rule: Cells, q, k, v, mask, query: int):
    """Return what a query reads of the cell that its window ends in, before the window."""
    first = (query - rule.window) // rule.stride * rule.stride
    keys = [t for t in range(max(first, 0), query - rule.window) if mask[t]]
    out, lse = torch.zeros(4, 3).double(), torch.full((4,), -torch.inf).double()
    if first >= 0 and keys:
        heads = k[keys].repeat_interleave(2, 1), v[keys].repeat_interleave(2, 1)
        scores = 3.0 * torch.tanh(0.5 * torch.einsum("hd,jhd->hj", q[query], heads[0]) / 3.0)
        out = torch.einsum("hj,jhd->hd", scores.softmax(-1), heads[1])
        lse = scores.logsumexp(-1)
    return out, lse


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("size", "layout"), [(1, "contiguous"), (2, "zigzag"), (3, "striped")])
@pytest.mark.parametrize("rule", [Cells(5, 4, 4), Cells(0, 3, 3)])
def test_each_query_sees_its_cell_up_to_its_window(rule, size, layout, masked) -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, N, h, d, generator=draw, dtype=torch.float64)
        for h, d in ((4, 6), (2, 6), (2, 3))
    )
    mask = torch.rand(2, N, generator=draw) > 0.3 if masked else torch.ones(2, N).bool()

    def main(ring: Ring) -> set[int]:
        places = [segment_positions(s) for s in all_segments(layout, size, N)]
        held, at = Places.of(rule, None, 2, N), places[ring.rank]
        edge = Edge.make(
            rule, [held.held(each) for each in places], ring,
            mask[:, at] if masked else None, torch.device("cpu"),
        )  # fmt: skip
        assert edge is not None
        out, lse = edge.attend(q[:, at], k[:, at], v[:, at], TERMS, Caller(ring, "edge", 0))
        for token, got, of_keys in zip(edge.queries.tolist(), out, lse):
            sample, query = token // len(at), int(at[token % len(at)])
            want = by_hand(rule, q[sample], k[sample], v[sample], mask[sample], query)
            assert relative_error(got, want[0]) < 1e-12
            assert relative_error(of_keys, want[1]) < 1e-12
        return {token // len(at) * N + int(at[token % len(at)]) for token in edge.queries.tolist()}

    found = set().union(*threads.run(size, main)[0])
    ends = {t for t in range(N) if t >= rule.window and (t - rule.window) % rule.stride}
    assert found == {sample * N + t for sample in range(2) for t in ends}


@pytest.mark.parametrize("rule", [Cells(4, 1, 1), Cells(40, 4, 4)])
def test_where_no_window_ends_within_a_cell_there_is_no_edge(rule: Cells) -> None:
    held = Places.of(rule, None, 1, N).held(torch.arange(N))
    assert Edge.make(rule, [held], Ring.alone(), None, torch.device("cpu")) is None
