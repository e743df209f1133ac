"""Keys and values in 8 bits: one scale for each token and key head, a power of two.

    row [0.30, -1.75, 0.02]   ->   [76.8, -448, 5.12], rounded to float8, and the scale 2 ** -8

A row is scaled until its largest number fits into float8. Scaling by a power of two is exact: the
only loss is one rounding, to 3 bits after the first. The stored row depends on its token alone, is
the same on every rank, and does not change when it is rounded again. Rows with a number that is not
finite, or is beyond 448 * 2 ** 63, become NaN.
"""

import torch
from torch import Tensor

WIDE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SCALED = (torch.float8_e4m3fn,)
_MOST = 63  # exponents of scales are within +-63: kernels add two of them
# float32; 448, the largest number of float8, is 1.75 * 2 ** 8
_SIGNLESS, _MANTISSA, _BITS, _BIAS = 0x7FFFFFFF, 0x7FFFFF, 23, 127
_THREE_QUARTERS = 0x600000


def stored(t: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return rows `[..., d]` in the dtype of a cache, and their scales.

    Scales are float32 `[..., 1]`, or `[..., 0]` for a dtype without scales.

    >>> rows, scales = stored(torch.tensor([[0.30, -1.75, 0.02]]), torch.float8_e4m3fn)
    >>> rows.tolist(), scales.tolist()
    ([[80.0, -448.0, 5.0]], [[0.00390625]])
    >>> restored(rows, scales)
    tensor([[ 0.3125, -1.7500,  0.0195]])
    """
    if dtype not in SCALED:
        return t.to(dtype), t.new_empty((*t.shape[:-1], 0), dtype=torch.float32)
    x = t.to(torch.float32)
    top = (x.view(torch.int32) & _SIGNLESS).amax(-1, keepdim=True)  # NaN are the largest
    power = (top >> _BITS) - _BIAS - 8 + ((top & _MANTISSA) > _THREE_QUARTERS).int()
    within = power.clamp(-_MOST, _MOST)
    x = (x * _power_of_two(-within)).masked_fill(power > _MOST, torch.nan)
    return x.to(dtype), _power_of_two(within)


def restored(rows: Tensor, scales: Tensor) -> Tensor:
    """Undo `stored` for rows `[..., d]`: float32 if they are scaled, otherwise unchanged."""
    if not scales.shape[-1]:
        return rows
    return rows.view(torch.float8_e4m3fn).to(torch.float32) * scales


def as_integers(rows: Tensor) -> Tensor:
    """View rows of 8 bits as integers, which can be pickled; `restored` takes both."""
    return rows.view(torch.uint8) if rows.dtype in SCALED else rows


def _power_of_two(power: Tensor) -> Tensor:
    """Return 2 ** power in float32, exactly."""
    return (power + _BIAS << _BITS).view(torch.float32)
