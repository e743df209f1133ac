"""Rows of tensors that go from rank to rank by index: who sends which, and where they land."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ring_attention_pytorch.comm.ring import Ring
from ring_attention_pytorch.nn.sharding import all_to_all

Rows = Sequence[Tensor] | Sequence[slice]  # for each rank


def dealt(x: Tensor, sends: Rows, lands: Sequence[Tensor], ring: Ring) -> list[Tensor]:
    """Send rows `sends[i]` of x to rank i; return the rows from each, as many as `lands[i]`."""
    shapes = [(len(land), *x.shape[1:]) for land in lands]
    return all_to_all([x[sent] for sent in sends], shapes, ring)


def brought(x: Tensor, sends: Rows, lands: Sequence[Tensor], rows: int, ring: Ring) -> Tensor:
    """Return so many rows of zeros, with what `dealt` brings from rank i at `lands[i]`."""
    room = x.new_zeros(rows, *x.shape[1:])
    return room.index_copy(0, torch.cat(tuple(lands)), torch.cat(dealt(x, sends, lands, ring)))
