"""Both passes over all scores, against loops and finite differences."""

import math

import torch

from ring_attention_pytorch.routing.passes import PLAIN, partition, slope

DOUBLE = torch.float64


def test_scores_above_are_counted_and_others_summed() -> None:
    scores = torch.tensor([[0.5, -1.0, 2.0, -3.0], [-1.0, -2.0, -5.0, -9.0]], dtype=DOUBLE)
    a, eps = torch.tensor([1.0, 0.5], dtype=DOUBLE), 0.7
    count, rest = partition(scores, a, eps)
    for i in range(2):
        row = scores[i].tolist()
        assert count[i] == sum(s >= -a[i] for s in row)
        below = [s for s in row if s < -a[i]]
        assert math.isclose(rest[i], math.log(sum(math.exp(s / eps) for s in below)))
    assert (count.tolist(), count.dtype) == ([3, 0], DOUBLE)


def test_of_none_below_the_sum_is_nothing() -> None:
    count, rest = partition(torch.ones(2, 3, dtype=DOUBLE), torch.zeros(2, dtype=DOUBLE), 1.0)
    assert count.tolist() == [3, 3]
    assert rest.tolist() == [-torch.inf] * 2


def test_a_slope_is_the_sum_of_its_steps_where_a_score_is_below_their_bound() -> None:
    draw = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 7, generator=draw, dtype=DOUBLE)
    coef, bound, shift = (torch.rand(2, 3, 4, generator=draw, dtype=DOUBLE) for _ in range(3))
    coef[:, 1, 2] = 0.0
    shift[:, 1, 2] = 1e9  # times 0 this would be NaN
    e = torch.tensor([4.0, 2.0, 1.0, 0.5], dtype=DOUBLE)
    window = torch.tensor([0, 0, 0, 1, 1, 2, 2])
    got = slope(scores, (coef, bound, shift, e), window)
    for i in range(2):
        for j, w in enumerate(window.tolist()):
            s = scores[i, j].item()
            want = sum(
                coef[i, w, k].item() * math.exp((s + shift[i, w, k].item()) / e[k].item())
                for k in range(4)
                if s < bound[i, w, k] and coef[i, w, k] != 0
            )
            assert math.isclose(got[i, j], want, rel_tol=1e-12)


def test_pytorch_runs_anywhere() -> None:
    assert PLAIN.check(torch.device("cpu")) is None
    assert (PLAIN.partition, PLAIN.slope) == (partition, slope)
