"""The look at who shares gradients, after backward."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ring_attention_pytorch.nn.averaging import watch_averaging


@pytest.mark.parametrize(
    ("over", "apart", "wrong"),
    [
        (None, (), False),  # not sharded
        ([0, 2], (), True),
        ([0, 2], (0, 2), False),  # heads are split over these
        ([0, 1], (0, 2), False),
        ([3, 2, 1, 0], (), False),
        ([0], (0, 2), True),
    ],
)
def test_sharding_over_too_few_ranks_is_told_after_backward(over, apart, wrong):
    module = nn.Linear(3, 3)
    if over is not None:
        module.weight.device_mesh = SimpleNamespace(mesh=torch.tensor(over))
    ring = SimpleNamespace(size=2, ranks=[0, 1])
    result = module(torch.randn(2, 3))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert watch_averaging(module, result, ring, apart)
        assert not told
        result.sum().backward()
    assert [str(w.message).startswith("gradients are averaged over") for w in told] == [
        True
    ] * wrong


def test_what_has_no_gradients_is_not_looked_at():
    module, ring = nn.Linear(3, 3), SimpleNamespace(size=2, ranks=[0, 1])
    assert not watch_averaging(module, module(torch.randn(2, 3)).detach(), ring, ())
    ring.size = 1
    assert not watch_averaging(module, module(torch.randn(2, 3)), ring, ())
