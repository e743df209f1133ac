"""The best keys of all ranks: as if sorted in one list, whatever the ring and the layout."""

from itertools import product

import pytest
import torch
from torch import Tensor

from ring_attention_pytorch import top_keys
from ring_attention_pytorch.geometry.layouts import positions
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.top_keys import _by_threshold, best_of
from tests.support import threads

N, K = 29, 7


def scores(hidden: bool) -> Tensor:
    """With many ties, and few visible keys of the second query."""
    draw = torch.Generator().manual_seed(0)
    found = torch.randint(0, 6, (2, 3, N), generator=draw).double()
    if hidden:
        found[:, 1, 4:] = -torch.inf
        found[0, 2] = -torch.inf
    return found


def by_hand(row: list[float], k: int) -> list[tuple[float, int]]:
    """A list of all, sorted by score and then by position."""
    seen = [(score, at) for at, score in enumerate(row) if score > -torch.inf]
    best = sorted(seen, key=lambda pair: (-pair[0], pair[1]))[:k]
    return best + [(-torch.inf, -1)] * (k - len(best))


@pytest.mark.parametrize("k", [1, K, N, 40])
@pytest.mark.parametrize("hidden", [False, True])
def test_the_choice_is_that_of_one_list(k, hidden):
    whole = scores(hidden)
    want = [by_hand(row, k) for row in whole.flatten(0, 1).tolist()]
    for size, layout in ((1, "contiguous"), (2, "zigzag"), (3, "striped"), (4, "contiguous")):

        def main(ring: Ring, layout: str = layout) -> list[list[tuple[float, int]]]:
            at = positions(layout, rank=ring.rank, ring_size=ring.size, length=N).flip(0)
            best, places = (t.flatten(0, 1) for t in top_keys(whole[..., at], at, k, group=ring))
            return [[*zip(*pair)] for pair in zip(best.tolist(), places.tolist())]

        assert threads.run(size, main)[0] == [want] * size


def test_the_best_of_a_row_are_the_first_of_equal_ones():
    whole = scores(hidden=True)
    for way, k in product((best_of, _by_threshold), (1, K, N)):
        values, at = way(whole, k)
        at = at.masked_fill(values == -torch.inf, -1)
        pairs = zip(values.flatten(0, 1).tolist(), at.flatten(0, 1).tolist())
        want = [by_hand(row, k) for row in whole.flatten(0, 1).tolist()]
        assert [[*zip(*pair)] for pair in pairs] == want, (way, k)


@pytest.mark.parametrize("k", [1, 2, 3, 4, 40])
def test_nan_comes_before_all_numbers_however_many_are_chosen(k):
    some = [0.0, torch.inf, torch.nan, -torch.inf, torch.inf, 7.0, torch.nan]
    row = torch.tensor(some + [-1.0] * 33)
    want = row.sort(descending=True, stable=True)
    for way in (best_of, _by_threshold):
        found = [t[: min(k, 6)] for t in way(row, k)]
        assert found[1].tolist() == want.indices[: len(found[1])].tolist(), way
        torch.testing.assert_close(found[0], want.values[: len(found[0])], equal_nan=True)


def test_gradients_come_to_the_owner_of_a_score():
    whole = scores(hidden=False)
    weights = torch.arange(1.0, K + 1).double()

    def main(ring: Ring) -> Tensor:
        at = positions("zigzag", rank=ring.rank, ring_size=ring.size, length=N)
        own = whole[..., at].requires_grad_()
        best, _ = top_keys(own, at, K, group=ring)
        (grad,) = torch.autograd.grad((best * weights).sum() / ring.size, own)
        return torch.zeros_like(whole).index_copy(-1, at, grad)

    want = torch.zeros_like(whole).flatten(0, 1)
    for row, line in zip(want, whole.flatten(0, 1).tolist()):
        for weight, (_, at) in zip(weights, by_hand(line, K)):
            row[at] = weight
    torch.testing.assert_close(sum(threads.run(3, main)[0]).flatten(0, 1), want)


def test_a_rank_without_keys_takes_part():
    def main(ring: Ring) -> list[int]:
        mine = slice(0, 0) if ring.rank else slice(None)
        at = torch.arange(5)[mine]
        return top_keys(at.float(), at, 2, group=ring)[1].tolist()

    assert threads.run(2, main)[0] == [[4, 3]] * 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((torch.zeros(2, 3).long(), torch.arange(3), 1), "scores must be floating"),
        ((torch.zeros(2, 3, dtype=torch.float8_e5m2), torch.arange(3), 1), ".* of 16, 32 or 64"),
        ((torch.zeros(2, 3), torch.arange(2), 1), r"positions must be int64 \[3\]"),
        ((torch.zeros(2, 3), torch.arange(3.0), 1), r"positions must be int64 \[3\]"),
        ((torch.zeros(2, 3), torch.arange(3), 0), "k must be at least 1, got 0"),
        ((torch.zeros(2, 3).to_sparse(), torch.arange(3), 1), "scores must be dense"),
        ((torch.zeros(2, 3), torch.arange(3).to("meta"), 1), "positions must be dense"),
    ],
)
def test_what_does_not_fit_is_refused(given, said):
    with pytest.raises(ValueError, match=f"top_keys: {said}"):
        top_keys(*given)


@pytest.mark.parametrize(
    ("at", "got"),
    [
        ([[0, 1, 2], [0, 1, 2]], "got 0 twice"),
        ([[5, 1, 2], [3, 4, 2]], "got 2 twice"),
        ([[5, 1, 1], [3, 4, 2]], "got 1 twice"),
        ([[5, 1, 6], [3, -1, 2]], "got -1;"),
    ],
)
@pytest.mark.parametrize("k", [3, 40])
def test_all_ranks_hear_of_a_position_that_two_keys_have(at, got, k):
    def main(ring: Ring) -> str:
        scores = torch.tensor([[0.0, torch.nan, 2.0], [1.0, 1.0, 1.0]])
        with pytest.raises(ValueError, match="positions must be from 0") as told:
            top_keys(scores, torch.tensor(at[ring.rank]), k, group=ring)
        return str(told.value)

    (told,) = {*threads.run(2, main)[0]}
    assert got in told


def test_hidden_keys_have_any_position():
    def main(ring: Ring) -> list[int]:
        scores = torch.tensor([1.0, 2.0, -torch.inf, -torch.inf]) - ring.rank
        at = torch.tensor([[7, 3, 5, -1], [2, 4, 7, 4]][ring.rank])
        return top_keys(scores, at, 8, group=ring)[1].tolist()

    assert threads.run(2, main)[0] == [[3, 4, 7, 2] + [-1] * 4] * 2


def test_all_ranks_hear_of_another_number():
    def main(ring: Ring) -> str:
        with pytest.raises(ValueError, match="k must be the same on every rank") as told:
            top_keys(torch.zeros(1, 3), torch.arange(3), 1 + ring.rank, group=ring)
        return str(told.value)

    assert len({*threads.run(2, main)[0]}) == 1
