"""Tensors as the Triton kernels read them: which the tensor memory accelerator can address."""

import pytest
import torch

from ring_attention_pytorch.kernels._descriptors import (
    Blocks,
    in_blocks,
    operands,
    tma_fits,
)

T = torch.zeros(2, 6, 4, 64, dtype=torch.bfloat16)
FITS = {
    "dense": T,
    "every other token": T[:, ::2],
    "heads first": T.transpose(1, 2),
    "from the eighth column on": T[..., 8:],
}
DOES_NOT = {
    "last dimension in steps": T[..., ::2],
    "last dimension elsewhere": T.transpose(2, 3),
    "begins between 16 bytes": T[..., 1:],
    "rows of 6 bytes": T[..., :3].contiguous(),
    "expanded": T[:, :1].expand(2, 6, 4, 64),
}


@pytest.mark.parametrize("name", FITS)
def test_what_is_addressed_16_bytes_at_a_time(name):
    assert tma_fits([T, FITS[name]])


@pytest.mark.parametrize("name", DOES_NOT)
def test_what_is_not(name):
    assert not tma_fits([DOES_NOT[name]])
    assert not tma_fits([T, DOES_NOT[name]])


def test_without_tma_tensors_are_read_as_they_are():
    blocks = in_blocks(64, T, T[:, :3], pack=2)
    assert blocks == [Blocks(T, 64, 2), Blocks(blocks[1].of, 64, 2)]
    assert [one.data_ptr() for one in operands(False, *blocks)] == [T.data_ptr()] * 2
