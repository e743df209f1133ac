"""The feed-forward of a block, against its formula."""

import pytest
import torch

from ring_attention_pytorch.nn.feedforward import feed_forward
from tests.support.reference import relative_error


def test_it_is_two_linear_layers_with_gelu_between_of_normed_tokens() -> None:
    layer, x = feed_forward(6, 1.5).double(), torch.randn(2, 3, 6, dtype=torch.float64)
    _, inner, _, outer = layer
    assert inner.weight.shape == (9, 6)
    normed = x / x.norm(dim=-1, keepdim=True) * 6**0.5
    hidden = normed @ inner.weight.T + inner.bias
    gelu = hidden * (1 + torch.erf(hidden / 2**0.5)) / 2
    assert relative_error(layer(x), gelu @ outer.weight.T + outer.bias) < 1e-14


def test_each_token_is_by_itself() -> None:
    layer, x = feed_forward(4, 2), torch.randn(1, 5, 4)
    assert relative_error(layer(x)[:, 2:3], layer(x[:, 2:3])) < 1e-6


@pytest.mark.parametrize(("dim", "mult", "why"), [(0, 4, "dim must be"), (4, 0.2, "mult must be")])
def test_sizes_that_leave_nothing_are_refused(dim: int, mult: float, why: str) -> None:
    with pytest.raises(ValueError, match=f"a feed-forward: {why} at least"):
        feed_forward(dim, mult)


def test_the_smallest_one_has_one_hidden_number() -> None:
    assert feed_forward(4, 0.25)[1].out_features == 1
