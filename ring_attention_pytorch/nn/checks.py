"""Checks of the options and tensors that an attention layer is given."""

import math

from torch import Tensor

from ring_attention_pytorch.kernels import KERNELS


def shape_problem(
    dim: int, dim_head: int, heads: int, num_grouped_query_heads: int, bucket_size: int
) -> str | None:
    """Say what is wrong with a layer's sizes; None if nothing."""
    if num_grouped_query_heads < 1 or heads % num_grouped_query_heads != 0:
        return f"num_grouped_query_heads must divide heads={heads}, got {num_grouped_query_heads}"
    if min(dim, dim_head, bucket_size) < 1:
        got = f"{dim}, {dim_head} and {bucket_size}"
        return f"dim, dim_head and bucket_size must be at least 1, got {got}"
    return None


def kernel_problem(
    kernel: str | None, use_cuda_kernel: bool | None, regular: bool, dropout: float
) -> str | None:
    """Say what is wrong with a kernel, of regular attention or of ours; None if nothing."""
    if kernel not in (None, *KERNELS):
        return f"kernel must be None or one of {list(KERNELS)}, got {kernel!r}"
    if use_cuda_kernel and kernel not in (None, "triton"):
        return f"use_cuda_kernel=True is kernel='triton', got kernel={kernel!r}; leave one out"
    kernel = "triton" if use_cuda_kernel else kernel
    if regular and (kernel is not None or dropout > 0):
        return f"force_regular_attn uses no kernel and no dropout, got {kernel!r} and {dropout}"
    return None


def scores_problem(lookback: int | None, softclamp: float | None) -> str | None:
    """Say what is wrong with the scores that a layer asks for; None if nothing."""
    if lookback is not None and lookback < 0:
        return f"max_lookback_seq_len must be None or at least 0, got {lookback}"
    if softclamp is not None and not 0 < softclamp < math.inf:
        return f"softclamp must be None or positive, got {softclamp}"
    return None


def unused_problem(eps: float, restart_alone: bool) -> str | None:
    """Say which option would have no effect; None if none."""
    if eps != 1e-10:
        return f"eps has no effect, results are normalised exactly; got {eps}"
    if restart_alone:
        return "rotary_restart needs rotary_embed=True: there is nothing to restart"
    return None


def tokens_problem(name: str, x: Tensor, dim: int) -> str | None:
    """Say what is wrong with tokens `[b, n, dim]`; None if nothing."""
    if x.ndim != 3 or x.shape[2] != dim:
        return f"{name} must be [batch, tokens, {dim}], got {list(x.shape)}"
    if x.is_meta or not x.is_floating_point():
        return f"{name} must be floating and have values, got {x.dtype} on {x.device}"
    return None


def angles_problem(x: Tensor, angles: Tensor, dim_head: int, by_sample: bool) -> str | None:
    """Say what is wrong with the rotary angles of tokens x, or of each sample; None if nothing."""
    shape, want = list(angles.shape), [x.shape[1], dim_head]
    if shape != want and not (by_sample and shape == [x.shape[0], *want]):
        return f"rotary_emb must be {want}, got {shape}"
    if angles.device != x.device:
        return f"rotary_emb must be on {x.device} as x is, got {angles.device}"
    return None
