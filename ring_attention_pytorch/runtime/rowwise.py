"""Passes over the rows of results: in plain PyTorch, and on GPUs by one kernel each."""

from functools import lru_cache

import torch
from einops import einsum
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which running sums of tensors of `dtype` are kept."""
    return torch.promote_types(dtype, torch.float32)


def wire_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which parts of a gradient travel that are summed elsewhere.

    Parts in float16 travel in float32: those that cancel may each be larger than float16 holds.
    """
    return torch.float32 if dtype == torch.float16 else dtype


def merge_(out: Tensor, lse: Tensor, *parts: Tensor) -> None:
    """Merge, in place, attention to further keys into `out` [b, n, h, d] and `lse` [b, h, n].

    `parts` are out and lse of one part, of the next, and so on. Any lse may be -inf, or all: a side
    that saw nothing has no weight, and no NaN comes. The convex combination never overflows,
    however far two lse are apart. The result is rounded once.

    >>> out, lse = torch.zeros(1, 1, 1, 2), torch.full((1, 1, 1), -torch.inf)
    >>> merge_(out, lse, torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1))
    >>> merge_(out, lse, torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1))
    >>> out.flatten().tolist(), round(lse.item(), 4)
    ([0.5, 0.5], 0.6931)
    """
    if out.is_cuda and out.dtype != torch.float64 and has_triton():
        from ring_attention_pytorch.runtime._triton_rowwise import fused_merge_

        fused_merge_(out, lse, *parts)
        return
    merged, wide = out.to(accumulation_dtype(out.dtype)), accumulation_dtype(out.dtype)
    for part, part_lse in zip(parts[::2], parts[1::2]):
        weight = torch.sigmoid(part_lse - lse).masked_fill_(part_lse == -torch.inf, 0.0)
        merged.lerp_(part.to(wide), weight.transpose(1, 2).unsqueeze(-1))
        torch.logaddexp(lse, part_lse, out=lse)
    if merged is not out:
        out.copy_(merged)


def add_(total: Tensor, *parts: Tensor, fresh: bool = False) -> None:
    """Add parts to `total` `[b, n, h, d]` in place, or write their sum to it if `fresh`.

    Up to eight parts are rounded once.
    """
    if fresh and not parts:
        total.zero_()
    elif not fresh and len(parts) == 1:
        total.add_(parts[0])  # rounded once, too, and the host launches it sooner than our kernel
    elif total.is_cuda and total.dtype != torch.float64 and has_triton():
        from ring_attention_pytorch.runtime._triton_rowwise import fused_add_

        fused_add_(total, *parts, fresh=fresh)  # one too: in CUDA graphs copies have no priority
    elif fresh and len(parts) == 1:
        total.copy_(parts[0])
    else:
        wide = (parts[0] if fresh else total).to(accumulation_dtype(total.dtype), copy=fresh)
        for part in parts[fresh:]:
            wide += part
        if wide is not total:
            total.copy_(wide)


def sum_of_products(a: Tensor, b: Tensor) -> Tensor:
    """Return each row's inner product of two `[b, n, h, d]`: [b, h, n], accumulator's dtype."""
    if a.is_cuda and a.dtype != torch.float64 and has_triton():
        from ring_attention_pytorch.runtime._triton_rowwise import fused_sum_of_products

        return fused_sum_of_products(a, b)
    wide = accumulation_dtype(a.dtype)
    return einsum(a.to(wide), b.to(wide), "b n h d, b n h d -> b h n")


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Tell whether Triton is there, for the fused passes over memory."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True
