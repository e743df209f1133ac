"""Whole sequences before they are sharded: where documents are, and what each token predicts.

A rank that had its shard only could not know the token after its last one. So labels are moved to
the tokens that predict them while all of a sequence is there.
"""

from zlib import crc32

import torch
from torch import Tensor

from ring_attention_pytorch.geometry.documents import BatchDocuments, last_of_document

_INTS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def documents_of_positions(positions: Tensor, real: Tensor | None) -> Tensor | None:
    """Return the document of each token, by positions `[b, n]` that begin at 0 with each.

    Args:
        real: bool `[b, n]`, False for padding, whose positions mean nothing.

    Returns:
        int64 `[b, n]`; None if each sample is one document.

    Raises:
        ValueError: positions go back to another number than 0.

    >>> documents_of_positions(torch.tensor([[0, 1, 2, 0, 1]]), None).tolist()
    [[0, 0, 0, 1, 1]]
    """
    back = torch.zeros_like(positions, dtype=torch.bool)
    back[:, 1:] = positions[:, 1:] <= positions[:, :-1]
    if real is not None:
        before = torch.zeros_like(real)
        before[:, 1:] = real[:, :-1]
        back &= real & before
    if bool((positions[back] != 0).any()):
        raise ValueError("position_ids must ascend within a document and begin at 0 in the next")
    return back.cumsum(1) if bool(back.any()) else None


def next_of_whole(x: Tensor, packing: BatchDocuments | None, nothing: int | float) -> Tensor:
    """Move whole sequences `[b, n]` one token ahead: each gets what its successor has.

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


def digest(t: Tensor) -> int:
    """Return a number that tells tensors apart: of shape, dtype and all values, on any device.

    >>> digest(torch.tensor([1, 2])) == digest(torch.tensor([2, 1]))
    False
    """
    bits = t.detach().reshape(-1)
    if bits.is_floating_point():
        bits = bits.view(_INTS[bits.itemsize])
    places = torch.arange(1, len(bits) + 1, device=t.device)
    mixed = (bits.long() ^ (places * 0x1E3779B97F4A7C15)) * 0x2545F4914F6CDD1D
    found = int((mixed ^ (mixed >> 29)).sum())  # in 64 bits, which wrap around
    return crc32(f"{found} {list(t.shape)} {t.dtype}".encode())
