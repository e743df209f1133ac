"""Rows in 8 bits: a power of two for each, one rounding, and NaN for what none can hold."""

import pytest
import torch

from ring_attention_pytorch.runtime.scaled import as_integers, restored, stored

KEPT = torch.float8_e4m3fn


def test_a_row_is_rounded_once_and_its_scale_is_a_power_of_two() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(200, 3, 8, generator=draw) * torch.logspace(-15, 15, 200)[:, None, None]
    rows, scales = stored(x, KEPT)
    mantissa, _ = torch.frexp(scales)
    assert (mantissa == 0.5).all()
    top = rows.float().abs().amax(-1)
    assert ((top >= 224) & (top <= 448)).all()  # nothing is lost that 8 bits hold
    grain = torch.maximum(x.abs() / 16, scales * 2.0**-10)  # half a step, also of the smallest
    assert ((restored(rows, scales) - x).abs() <= grain).all()


def test_what_is_kept_again_stays() -> None:
    x = torch.randn(50, 4, dtype=torch.float32)
    rows, scales = stored(x, KEPT)
    again, of_again = stored(restored(rows, scales), KEPT)
    assert torch.equal(restored(again, of_again), restored(rows, scales))
    assert torch.equal(restored(as_integers(rows), scales), restored(rows, scales))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 448 * 2.0**64])
def test_a_row_that_can_not_be_kept_is_nan_and_no_other(bad: float) -> None:
    x = torch.ones(2, 4)
    x[0, 1] = bad
    found = restored(*stored(x, KEPT))
    assert found[0].isnan().all()
    assert torch.equal(found[1], x[1])


@pytest.mark.parametrize("power", [-63, 0, 63])
def test_the_largest_and_the_smallest_scales_are_kept(power: int) -> None:
    x = 448 * 2.0**power * torch.tensor([[1.0, -0.5, 0.25, 0.0]])
    rows, scales = stored(x, KEPT)
    assert scales.item() == 2.0**power
    assert torch.equal(restored(rows, scales), x)


def test_zeros_stay_zeros_and_other_dtypes_are_kept_as_they_are() -> None:
    assert not restored(*stored(torch.zeros(2, 4), KEPT)).any()
    x = torch.randn(2, 4)
    rows, scales = stored(x, torch.float32)
    assert scales.shape == (2, 0)
    assert restored(rows, scales) is rows
    assert as_integers(rows) is rows
    assert torch.equal(rows, x)
