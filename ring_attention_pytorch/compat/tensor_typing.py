"""Type hints of 0.5.20 for a tensor's dtype and dimensions; beartype checks them."""

import re
from collections.abc import Callable
from typing import Annotated, Any

import torch
from beartype.vale import Is
from torch import Tensor


class TorchTyping:
    """A maker of type hints: `Float["b n 8"]` is a floating Tensor with these dimensions.

    A name stands for a dimension of any size, and is not compared with others of that name. "..."
    or "*name" stands for any number of dimensions.

    >>> from beartype.door import is_bearable
    >>> [is_bearable(torch.ones(2, 8), Float[shape]) for shape in ("n 8", "n 7", "n", "... 8")]
    [True, False, False, True]
    """

    def __init__(self, fits: Callable[[torch.dtype], bool]):
        self.fits = fits

    def __getitem__(self, shape: str) -> Any:
        each = (
            "( [0-9]+)*" if name[0] in ".*" else f" {name}" if name.isdigit() else " [0-9]+"
            for name in shape.split()
        )  # fmt: skip
        pattern = "".join(each)

        def fitting(t: Tensor) -> bool:
            sizes = "".join(f" {size}" for size in t.shape)
            return self.fits(t.dtype) and re.fullmatch(pattern, sizes) is not None

        return Annotated[Tensor, Is[fitting]]


Float = TorchTyping(lambda dtype: dtype.is_floating_point)
Bool = TorchTyping(lambda dtype: dtype == torch.bool)
Int = TorchTyping(lambda dtype: dtype in (torch.int8, torch.int16, torch.int32, torch.int64))
