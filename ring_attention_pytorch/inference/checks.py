"""Checks of the arguments of attention to a cache: each raises ValueError."""

import os
from math import inf, isfinite

import torch
from torch import Tensor

from ring_attention_pytorch.inference.cache import RingCache
from ring_attention_pytorch.inference.partial import Scores
from ring_attention_pytorch.runtime.rowwise import has_triton
from ring_attention_pytorch.runtime.scores import check_per_head
from ring_attention_pytorch.tensor_kinds import check_plain


def triton_refusal(cache: RingCache, dtype: torch.dtype) -> str | None:
    """Return why the Triton kernel can't attend to this cache, or None if it can."""
    if not has_triton():
        return "kernel='triton' needs the package triton, which is not installed"
    if cache.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"kernel='triton' runs on CUDA, the cache is on {cache.device}"
    if dtype == torch.float64:
        return "kernel='triton' has no float64"
    return None


def check_options(scores: Scores, kernel: str | None, check: str | None) -> None:
    """Raise ValueError if an option is out of range."""
    if scores.window is not None and scores.window < 0:
        raise ValueError(f"window must not be negative, got {scores.window}")
    if scores.window is not None and scores.window >= 1 << 62:
        raise ValueError(f"window must be less than 2 ** 62, got {scores.window}; None sees all")
    if not isfinite(scores.scale):
        raise ValueError(f"scale must be finite, got {scores.scale}")
    if scores.softclamp is not None and not 0 < scores.softclamp < inf:
        raise ValueError(f"softclamp must be None, or positive and finite, got {scores.softclamp}")
    if check not in (None, "always"):
        raise ValueError(f"check must be None or 'always', got {check!r}")
    if kernel not in (None, "triton", "eager"):
        raise ValueError(f"kernel must be None, 'triton' or 'eager', got {kernel!r}")


def check_call(
    given: tuple[Tensor | None, ...], cache: RingCache, layer: int, some: bool = True
) -> None:
    """Raise ValueError if q, k, v, sinks and slopes don't fit each other and this cache.

    With `some` there must be at least one token.
    """
    q, k, v, sinks, slopes = given
    assert q is not None
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t is not None:
            check_plain(name, t)
    if (k is None) != (v is None):
        raise ValueError(
            "k and v must be given together; without them the cache must have them already"
        )
    if q.ndim != 4 or q.shape[0] != cache.sequences or q.shape[3] != cache.head_dim:
        raise ValueError(f"q must be [{cache.sequences}, n, h, {cache.head_dim}], got {[*q.shape]}")
    if some and not q.shape[1]:
        raise ValueError("q must have a token")
    if not q.shape[2] or q.shape[2] % cache.key_heads:
        raise ValueError(f"heads of q must be a multiple of {cache.key_heads}, got {q.shape[2]}")
    if q.dtype not in cache.dtypes or q.device != cache.device:
        raise ValueError(f"q must be {cache.takes}, as the cache is, got {q.dtype} on {q.device}")
    if k is not None and v is not None:
        cache.check_new(k, v, layer)
        if (k.dtype, k.shape[1]) != (q.dtype, q.shape[1]):
            raise ValueError(
                f"q and k must be of the same tokens and dtype, got {q.shape[1]} in {q.dtype} and "
                f"{k.shape[1]} in {k.dtype}"
            )
    else:
        cache.check_layer(layer)
    check_per_head("sinks", q, sinks)
    check_per_head("alibi_slopes", q, slopes)
