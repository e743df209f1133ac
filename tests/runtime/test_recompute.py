"""Functions that backward computes again: with the numbers of forward, or not at all."""

import pytest
import torch

from ring_attention_pytorch.runtime.recompute import recomputed


def test_what_a_function_reads_must_be_as_it_was_in_forward() -> None:
    w = torch.full((2, 3), 2.0)
    x = torch.full((2, 3), 0.5, requires_grad=True)
    right = recomputed(lambda x: (w * x).exp(), x, reads=[w, None])
    (dx,) = torch.autograd.grad(right.sum(), x, retain_graph=True)
    torch.testing.assert_close(dx, 2.0 * torch.exp(torch.ones(2, 3)))
    w.mul_(3.0)
    text = r"modified by an inplace operation: \[torch.FloatTensor \[2, 3\]\] is at version 1; exp"
    with pytest.raises(RuntimeError, match=text):
        torch.autograd.grad(right.sum(), x)


def test_a_tensor_of_inference_mode_has_no_version() -> None:
    with torch.inference_mode():
        held = torch.ones(3)
    x = torch.ones(3, requires_grad=True)
    found = recomputed(lambda x: (x + len(held)).exp(), x, reads=[held])
    (dx,) = torch.autograd.grad(found.sum(), x)
    torch.testing.assert_close(dx, torch.full((3,), 4.0).exp())
