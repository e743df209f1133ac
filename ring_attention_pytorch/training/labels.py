"""Find documents and shift labels, while sequences are whole.

A rank with only its shard does not know the token after its last one, so labels are moved to the
tokens that predict them before sharding.
"""

import torch
from torch import Tensor

from ring_attention_pytorch.geometry.documents import BatchDocuments, last_of_document


def documents_of_positions(positions: Tensor, real: Tensor | None) -> Tensor | None:
    """Number each token's document, from positions `[b, n]` that restart at 0 in each.

    Args:
        real: bool `[b, n]`, False for padding, whose positions are ignored. Padding between two
            documents is numbered as the first one.

    Returns:
        int64 `[b, n]`; None if each sample is one document.

    Raises:
        ValueError: positions restart at a number other than 0.

    >>> documents_of_positions(torch.tensor([[0, 1, 2, 0, 1]]), None).tolist()
    [[0, 0, 0, 1, 1]]
    """
    real = torch.ones_like(positions, dtype=torch.bool) if real is None else real
    at = torch.arange(positions.shape[1], device=positions.device)
    last = at.where(real, -1).cummax(1).values[:, :-1]  # the real token before each but the first
    back = real.clone()
    back[:, :1] = False
    back[:, 1:] &= (last >= 0) & (positions[:, 1:] <= positions.gather(1, last.clamp(min=0)))
    if bool((positions[back] != 0).any()):
        raise ValueError("position_ids must ascend within a document and begin at 0 in the next")
    return back.cumsum(1) if bool(back.any()) else None


def next_of_whole(x: Tensor, packing: BatchDocuments | None, nothing: int | float) -> Tensor:
    """Shift whole sequences `[b, n]` by one: each token gets its successor's value.

    The last token of a document gets `nothing`.

    >>> next_of_whole(torch.tensor([[5, 6, 7]]), None, -100).tolist()
    [[6, 7, -100]]
    """
    moved = torch.full_like(x, nothing)
    moved[:, :-1] = x[:, 1:]
    if packing is None:
        return moved
    positions = torch.arange(x.shape[1], device=x.device)
    return moved.masked_fill(last_of_document(packing, positions), nothing)
