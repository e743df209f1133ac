"""flash-attn 4 (`flash_attn.cute`), if it is installed: the fastest on Hopper and later.

It has windows, softcap, the gradient of lse, a deterministic backward and calls with many
sequences. Its diagonals count from the bottom right. It is compiled on the first use of each shape
class.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ring_attention_pytorch.geometry.tiles import Tile
from ring_attention_pytorch.kernels._flash import NO_BOUND, lane, part
from ring_attention_pytorch.kernels._varlen import VarlenCall, packs
from ring_attention_pytorch.runtime.accumulate import OutputAccumulator
from ring_attention_pytorch.runtime.interfaces import (
    FEATURES,
    Capabilities,
    Dependency,
    Grads,
    KVBlock,
    Residuals,
    ScoreMods,
    Traits,
)
from ring_attention_pytorch.runtime.tape import opaque, recording

CAN = Capabilities(
    devices=("cuda",),
    dtypes=(torch.bfloat16, torch.float16),
    min_capability=(9, 0),
    max_capability=(11, 9),
    # right against float64 on an H200; 16, 80 and 112 silently get wrong gradients, 192/128 and
    # 128/64 have none for grouped heads, and at 256 cuDNN is faster
    head_dims=(64, 96, 128, 192),
    unequal_head_dims=(),
    varlen=True,
    traits=Traits(preemptible=True, taped=True),
    features=FEATURES - {"key_mask", "unusual_scale", "alibi", "mask_mod", "dropout"},
    package=Dependency("flash-attn-4", "flash_attn.cute.interface", "4.0.0b36"),
)


def forward(
    q: Tensor, keys: KVBlock, tiles: Sequence[Tile], terms: ScoreMods, result: OutputAccumulator
) -> None:
    for pack in packs(tiles, q, disjoint_keys=False) if q.numel() else ():
        room = pack.blank_rows(result)
        with lane(tiles, keys, *room.values()):
            out, lse = _attend(
                *pack.flat(part(q, pack.rows), part(keys.k, pack.cols), part(keys.v, pack.cols)),
                softmax_scale=terms.scale, softcap=terms.softclamp, return_lse=True,
                **room, **_window(pack), **pack.sequences,
            )  # fmt: skip
            out, lse = pack.of_rows(out, len(q)), pack.of_lse(lse, len(q))
        result.add(pack.rows, out, lse)


def backward(
    saved: Residuals, keys: KVBlock, tiles: Sequence[Tile], terms: ScoreMods, grads: Grads
) -> None:
    for pack in packs(tiles, saved.q, disjoint_keys=True) if saved.q.numel() else ():
        rows, cols, batch = pack.rows, pack.cols, len(saved.q)
        room = dict(
            dq=pack.alloc(grads.dq, rows),
            dk=pack.alloc(grads.dk, cols),
            dv=pack.alloc(grads.dv, cols),
        )
        with lane(tiles, keys, *room.values()):
            dq, dk, dv = _differentiate(
                *pack.flat(
                    part(saved.q, rows), part(keys.k, cols), part(keys.v, cols),
                    part(saved.out, rows), part(saved.dout, rows),
                ),
                pack.flat_by_head(saved.lse[..., rows]), softmax_scale=terms.scale,
                softcap=terms.softclamp or 0.0,
                deterministic=torch.are_deterministic_algorithms_enabled(),
                dlse=None if saved.dlse is None else pack.flat_by_head(saved.dlse[..., rows]),
                **room, **_window(pack), **pack.sequences,
            )  # fmt: skip
            dq = pack.of_rows(dq, batch)
            dk, dv = pack.of_cols(dk, batch), pack.of_cols(dv, batch)
        for total, at, t in zip(grads, (rows, cols, cols), (dq, dk, dv)):
            total.add(at, t)


def _attend(*operands: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_fwd

    with _seen_by_tapes():
        return _flash_attn_fwd(*operands, **how)[:2]


def _differentiate(*operands: Tensor, **how: Any) -> tuple[Tensor, Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_bwd

    with _seen_by_tapes():
        return _flash_attn_bwd(*operands, **how)[:3]


class _Compiled:
    """A cache of compiled functions, where each one is an operation for tapes."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def __contains__(self, key: Hashable) -> bool:
        return key in self.cache

    def __setitem__(self, key: Hashable, function: Callable[..., None]) -> None:
        self.cache[key] = function

    def __getitem__(self, key: Hashable) -> Callable[..., None]:
        return opaque(self.cache[key])


@contextmanager
def _seen_by_tapes() -> Iterator[None]:
    """Make the package's launches visible to a tape, which replays them without its Python.

    That Python computes a cache key in each call, and reads the environment. Every function of the
    package that compiles has a cache, which is wrapped in this block.
    """
    if not recording():
        yield
        return
    from flash_attn.cute import interface

    owners = [each for each in vars(interface).values() if hasattr(each, "compile_cache")]
    caches = [owner.compile_cache for owner in owners]
    try:
        for owner, cache in zip(owners, caches):
            owner.compile_cache = _Compiled(cache)
        yield
    finally:
        for owner, cache in zip(owners, caches):
            owner.compile_cache = cache


def _window(pack: VarlenCall) -> dict[str, int | bool | None]:
    left, right = (None if x == NO_BOUND else x for x in (pack.left, pack.right))
    if (left, right) == (None, 0):
        return dict(causal=True)
    return dict(window_size_left=left, window_size_right=right)
