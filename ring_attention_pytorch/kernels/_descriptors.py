"""Tensor arguments of the Triton kernels: tensors, or descriptors for TMA (Hopper's bulk loads)."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_attention_pytorch.runtime.launches import power_of_2


def tma_fits(tensors: Sequence[Tensor]) -> bool:
    """True if the tensor memory accelerator can address these tensors: 16-byte alignment."""
    device = tensors[0].device
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (9, 0):
        return False
    for t in tensors:
        *strides, last = t.stride()
        if last != 1 or t.data_ptr() % 16 != 0:
            return False
        if any(s <= 0 or s * t.element_size() % 16 != 0 for s in strides):
            return False
    return True


class Blocks(NamedTuple):
    """A tensor, and the number of its rows that a kernel reads at a time, over `pack` heads."""

    of: Tensor
    rows: int
    pack: int


def in_blocks(rows: int, *tensors: Tensor, pack: int = 1) -> list[Blocks]:
    """Return tensors with the block size by which a kernel reads them."""
    return [Blocks(t, rows, pack) for t in tensors]


def operands(tma: bool, *blocks: Blocks) -> list[Any]:
    """Return the tensors, or with TMA their descriptors, to be passed to a kernel."""
    if not tma:
        return [block.of for block in blocks]
    from triton.tools.tensor_descriptor import TensorDescriptor

    def descriptor(t: Tensor, rows: int, pack: int) -> TensorDescriptor:
        if t.ndim == 3:  # lse and delta, [b, h, n]
            return TensorDescriptor.from_tensor(t, [1, pack, rows // pack])
        shape, strides = t.shape, t.stride()
        heads_first = [[sizes[i] for i in (0, 2, 1, 3)] for sizes in (shape, strides)]
        return TensorDescriptor(t, *heads_first, [1, pack, rows // pack, power_of_2(shape[3])])

    return [descriptor(*block) for block in blocks]
