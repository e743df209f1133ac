"""One rank by itself, as if it stood among others: what it has to do can be timed on one GPU."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attention_pytorch.ranks.ring import Exchange, Ring


class Imagined(Ring):
    """Stand among `size` ranks of whom one is there: all say what it says, and have what it has.

    Messages are copies of as many bytes.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.group, self.size, self.rank, self.first = None, size, rank, 0
        self.received: dict[Any, Tensor] = {}

    def gather_bytes(self, message: bytes, size: int = 0) -> list[bytes]:
        return [message] * self.size

    def shared(self) -> tuple[dist.ProcessGroup, tuple[int, ...]] | None:
        return dist.group.WORLD, (0,) * self.size

    def exchange(self, sends: Any, receives: Any) -> Exchange:
        for number, (_, t) in enumerate(receives):
            key = number, tuple(t.shape)
            if key not in self.received:
                self.received[key] = torch.zeros_like(t)
            t.copy_(self.received[key])
        return Exchange(self, sends, receives, [], None)
