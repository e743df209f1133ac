"""Dropout's draws: those of the specification, and they look like chance."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from ring_attention_pytorch.runtime.dropout import Dropout
from tests.support.reference import kept_by_spec


def kept(dropout: Dropout, *sizes: int, start: int = 0) -> Tensor:
    """bool [samples, heads, queries, keys], the last two numbered from `start` on."""
    b, h, n, m = (torch.arange(size, dtype=torch.int32) for size in sizes)
    marks = dropout.marks(
        b[:, None, None, None], h[:, None, None], (n + start)[:, None].contiguous()
    )
    return dropout.kept(*marks, m + start)


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**64 - 1])
@pytest.mark.parametrize(("rate", "start"), [(0.1, 0), (0.6, -3), (0.99, 2**31 - 5)])
def test_the_bits_are_those_of_the_specification(seed, rate, start):
    got, sizes = kept(Dropout(rate, seed, first_head=3), 2, 2, 5, 5, start=start), (2, 2, 5, 5)
    for b, h, i, j in product(*map(range, sizes)):
        assert got[b, h, i, j] == kept_by_spec(rate, seed, b, h + 3, i + start, j + start)


def correlation(a: Tensor, b: Tensor, rate: float) -> float:
    """In standard deviations of what independent draws of this rate would give."""
    centred = (a.double() - (1 - rate)) * (b.double() - (1 - rate))
    return float(centred.sum() / (rate * (1 - rate) * math.sqrt(centred.numel())))


@pytest.mark.parametrize("rate", [0.1, 0.5])
@pytest.mark.parametrize("seed", [0, 7])
def test_draws_are_uniform_and_independent_of_their_neighbours(rate, seed):
    """None of some 60 sums of a million draws each is 5 standard deviations off."""
    z = kept(Dropout(rate, seed), 2, 4, 256, 512)
    n = z.numel()
    assert abs(float(z.double().mean()) - (1 - rate)) < 5 * math.sqrt(rate * (1 - rate) / n)
    found = {("sample", 1): correlation(z[1], z[0], rate)}
    found |= {("head", s): correlation(z[:, s:], z[:, :-s], rate) for s in (1, 2, 3)}
    found |= {("query", 2**s): correlation(z[:, :, 2**s :], z[:, :, : -(2**s)], rate)
              for s in range(8)}  # fmt: skip
    found |= {("key", 2**s): correlation(z[..., 2**s :], z[..., : -(2**s)], rate)
              for s in range(9)}  # fmt: skip
    found["diagonal", 1] = correlation(z[:, :, 1:, 1:], z[:, :, :-1, :-1], rate)
    found["transposed", 0] = correlation(z[..., :256], z[..., :256].mT, rate)
    others = [Dropout(rate, seed + 1), Dropout(rate, seed + 2**32), Dropout(rate, seed + 2**63)]
    others += [Dropout(rate, seed).for_layer(i) for i in range(3)]
    found |= {("seed", i): correlation(z, kept(o, 2, 4, 256, 512), rate)
              for i, o in enumerate(others)}  # fmt: skip
    assert max(map(abs, found.values())) < 5, found
    for dim in (-1, -2):  # no row and no column is luckier: sums have a binomial's variance
        sums = (~z).double().sum(dim)
        want = z.shape[dim] * rate * (1 - rate)
        assert abs(float(sums.var()) / want - 1) < 5 * math.sqrt(2 / sums.numel())


def test_far_apart_numbers_draw_apart():
    dropout = Dropout(0.5, 3)
    for start in (2**20, 2**31 - 300, -(2**31)):
        near, far = kept(dropout, 1, 2, 256, 256), kept(dropout, 1, 2, 256, 256, start=start)
        assert abs(correlation(near, far, 0.5)) < 5
