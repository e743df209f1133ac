"""Our own flash attention in Triton: NVIDIA GPUs from Ampere on, no extension to build or install.

A block takes one launch forward, for any number of tiles, which also merges into the running out
and lse. Backward takes two launches: the second begins on multiprocessors that the first leaves
idle, if no other launch is in between. For head sizes above 256 it takes three, because dk and dv
together don't fit into the registers. The kernels are in `_triton_*.py`, which only the functions
here import: Triton is optional. With TRITON_INTERPRET=1 they run on the CPU, slowly, for tests.
"""

import math
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ring_attention_pytorch.geometry.tiles import visible_pairs
from ring_attention_pytorch.kernels._configs import (
    Config,
    apart,
    config_for,
    is_overridden,
)
from ring_attention_pytorch.kernels._descriptors import in_blocks, operands, tma_fits
from ring_attention_pytorch.kernels._job import Job, Rows, opened
from ring_attention_pytorch.kernels._tile_table import tile_table
from ring_attention_pytorch.runtime.accumulate import Deferred, OutputAccumulator
from ring_attention_pytorch.runtime.interfaces import (
    FEATURES,
    Capabilities,
    Dependency,
    Grads,
    KVBlock,
    Residuals,
    ScoreMods,
    Tiles,
    Traits,
)
from ring_attention_pytorch.runtime.launches import (
    KernelCall,
    can_begin_early,
    compile_ahead,
    compiled_ahead,
    power_of_2,
)

_WIDEST = 512
CAN = Capabilities(
    devices=("cuda", "interpreter"),
    dtypes=(torch.bfloat16, torch.float16, torch.float32),
    min_capability=(8, 0),
    max_head_dim=_WIDEST,
    varlen=True,
    traits=Traits(fuses_merge=True, keys_first=True, taped=True),
    features=FEATURES - {"mask_mod"},
    package=Dependency("triton", "triton", "3.4"),
)
_FULL = 256  # programs that fill a large GPU twice
# cases for which backward's two kernels were compiled together; other specializations, such as for
# a mask, are compiled one after the other, on first use
_compiled: set[Hashable] = set()


def forward(
    q: Tensor, keys: KVBlock, tiles: Tiles, terms: ScoreMods, result: OutputAccumulator
) -> None:
    if tiles:
        _forward(Job(tiles, terms), q, keys.k, keys.v, _mask(keys), *result.update_memory())


@compiled_ahead
def _forward(job: Job, q: Tensor, *tensors: Tensor | Any) -> KernelCall:
    """Return the forward call for tensors (k, v, byte mask, before, out, lse)."""
    from ring_attention_pytorch.kernels._triton_forward import forward_kernel

    tiles, terms, keys, (before, out, lse) = opened(job, tensors)
    (b, n, h, d), (_, m, h_kv, d_v) = q.shape, keys.v.shape
    config = _config("forward", q, keys, tiles)
    table = tile_table(tiles, "rows", config.tokens, q, every=before is not out)
    options = _options(config, terms, keys, (q, keys.k, keys.v, out))
    q_, k, v = operands(
        options["TMA"],
        *in_blocks(config.rows, q, pack=config.pack),
        *in_blocks(config.cols, keys.k, keys.v),
    )
    args = [
        q_, k, v, keys.key_mask, *_places(tiles, terms), *_draws(tiles, terms),
        before, out, lse,  # results
        # the table of tiles
        *table[:3], _packs_at_once(table.count, b * h_kv, h // h_kv // config.pack),
        n, m, h, h // h_kv, d, d_v, *_factors(terms),  # sizes and factors
        # strides
        q.stride(), keys.k.stride(), keys.v.stride(), *_mask_strides(keys), out.stride(),
        *lse.stride(),
    ]  # fmt: skip
    forks = dict(FRESH=before is None, MOVES=before is not out, STEPPED=table.stepped)
    constants = {**forks, **options}
    return KernelCall(forward_kernel, b * h // config.pack * table.count, args, constants)


def backward(saved: Residuals, keys: KVBlock, tiles: Tiles, terms: ScoreMods, grads: Grads) -> None:
    if not tiles:
        return
    job, given = Job(tiles, terms), (*Rows.of(saved), keys.k, keys.v, _mask(keys))
    of_keys = *grads.dk.update_memory(), *grads.dv.update_memory()
    of_queries = grads.dq.update_memory()
    wide = apart(max(saved.q.shape[-1], keys.v.shape[-1]))
    of_both = (_backward_to_keys, _backward_to_values) if wide else (_backward_of_keys,)

    def make_dq() -> None:
        _backward_of_queries(job, *given, *of_queries)

    def run(deferred: Deferred | None = None) -> None:
        for make in of_both:
            make(job, *given, *of_keys)
        if deferred is None:
            make_dq()
        else:
            deferred.append(make_dq)

    kind = saved.q.device, saved.q.dtype, saved.q.shape[2:], keys.v.shape[2:]
    if saved.q.is_cuda and kind not in _compiled and compile_ahead(run):
        _compiled.add(kind)
    run(grads.dq.deferred)


@compiled_ahead
def _backward_of_keys(job: Job, *tensors: Tensor | Any) -> KernelCall:
    """Return the call for tensors (*`Rows`, k, v, byte mask, before, dk, before_v, dv)."""
    return _keys_call("keys", job, tensors)


@compiled_ahead
def _backward_to_keys(job: Job, *tensors: Tensor | Any) -> KernelCall:
    """Return the call that makes dk only, for the same tensors."""
    return _keys_call("dk", job, tensors)


@compiled_ahead
def _backward_to_values(job: Job, *tensors: Tensor | Any) -> KernelCall:
    """Return the call that makes dv only, for the same tensors."""
    return _keys_call("dv", job, tensors)


def _keys_call(direction: str, job: Job, tensors: Sequence[Tensor | Any]) -> KernelCall:
    """Return the call for dk and dv ("keys"), or for one of them ("dk" or "dv")."""
    from ring_attention_pytorch.kernels._triton_backward_keys import keys_kernel

    saved, tensors = Rows(*tensors[:4]), tensors[4:]
    tiles, terms, keys, (before, dk, before_v, dv) = opened(job, tensors)
    (b, _, h, d), (_, m, h_kv, d_v) = saved.q.shape, keys.v.shape
    config = _config(direction, saved.q, keys, tiles)
    every = before is not dk or before_v is not dv
    table = tile_table(tiles, "cols", config.cols, keys.k, every)
    inputs = (saved.q, keys.k, keys.v, saved.dout, saved.lse, saved.delta)
    options = _options(config, terms, keys, inputs, (dk, dv))
    q, dout, k, v, lse, delta = operands(
        options["TMA"],
        *in_blocks(config.rows, saved.q, saved.dout, pack=config.pack),
        *in_blocks(config.cols, keys.k, keys.v),
        *in_blocks(config.rows, saved.lse, saved.delta, pack=config.pack),
    )
    args = [
        q, k, v, keys.key_mask, *_places(tiles, terms), *_draws(tiles, terms),
        dout, lse, delta, before, dk, before_v, dv,  # residuals and results
        *table[:3], _packs_at_once(table.count, b * h_kv),  # the table of tiles
        m, h_kv, h // h_kv, d, d_v, *_factors(terms), terms.scale,  # sizes and factors
        *_strides_read(saved, keys), dk.stride(), dv.stride(),  # strides
    ]  # fmt: skip
    early = can_begin_early(saved.q.device)
    forks = dict(FRESH=before is None, FRESH_V=before_v is None, STEPPED=table.stepped)
    forks |= dict(OF_K=direction != "dv", OF_V=direction != "dk", EARLY=early)
    constants = {**forks, **options}
    return KernelCall(keys_kernel, b * h_kv * table.count, args, constants)


@compiled_ahead
def _backward_of_queries(job: Job, *tensors: Tensor | Any) -> KernelCall:
    """Return the call for tensors (*`Rows`, k, v, byte mask, before, dq)."""
    from ring_attention_pytorch.kernels._triton_backward_queries import queries_kernel

    saved, tensors = Rows(*tensors[:4]), tensors[4:]
    tiles, terms, keys, (before, dq) = opened(job, tensors)
    (b, n, h, d), (_, m, h_kv, d_v) = saved.q.shape, keys.v.shape
    config = _config("queries", saved.q, keys, tiles)
    table = tile_table(tiles, "rows", config.tokens, saved.q, every=before is not dq)
    options = _options(config, terms, keys, (saved.q, keys.k, keys.v, saved.dout), (dq,))
    q, dout, k, v = operands(
        options["TMA"],
        *in_blocks(config.rows, saved.q, saved.dout, pack=config.pack),
        *in_blocks(config.cols, keys.k, keys.v),
    )
    args = [
        q, k, v, keys.key_mask, *_places(tiles, terms), *_draws(tiles, terms),
        dout, saved.lse, saved.delta, before, dq,  # residuals and results
        # the table of tiles
        *table[:3], _packs_at_once(table.count, b * h_kv, h // h_kv // config.pack),
        n, m, h, h // h_kv, d, d_v, *_factors(terms), terms.scale,  # sizes and factors
        *_strides_read(saved, keys), dq.stride(),  # strides
    ]  # fmt: skip
    early = can_begin_early(saved.q.device)
    constants = dict(FRESH=before is None, EARLY=early, STEPPED=table.stepped, **options)
    if early:  # the keys' kernel runs between this one and the writers of its inputs
        constants["launch_pdl"] = True
    return KernelCall(queries_kernel, b * h // config.pack * table.count, args, constants)


def _config(direction: str, q: Tensor, keys: KVBlock, tiles: Tiles) -> Config:
    def make() -> Config:
        capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else None
        rows = max(t.rows.stop for t in tiles) - min(t.rows.start for t in tiles)
        sizes, seen = (q.shape[-1], keys.v.shape[-1]), visible_pairs(tiles) / rows
        group = q.shape[2] // keys.v.shape[2]
        return config_for(direction, sizes, q.dtype, capability, seen, rows, group)

    if is_overridden(direction) or not isinstance(tiles, Tiles):
        return make()
    shapes = q.shape[2:], keys.v.shape[2:]
    return tiles.once((direction, *shapes, q.dtype, q.device), make)


def _options(
    config: Config,
    terms: ScoreMods,
    keys: KVBlock,
    moved: Sequence[Tensor],
    written: Sequence[Tensor] = (),
) -> dict[str, Any]:
    """Return a kernel's compile-time constants; `moved` are the tensors that it reads in blocks."""
    q, d, d_v = moved[0], keys.k.shape[-1], keys.v.shape[-1]
    exact = not q.is_cuda or torch.get_float32_matmul_precision() == "highest"
    block, last_head = max(config.rows, config.cols, _WIDEST), config.pack - 1
    wide = False
    for t in (*moved, *written):
        if t.ndim == 4 and block * (t.stride(1) + t.stride(3)) + last_head * t.stride(2) >= 2**31:
            wide = True
    return dict(
        ROWS=config.rows, COLS=config.cols, PACK=config.pack, D=power_of_2(d), D_V=power_of_2(d_v),
        EVEN=d == power_of_2(d), EVEN_V=d_v == power_of_2(d_v), MASK=keys.key_mask is not None,
        CLAMP=terms.softclamp is not None, NEGATE=terms.scale < 0, ALIBI=terms.alibi is not None,
        DROPS=terms.dropout is not None, PRECISION="ieee" if exact else "tf32",
        TMA=config.tma and tma_fits(moved), WIDE=wide, num_warps=config.warps,
        num_stages=config.stages,
    )  # fmt: skip


def _packs_at_once(blocks: int, key_heads: int, packs: int = 1) -> int:
    """Return how many packs run at once: few, so that their inputs stay in the cache.

    They must fill a large GPU twice, because the longest blocks are first only within a turn. Turns
    have nearly equal numbers of heads: a short last one would leave long blocks for the end, while
    most of the GPU idles. With turns of 3, 3 and 2 heads dk and dv of 2048 tokens took rank 2 of 4
    491 us, and rank 0, with equally many pairs, 420.

    Args:
        blocks: blocks per pack.
        key_heads: key heads, over all samples.
        packs: packs per key head; they read the same keys and run at once.

    >>> _packs_at_once(blocks=48, key_heads=8), _packs_at_once(blocks=96, key_heads=8)
    (8, 4)
    >>> _packs_at_once(blocks=64, key_heads=11), _packs_at_once(blocks=64, key_heads=8, packs=4)
    (6, 4)
    """
    key_heads = max(1, key_heads)
    least = min(key_heads, -(-_FULL // (packs * blocks)))
    sizes = range(least, min(key_heads, 2 * least) + 1)
    return packs * min(sizes, key=lambda size: -key_heads % size / size)  # missing in the last


def _factors(terms: ScoreMods) -> tuple[float, float]:
    """Return the factor of tanh's argument, and the factor of its result.

    The second one converts the result to a score in base 2. Without softclamp there is no tanh.
    """
    scale = max(abs(terms.scale), 1e-35)  # 0 times the -inf of a hidden score would be NaN
    if terms.softclamp is None:
        return 1.0, scale * math.log2(math.e)
    return scale / terms.softclamp, terms.softclamp * math.log2(math.e)


def _places(tiles: Tiles, terms: ScoreMods) -> tuple[Tensor | None, ...]:
    """Return ALiBi's slopes, and the positions of queries and keys; None without ALiBi."""
    if terms.alibi is None:
        return None, None, None
    return terms.alibi, tiles.rows_at, tiles.cols_at


def _draws(
    tiles: Tiles, terms: ScoreMods
) -> tuple[Tensor | None, Tensor | None, int, int, int, float, int, int]:
    """Return dropout's arguments of a kernel: numbers for its draws, and the kept ones' factor."""
    dropout = terms.dropout
    if dropout is None:
        return None, None, 0, 0, 0, 1.0, 0, 0
    numbers = tiles.row_numbers, tiles.col_numbers, *dropout.numbers
    return *numbers, dropout.inverse, tiles.first, dropout.first_head


def _mask(keys: KVBlock) -> Tensor | None:
    """Return the mask as bytes."""
    return None if keys.key_mask is None else keys.key_mask.view(torch.uint8)


def _strides_read(saved: Rows, keys: KVBlock) -> tuple[Any, ...]:
    """Return the strides of backward's inputs, in the order of both kernels' parameters."""
    return (
        *(t.stride() for t in (saved.q, keys.k, keys.v)),
        *_mask_strides(keys),
        saved.dout.stride(),
        *saved.lse.stride(),
        *saved.delta.stride(),
    )


def _mask_strides(keys: KVBlock) -> tuple[int, ...]:
    return (0, 0) if keys.key_mask is None else keys.key_mask.stride()
