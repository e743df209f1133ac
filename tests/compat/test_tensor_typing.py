"""Hints of dtypes and dimensions are checked."""

import pytest
import torch
from ring_attention_pytorch.tensor_typing import Bool, Float, Int

# --- hints ---


def test_hints_are_checked_by_beartype() -> None:
    from beartype import beartype
    from beartype.roar import BeartypeCallHintParamViolation

    @beartype
    def f(x: Float["b n 8"], i: Int["b n"], m: Bool["... n"]) -> None:  # noqa: F722
        pass

    good = torch.zeros(2, 3, 8), torch.zeros(2, 3).long(), torch.zeros(3).bool()
    f(*good)
    for at, wrong in enumerate((torch.zeros(2, 3, 7), torch.zeros(2, 3), torch.zeros(3))):
        with pytest.raises(BeartypeCallHintParamViolation):
            f(*(wrong if i == at else t for i, t in enumerate(good)))
