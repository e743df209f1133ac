"""Linear recurrences of runs by the kernels of flash-linear-attention (package fla-core).

Its chunked kernels are called unmodified, once, on all runs of a rank as sequences of their own.
They are for CUDA and 16 bits; states are float32. fla refuses its gated delta rule's backward where
Triton compiles it wrongly: from 3.4 to before 3.7.1 on Hopper. There its kernels of KDA compute the
same, with a head's gate for each channel.
"""

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import threshold

from ring_attention_pytorch.recurrent.eager import without_tokens

_16_BITS = (torch.bfloat16, torch.float16)
_MOST = 256  # the largest d_k of its kernels
_SMALLEST = -50.0  # of a gate's logarithm: exp of it is 2e-22


def fla_refusal(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Return why these kernels can't compute a call; None if they can."""
    if not _installed("fla"):
        return "package fla-core is not installed"
    if {q.dtype, k.dtype, v.dtype} - {*_16_BITS} or len({q.dtype, k.dtype, v.dtype}) > 1:
        return f"fla's kernels need one dtype of 16 bits, got {q.dtype}, {k.dtype}, {v.dtype}"
    if q.device.type != "cuda":
        return f"fla's kernels need CUDA, got {q.device}"
    if k.shape[-1] > _MOST:
        return f"fla's kernels need keys of at most {_MOST}, got {k.shape[-1]}"
    return None


def borders_of(spans: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """Return the borders of runs that follow one another, int64 `[runs + 1]`.

    >>> borders_of([(0, 2), (2, 3)], torch.device("cpu")).tolist()
    [0, 2, 5]
    """
    return torch.tensor([0, *(first + length for first, length in spans)], device=device)


def fla_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial: Tensor,
    borders: Tensor,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Return the outputs of all tokens, and the state after each run, as `eager.recurrence`.

    Args:
        q, k: `[n, h_k, d_k]`, of 16 bits; v: `[n, h, d_v]`.
        g: float32 logarithms of gates, `[n, h]` or, for KDA, `[n, h, d_k]`.
        beta: `[n, h]`.
        initial: float32 `[runs, h, d_k, d_v]`.
        borders: from `borders_of`.
        options: of fla's functions: `scale`, `use_qk_l2norm_in_kernel`.
    """
    if not len(v):
        return without_tokens(initial, q, k, v, g, beta)
    g = for_kernels(g, k.shape[-1], q, k, v, g, beta, initial)
    if g.ndim == 3:
        from fla.ops.kda import chunk_kda as chunked
    else:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as chunked
    out, state = chunked(
        *(t[None].contiguous() for t in (q, k, v, g, beta)),
        initial_state=initial.contiguous(), output_final_state=True, cu_seqlens=borders, **options,
    )  # fmt: skip
    return out[0], state


def finite(g: Tensor) -> Tensor:
    """Return logarithms of gates, none infinite: differences of these would be NaN. NaN stays.

    The smallest gate is 0 in a float32 sum. The gradient is one kernel; that of `clamp` is three.

    >>> finite(torch.tensor([-torch.inf, -1.0, torch.nan])).tolist()
    [-50.0, -1.0, nan]
    """
    return threshold(g, _SMALLEST, _SMALLEST)


def for_kernels(g: Tensor, d_k: int, *leading: Tensor | None) -> Tensor:
    """Return gates that fla's kernels accept: one for each channel if they refuse a head's.

    >>> for_kernels(torch.tensor([[-torch.inf, -1.0]]), 4).tolist()
    [[-50.0, -1.0]]
    """
    g = finite(g)
    if g.ndim == 2 and backward_refused(*leading):
        g = g[..., None].expand(*g.shape, d_k)
    return g


def backward_refused(*leading: Tensor | None) -> bool:
    """Return whether fla refuses the backward of its gated delta rule with this Triton and GPU.

    The condition is fla 0.6's own, by its own names, which another version may lack. If tensors are
    given, False unless one of them needs a gradient.
    """
    needed = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in leading)
    if leading and not needed:
        return False
    try:
        from fla.ops.common import chunk_o
    except ImportError:
        return False
    names = "IS_NVIDIA_HOPPER", "TRITON_ABOVE_3_4_0", "TRITON_ABOVE_3_7_1"
    hopper, since, until = (getattr(chunk_o, name, False) for name in names)
    return bool(hopper and since and not until) and not _installed("tilelang")


@cache
def _installed(package: str) -> bool:
    """Return whether Python finds a package, which takes it long if it does not."""
    return find_spec(package) is not None
