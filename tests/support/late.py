"""Parts as calls on other streams make them: not there until somebody waits."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor


class Late:
    """`late(t)` is NaN, and from the next `join` on what `t` is."""

    def __init__(self) -> None:
        self.coming: list[tuple[Tensor, Tensor]] = []

    def __call__(self, t: Tensor) -> Tensor:
        self.coming.append((torch.full_like(t, torch.nan), t))
        return self.coming[-1][0]

    def join(self) -> None:
        for there, t in self.coming:
            there.copy_(t)
        self.coming.clear()

    @contextmanager
    def waits(self) -> Iterator[None]:
        """Whoever sums or merges calls this `join`."""
        from ring_attention_pytorch.runtime import accumulate

        own = accumulate._Accumulator._join

        def join(total: accumulate._Accumulator) -> None:
            self.join()
            own(total)

        with mock.patch.object(accumulate._Accumulator, "_join", join):
            yield
