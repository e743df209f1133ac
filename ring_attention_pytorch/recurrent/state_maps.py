"""The maps of runs and the gradients of states before them, from the chunks of fla's kernels."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ring_attention_pytorch.recurrent.chunks import CHUNK, Chunks
from ring_attention_pytorch.runtime.launches import launch_alike, power_of_2
from ring_attention_pytorch.runtime.processors import Processors

# by the columns of a program; measured on an H200
_MAPS = {128: dict(num_warps=4, num_stages=2), 64: dict(num_warps=4, num_stages=2)}
_ADJOINTS = {128: dict(num_warps=8, num_stages=2), 64: dict(num_warps=4, num_stages=2)}
_ROOM = 192 << 10  # bytes of shared memory, as Hopper has, for 128 columns


def store_maps(work: Chunks, spans: Tensor, maps: Tensor) -> None:
    """Store the maps of runs, float32 `[runs, h, d_k, d_v + d_k]`: U beside M.

    Args:
        work: the chunks of all runs.
        spans: int64 `[runs, 2]`, first tokens and ends of the runs whose maps are needed.
        maps: where they are stored.
    """
    from ring_attention_pytorch.recurrent._triton_state_maps import maps_kernel

    if len(spans):
        _launch(maps_kernel, work, _MAPS, maps.shape[3], len(spans),
                work.k, work.w, work.u, work.g, spans, maps)  # fmt: skip


def gradients_of(work: Chunks, do: Tensor, dv: Tensor, spans: Tensor, scale: float) -> Tensor:
    """Return the gradients of states before runs, of their own outputs, `[runs, h, d_k, d_v]`.

    Args:
        work: the chunks of all runs.
        do: of outputs; dv: of values by their own chunks' outputs, both `[1, n, h, d_v]`.
        spans: int64 `[runs, 2]`, first tokens and ends.
        scale: of queries.
    """
    from ring_attention_pytorch.recurrent._triton_state_maps import adjoint_kernel

    d_k, heads, d_v = work.w.shape[3], *work.u.shape[2:]
    grads = work.w.new_empty(len(spans), heads, d_k, d_v, dtype=torch.float32)
    if len(spans):
        _launch(adjoint_kernel, work, _ADJOINTS, d_v, len(spans),
                work.q, work.k, work.w, do, dv, work.g, spans, grads, scale)  # fmt: skip
    return grads


def _launch(
    kernel: Any, work: Chunks, by_width: dict[int, dict[str, int]], columns: int, runs: int,
    *args: Any,
) -> None:  # fmt: skip
    d_k, heads, d_v = work.w.shape[3], *work.u.shape[2:]
    width = _width(d_v, work.w.device)
    blocks = -(-d_v // width) + (-(-d_k // width) if columns > d_v else 0)
    launch_alike(
        kernel, blocks * heads * runs, *args,
        HEADS=heads, KEY_HEADS=work.k.shape[2], K=d_k, V=d_v, CHUNK=CHUNK,
        BK=power_of_2(d_k), BV=width, **by_width[width], CHANNELS=work.g.ndim == 4,
    )  # fmt: skip


@lru_cache
def _width(d_v: int, device: torch.device) -> int:
    """Return the columns of a state that a program follows."""
    return 128 if d_v > 64 and Processors.of(device).shared >= _ROOM else 64
