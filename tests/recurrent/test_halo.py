"""Halos and short convolutions over rings of threads, against loops over tokens."""

import pytest
import torch

from ring_attention_pytorch.recurrent import ring_halo, ring_short_conv
from tests.support import threads
from tests.support.recurrent_cases import Spread, check
from tests.support.recurrent_reference import convolved


@pytest.mark.parametrize("seed", range(16))
def test_convolutions_equal_one_process(seed) -> None:
    spread, width = Spread.drawn(seed), 1 + seed % 6  # often wider than a run
    draw = torch.Generator().manual_seed(seed)
    x, weight, bias = (
        torch.randn(*shape, generator=draw, dtype=torch.float64)
        for shape in ((spread.batch, spread.length, 3), (3, width), (3,))
    )
    same = {"weight": weight} | ({"bias": bias} if seed % 2 else {})

    def reference(*, spread, x, weight, bias=None):
        return {"out": convolved(x, weight, bias, spread.documents)}

    check(
        spread, {"x": x}, same, lambda **given: {"out": ring_short_conv(**given)}, reference, 1e-12
    )


def test_a_halo_spans_ranks_and_begins_with_zeros() -> None:
    spread = Spread(4, 4, 1, "contiguous", [[0, 1, 4]])

    def main(ring):
        x = torch.tensor([[[10.0 + ring.rank, 20.0]]])
        return ring_halo(x, 3, plan=spread.plan(ring))[0, :, 0].tolist()

    assert threads.run(4, main)[0] == [[0, 0, 0], [0, 0, 0], [0, 0, 11], [0, 11, 12]]


@pytest.mark.parametrize(
    ("x", "width", "match"),
    [
        (torch.zeros(1, 5, 2), 1, r"x must be \[1, 4\] and more on cpu by the plan"),
        (torch.zeros(1, 4, 2), -1, "width must be at least 0"),
    ],
)
def test_wrong_arguments(x, width, match) -> None:
    spread = Spread(1, 4, 1, "contiguous", None)
    with pytest.raises(ValueError, match=match):
        threads.run(1, lambda ring: ring_halo(x, width, plan=spread.plan(ring)))


@pytest.mark.parametrize("weight", [torch.zeros(3, 2), torch.zeros(2), torch.zeros(2, 0)])
def test_wrong_weights(weight) -> None:
    spread = Spread(1, 4, 1, "contiguous", None)
    with pytest.raises(ValueError, match="x must be \\[b, n, c\\] and weight"):
        threads.run(
            1, lambda ring: ring_short_conv(torch.zeros(1, 4, 2), weight, plan=spread.plan(ring))
        )
