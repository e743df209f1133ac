"""`merge_attention`: attention to all keys, from attention to parts of them, by their lse.

Attention to a part is out = sum_j exp(s_j) v_j / exp(lse) with lse = log sum_j exp(s_j). Over all
parts, each sum over keys is a sum over parts:

    lse = log sum_i exp(lse_i)        out = sum_i exp(lse_i - lse) out_i

On GPUs the kernel that merges in ring attention does it, which reads each part once; one more does
backward. Elsewhere, in traced code, and for second derivatives and forward mode it is plain
PyTorch.

Dao et al. 2022, https://arxiv.org/abs/2205.14135, section 3.1
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ring_attention_pytorch.arguments import checked, checks_of
from ring_attention_pytorch.runtime.rowwise import (
    accumulation_dtype,
    has_triton,
    merge,
    merge_,
)
from ring_attention_pytorch.runtime.scores import check_per_head
from ring_attention_pytorch.runtime.torch_func import (
    Function,
    differentiable_grads,
    forward_mode,
    is_first_order,
)

_AT_ONCE = 3  # parts that one launch merges, rounding once


@checked
def merge_attention(
    *parts: Tensor, sinks: Tensor | None = None, heads_first: bool = False
) -> tuple[Tensor, Tensor]:
    """Merge attention to parts of the keys into attention to all of them: one softmax.

    Takes results of `ring_attn` with `return_lse=True`: `merge_attention(out_a, lse_a, out_b,
    lse_b)`, with any number of parts. Each key must be in one part only. With lse_i = log sum_j
    exp(s_ij) of part i,

        lse = log sum_i exp(lse_i),    out = sum_i exp(lse_i - lse) out_i

    Differentiable through out and lse, in each part. Nothing overflows, however far apart two lse
    are. A query that sees no key of a part has lse -inf there; that row of its out is not read,
    and gets no gradient. Nothing is exchanged between ranks.

    Args:
        parts: out `[b, n, h, d_v]` and lse `[b, h, n]` of the first part, of the second, and so
            on; all out of one dtype, lse in float32 (float64 for float64).
        sinks: `[h]`, as for `ring_attn`. They count once: give them here, or to one of the parts,
            not to several. Their gradients are of these queries, to be summed over ranks.
        heads_first: out is `[b, h, n, d_v]`.

    Returns:
        out, in the parts' dtype, and lse of all keys; 0 and -inf for a query that sees no key. They
        can be merged with further parts.

    Raises:
        ValueError: parts have other shapes or dtypes.

    Source: Dao et al. 2022, https://arxiv.org/abs/2205.14135, section 3.1

    >>> from ring_attention_pytorch import ring_attn
    >>> q, k, v = torch.randn(3, 1, 6, 2, 8)
    >>> near = ring_attn(q, k[:, :4], v[:, :4], cross=True, return_lse=True)
    >>> far = ring_attn(q, k[:, 4:], v[:, 4:], cross=True, return_lse=True)
    >>> out, lse = merge_attention(*near, *far)
    >>> torch.allclose(out, ring_attn(q, k, v), atol=1e-6)
    True
    """
    with checks_of("merge_attention"):
        check_parts(parts, heads_first)
        outs = [out.transpose(1, 2) if heads_first else out for out in parts[::2]]
        check_per_head("sinks", outs[0], sinks)
    given = [*chain.from_iterable(zip(outs, parts[1::2]))]
    out, lse = _merged(given, sinks)
    return (out.transpose(1, 2) if heads_first else out), lse


def check_parts(parts: Sequence[Tensor], heads_first: bool) -> None:
    """Raise ValueError unless these are out and lse, in turns, of the same queries."""
    if not parts or len(parts) % 2:
        raise ValueError(
            "parts must be out and lse of each, as in (out_a, lse_a, out_b, lse_b), "
            f"got {len(parts)} tensors"
        )
    form = "[b, h, n, d_v]" if heads_first else "[b, n, h, d_v]"
    first = parts[0]
    if first.ndim != 4 or not first.is_floating_point():
        raise ValueError(f"out must be floating {form}, got {first.dtype} {list(first.shape)}")
    b, n, h, _ = first.transpose(1, 2).shape if heads_first else first.shape
    wide = accumulation_dtype(first.dtype)
    for number, (out, lse) in enumerate(zip(parts[::2], parts[1::2])):
        for name, t, shape, dtype in (
            (f"out {form}", out, list(first.shape), first.dtype),
            ("lse [b, h, n]", lse, [b, h, n], wide),
        ):
            if list(t.shape) != shape or t.dtype != dtype or t.device != first.device:
                raise ValueError(
                    f"{name} of part {number} must be {shape} in {dtype} on {first.device}, as "
                    f"the first out asks; got {list(t.shape)} in {t.dtype} on {t.device}"
                )


def _merged(parts: Sequence[Tensor], sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    given = [*parts] if sinks is None else [*parts, sinks]
    if all(type(t) in (Tensor, torch.nn.Parameter) for t in given) and _is_fused(parts[0]):
        return _Merge.apply(sinks, *parts)
    return _plain(parts, sinks)


def _is_fused(out: Tensor) -> bool:
    """True if kernels of ours merge such parts: CUDA, not traced, no transform of torch.func."""
    on_gpu = out.is_cuda and out.dtype != torch.float64 and out.numel() > 0
    return on_gpu and has_triton() and not (is_compiling() or forward_mode())


def _plain(parts: Sequence[Tensor], sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Merge in plain PyTorch, any number of times differentiable."""
    by_query = []
    for out, lse in zip(parts[::2], parts[1::2]):
        lse = lse.transpose(1, 2)
        by_query.append((out.masked_fill((lse == -torch.inf).unsqueeze(-1), 0.0), lse))
    first, lse = by_query[0]
    if sinks is not None:
        by_query.append((first.new_zeros(()), sinks.to(lse.dtype).expand_as(lse)))
    out, lse = merge(by_query)
    return out.to(first.dtype), lse.transpose(1, 2).contiguous()


class _Merge(Function):
    """(sinks, parts: out and lse of each) -> (out, lse), by kernels of ours."""

    @staticmethod
    def forward(sinks: Tensor | None, *parts: Tensor) -> tuple[Tensor, Tensor]:
        first, lse = parts[:2]
        if sinks is not None:  # one part more: its out is 0, whose memory is one element
            zeros = first.new_zeros(()).expand(first.shape)
            parts = *parts, zeros, sinks.to(lse.dtype).unsqueeze(1).expand(lse.shape)
        several = len(parts) > 2 * _AT_ONCE
        dtype = accumulation_dtype(first.dtype) if several else first.dtype
        out = torch.empty(first.shape, dtype=dtype, device=first.device)
        lse = torch.empty(lse.shape, dtype=lse.dtype, device=lse.device)
        merge_(out, lse, *parts, fresh=True)
        return out.to(first.dtype), lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs, output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        from ring_attention_pytorch.runtime._triton_rowwise import fused_merge_back

        sinks, *parts, lse = ctx.saved_tensors
        dout = torch.zeros_like(parts[0]) if dout is None else dout
        dlse = torch.zeros_like(lse) if dlse is None else dlse
        if not is_first_order():
            return _differentiable(ctx.needs_input_grad, sinks, parts, dout, dlse)
        douts, dlses, delta = fused_merge_back(lse, dout, dlse, parts[::2], parts[1::2])
        dsinks = None
        if sinks is not None:
            share = (sinks.to(lse.dtype).unsqueeze(1) - lse).exp()
            dsinks = (share * (dlse - delta)).sum((0, 2)).to(sinks.dtype)
        return dsinks, *chain.from_iterable(zip(douts, dlses))


def _differentiable(
    needed: Sequence[bool],
    sinks: Tensor | None,
    parts: Sequence[Tensor],
    dout: Tensor,
    dlse: Tensor,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of sinks and parts as functions that can be differentiated again."""
    # views: a tensor can be given twice, and autograd will add its gradients
    sinks, parts = None if sinks is None else sinks.view_as(sinks), [t.view_as(t) for t in parts]
    merged = _plain(parts, sinks)
    return differentiable_grads(merged, (sinks, *parts), needed, (dout, dlse))
