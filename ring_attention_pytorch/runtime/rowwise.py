"""Passes over the rows of results: in plain PyTorch, and on GPUs by one kernel each.

Attention to all keys is the LSE merge of attention to parts of them. `merge` makes a new result and
is differentiable. `merge_` updates a running result in place, and `merge_sinks_` adds sinks to it.
Bits of the two differ: one rounds a softmax, the other a chain of sigmoids.
"""

from collections.abc import Sequence
from functools import lru_cache, reduce

import torch
from einops import einsum
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of running sums of tensors of `dtype`: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def wire_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which parts of a gradient are sent to the rank that sums them.

    Parts in float16 are sent in float32: each of two parts that cancel can overflow float16.
    """
    return torch.float32 if dtype == torch.float16 else dtype


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merge attention to one or more parts of the keys by lse; differentiable, lse too.

    Args:
        parts: out `[..., d]` and lse `[...]` of each, any dtypes. Where a part saw no key, its out
            is 0 and its lse -inf. It has no weight and no gradient there, and causes no NaN.

    Returns:
        out and lse of all keys, in the accumulator's dtype; 0 and -inf where no part saw a key.

    >>> equal = [(torch.tensor(out), torch.tensor(0.0)) for out in ([1.0, 3.0], [3.0, 3.0])]
    >>> merge([*equal, (torch.zeros(2), torch.tensor(-torch.inf))])
    (tensor([2., 3.]), tensor(0.6931))
    """
    lses = torch.stack([lse for _, lse in parts])
    weights, lse = softmax_weights(lses.to(accumulation_dtype(lses.dtype)), dim=0)
    return reduce(torch.add, (w[..., None] * out for w, (out, _) in zip(weights, parts))), lse


def softmax_weights(logits: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return the softmax of logits over a dimension, and its lse, without that dimension.

    Where all logits are -inf, weights are 0, lse is -inf, and the gradient is 0.

    >>> weights, lse = softmax_weights(torch.tensor([[0.0, -torch.inf], [-torch.inf] * 2]), dim=1)
    >>> weights.tolist(), lse.tolist()
    ([[1.0, 0.0], [0.0, 0.0]], [0.0, -inf])
    """
    top = logits.detach().amax(dim, keepdim=True)
    top = top.masked_fill(top.isinf(), 0.0)
    weights = (logits - top).exp()
    total = weights.sum(dim, keepdim=True)
    empty = total == 0
    safe = total.masked_fill(empty, 1.0)
    lse = (safe.log() + top).masked_fill(empty, -torch.inf)
    return weights / safe, lse.squeeze(dim)


def merge_(out: Tensor, lse: Tensor, *parts: Tensor, fresh: bool = False) -> None:
    """Merge, in place, attention to further keys into `out` [b, n, h, d] and `lse` [b, h, n].

    If `fresh`, the parts' own merge is written to `out` and `lse`, on GPUs in the same pass.

    `parts` are out and lse of one part, of the next, and so on. Any lse can be -inf, or all: a side
    that saw no key has no weight and causes no NaN. The convex combination never overflows, however
    far two lse are apart. The result is rounded once.

    >>> out, lse = torch.zeros(1, 1, 1, 2), torch.full((1, 1, 1), -torch.inf)
    >>> merge_(out, lse, torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1))
    >>> merge_(out, lse, torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1))
    >>> out.flatten().tolist(), round(lse.item(), 4)
    ([0.5, 0.5], 0.6931)
    """
    if out.is_cuda and out.dtype != torch.float64 and has_triton():
        from ring_attention_pytorch.runtime._triton_rowwise import fused_merge_

        fused_merge_(out, lse, *parts, fresh=fresh)
        return
    if fresh:
        out.zero_()
        lse.fill_(-torch.inf)
    merged, wide = out.to(accumulation_dtype(out.dtype)), accumulation_dtype(out.dtype)
    for part, part_lse in zip(parts[::2], parts[1::2]):
        weight = torch.sigmoid(part_lse - lse).masked_fill_(part_lse == -torch.inf, 0.0)
        merged.lerp_(part.to(wide), weight.transpose(1, 2).unsqueeze(-1))
        torch.logaddexp(lse, part_lse, out=lse)
    if merged is not out:
        out.copy_(merged)


def merge_sinks_(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Merge, in place, a key of score `sinks` [h] and value 0 that every query sees.

    >>> out, lse = torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1)
    >>> merge_sinks_(out, lse, torch.zeros(1))
    >>> out.flatten().tolist(), round(lse.item(), 4)
    ([0.5, 0.5], 0.6931)
    """
    sinks = sinks.to(lse.dtype).unsqueeze(1)
    weight = torch.sigmoid(lse - sinks).masked_fill_(lse == -torch.inf, 0.0)
    out.mul_(weight.transpose(1, 2).unsqueeze(-1))
    torch.logaddexp(lse, sinks, out=lse)


def add_(total: Tensor, *parts: Tensor, fresh: bool = False) -> None:
    """Add parts to `total` `[b, n, h, d]` in place, or write their sum to it if `fresh`.

    Up to eight parts are rounded once.
    """
    if fresh and not parts:
        total.zero_()
    elif not fresh and len(parts) == 1:
        total.add_(parts[0])  # rounded once, too, and faster to launch than our kernel
    elif total.is_cuda and total.dtype != torch.float64 and has_triton():
        from ring_attention_pytorch.runtime._triton_rowwise import fused_add_

        fused_add_(total, *parts, fresh=fresh)  # one part, too: copies in graphs have no priority
    elif fresh and len(parts) == 1:
        total.copy_(parts[0])
    else:
        wide = (parts[0] if fresh else total).to(accumulation_dtype(total.dtype), copy=fresh)
        for part in parts[fresh:]:
            wide += part
        if wide is not total:
            total.copy_(wide)


def sum_of_products(a: Tensor, b: Tensor) -> Tensor:
    """Return the rows' inner products of two `[b, n, h, d]`: `[b, h, n]`, accumulator's dtype."""
    if a.is_cuda and a.dtype != torch.float64 and has_triton():
        from ring_attention_pytorch.runtime._triton_rowwise import fused_sum_of_products

        return fused_sum_of_products(a, b)
    wide = accumulation_dtype(a.dtype)
    return einsum(a.to(wide), b.to(wide), "b n h d, b n h d -> b h n")


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """True if Triton is installed, for the fused passes over memory."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True
