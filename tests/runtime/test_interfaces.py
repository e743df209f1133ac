"""Requests to kernels, as records."""

import torch

from ring_attention_pytorch.runtime.interfaces import KernelRequest


def test_deterministic_algorithms_are_a_part_of_the_case():
    q = torch.randn(1, 6, 2, 8)
    assert not KernelRequest.of(q, q).deterministic
    torch.use_deterministic_algorithms(True)
    try:
        assert KernelRequest.of(q, q).deterministic
    finally:
        torch.use_deterministic_algorithms(False)
