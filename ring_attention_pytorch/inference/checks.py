"""What can't be asked of attention to a cache: each says what is wrong, and None if nothing is."""

import os
from math import inf, isfinite

import torch
from torch import Tensor

from ring_attention_pytorch.inference.cache import RingCache
from ring_attention_pytorch.inference.partial import Scores
from ring_attention_pytorch.runtime.rowwise import has_triton
from ring_attention_pytorch.tensor_kinds import dtensor_problem


def triton_problem(cache: RingCache, dtype: torch.dtype) -> str | None:
    """Say why our kernel can't attend to this cache; None if it can."""
    if not has_triton():
        return "kernel='triton' needs the package triton, which is not installed"
    if cache.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"kernel='triton' runs on CUDA, the cache is on {cache.device}"
    if dtype == torch.float64:
        return "kernel='triton' has no float64"
    return None


def option_problem(scores: Scores, kernel: str | None, check: str | None) -> str | None:
    """Say which option can't be; None if all can."""
    if scores.window is not None and scores.window < 0:
        return f"window must not be negative, got {scores.window}"
    if not isfinite(scores.scale):
        return f"scale must be finite, got {scores.scale}"
    if scores.softclamp is not None and not 0 < scores.softclamp < inf:
        return f"softclamp must be None, or positive and finite, got {scores.softclamp}"
    if check not in (None, "always"):
        return f"check must be None or 'always', got {check!r}"
    if kernel not in (None, "triton", "eager"):
        return f"kernel must be None, 'triton' or 'eager', got {kernel!r}"
    return None


def call_problem(
    given: tuple[Tensor | None, ...], cache: RingCache, layer: int, some: bool = True
) -> str | None:
    """Say what is wrong with q, k, v, sinks and slopes, for this cache; None if nothing.

    With `some` there must be a token.
    """
    q, k, v, sinks, slopes = given
    assert q is not None
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t is not None and (problem := dtensor_problem(name, t)):
            return problem
    if (k is None) != (v is None):
        return "k and v must be given together; without them the cache must have them already"
    if q.ndim != 4 or q.shape[0] != cache.sequences or q.shape[3] != cache.head_dim:
        return f"q must be [{cache.sequences}, n, h, {cache.head_dim}], got {[*q.shape]}"
    if some and not q.shape[1]:
        return "q must have a token"
    if not q.shape[2] or q.shape[2] % cache.key_heads:
        return f"heads of q must be a multiple of {cache.key_heads}, got {q.shape[2]}"
    if q.dtype not in cache.dtypes or q.device != cache.device:
        return f"q must be {cache.takes}, as the cache is, got {q.dtype} on {q.device}"
    if k is not None and v is not None:
        if (problem := cache.problem(k, v, layer)) is not None:
            return problem
        if (k.dtype, k.shape[1]) != (q.dtype, q.shape[1]):
            return (
                f"q and k must be of the same tokens and dtype, got {q.shape[1]} in {q.dtype} and "
                f"{k.shape[1]} in {k.dtype}"
            )
    elif not 0 <= layer < cache.layers:
        return f"layer must be from 0 to {cache.layers - 1}, got {layer}"
    return _term_problem(q, "sinks", sinks) or _term_problem(q, "alibi_slopes", slopes)


def _term_problem(q: Tensor, name: str, t: Tensor | None) -> str | None:
    if t is None or (t.shape == q.shape[2:3] and t.device == q.device):
        return None
    return f"{name} must be [{q.shape[2]}] on {q.device}, got {[*t.shape]} on {t.device}"
