"""Mamba 1 over rings of threads, against a loop over tokens."""

import pytest
import torch

from ring_attention_pytorch.recurrent.selective import selective_scan
from tests.support import threads
from tests.support.recurrent_cases import Spread, check
from tests.support.recurrent_reference import sequential


@pytest.mark.parametrize("seed", range(8))
def test_channels_with_gates_of_their_own_equal_one_process(seed) -> None:
    spread = Spread.drawn(seed)
    draw = torch.Generator().manual_seed(seed)
    shape = spread.batch, spread.length
    x, dt, b, c = (
        torch.randn(*shape, n, generator=draw, dtype=torch.float64) for n in (3, 3, 2, 2)
    )
    a = -torch.rand(3, 2, generator=draw, dtype=torch.float64)
    skip = torch.randn(3, generator=draw, dtype=torch.float64)

    def ours(*, plan, x, dt, a, b, c, skip):
        out, last = selective_scan(x, dt.abs(), a, b, c, plan=plan, skip=skip, final=True)
        return {"out": out, "last": last}

    def reference(*, spread, x, dt, a, b, c, skip):
        step = dt.abs()
        q, k, v = c[:, :, None], b[:, :, None], (x * step)[..., None]
        out, last = sequential(q, k, v, step[..., None] * a, None, spread.begins)
        return {"out": out[..., 0] + x * skip, "last": last[..., 0]}

    given = {"x": x, "dt": dt, "b": b, "c": c}
    check(spread, given, {"a": a, "skip": skip}, ours, reference, 1e-10)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("a", (3, 5)), ("a", (2,)), ("a", (1, 2)), ("dt", (1, 4, 1)), ("b", (1, 4, 1, 2)),
     ("skip", (1,)), ("skip", (4, 3))],
)  # fmt: skip
def test_tensors_that_dont_fit(name, shape) -> None:
    """None is spread over a dimension that it doesn't have."""
    spread = Spread(1, 4, 1, "contiguous", None)
    x, b = torch.zeros(1, 4, 3), torch.zeros(1, 4, 2)
    given = dict(x=x, dt=x, a=torch.zeros(3, 2), b=b, c=b, skip=torch.zeros(3))
    given |= {name: torch.zeros(shape)} | ({"c": torch.zeros(shape)} if name == "b" else {})

    def main(ring):
        with pytest.raises(ValueError, match=r"a \[channels, d\] and skip \[channels\]"):
            selective_scan(**given, plan=spread.plan(ring))

    threads.run(1, main)
