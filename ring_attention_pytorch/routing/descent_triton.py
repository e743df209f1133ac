"""Passes over many scores in Triton: one launch for each step of descent, one for all of backward.

A row can have millions of scores; a few small PyTorch operations join the partial results of its
blocks. All is in float64, so results equal `passes.PLAIN` up to rounding. The kernels are in
`_triton_descent.py`, which is imported inside the functions because Triton is optional.
"""

import importlib.util
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from ring_attention_pytorch.routing.passes import Passes
from ring_attention_pytorch.runtime.torch_func import resolved

_BLOCK = 1024


def check(device: torch.device) -> None:
    """Raise ValueError if Triton can't be used for scores on that device."""
    if importlib.util.find_spec("triton") is None:
        raise ValueError('use_triton needs triton (pip install "triton>=3.4")')
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f"use_triton runs on CUDA, the scores are on {device}")


def partition(scores: Tensor, a: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute `passes.partition`: the number of float64 scores >= -a, and LSE of the others."""
    from ring_attention_pytorch.routing._triton_descent import partition_kernel

    n = scores.shape[-1]
    flat = resolved(scores.reshape(-1, n).contiguous())
    rows, blocks = len(flat), -(-n // _BLOCK)
    count = flat.new_empty((rows, blocks))
    top, total = torch.empty_like(count), torch.empty_like(count)
    if flat.numel():
        bound = -a.reshape(-1).contiguous()
        per_eps = flat.new_tensor([1 / eps])  # a Python number would be passed as float32
        partition_kernel[(rows * blocks,)](
            flat, bound, count, top, total, per_eps, n, blocks, BLOCK=_BLOCK
        )
    rest = (top + total.log()).logsumexp(-1)
    at_least = count.sum(-1)
    return at_least.view(a.shape), rest.view(a.shape)


def slope(scores: Tensor, terms: Sequence[Tensor], window: Tensor) -> Tensor:
    """Compute `passes.slope` of float64 scores."""
    from ring_attention_pytorch.routing._triton_descent import slope_kernel

    *terms, e = terms
    n = scores.shape[-1]
    windows, steps = terms[0].shape[-2:]
    flat = resolved(scores.reshape(-1, n).contiguous())
    total = torch.zeros_like(flat)
    if flat.numel() and steps:
        coef, bound, shift = (term.contiguous() for term in terms)
        slope_kernel[(len(flat) * -(-n // _BLOCK),)](
            flat, total, window, coef, bound, shift, e, n, windows, steps, BLOCK=_BLOCK
        )
    return total.view(scores.shape)


TRITON = Passes(partition, slope, check)
