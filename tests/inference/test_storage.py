"""The memory of a cache: each rank's share of it, made once where there is a capacity."""

import random
from collections.abc import Callable

import pytest
import torch

from ring_attention_pytorch import RingCache, ring_attn_with_cache
from ring_attention_pytorch.ranks.ring import Ring


@pytest.mark.parametrize("seed", range(4))
def test_with_a_capacity_memory_is_never_made_anew(seed: int) -> None:
    """Graphs use it; and growing copies all of it."""
    draw = random.Random(seed)
    cache = RingCache(3, 2, 4, capacity=12, page=2)
    keys = cache.keys[0]
    for _ in range(40):
        if draw.random() < 0.5:
            cache.reorder([draw.randrange(3) for _ in range(3)])
        else:
            cache.rollback([draw.randint(0, length) for length in cache.lengths])
        if max(cache.lengths) < 12:
            q = torch.randn(3, 1, 2, 4)
            ring_attn_with_cache(q, q, q, cache)
    assert cache.keys[0] is keys


def test_memory_is_a_share_and_grows_by_pages() -> None:
    cache = RingCache(1, 2, 8, value_dim=4, page=4)
    assert cache.nbytes == 0
    k, v = torch.ones(1, 9, 2, 8), torch.ones(1, 9, 2, 4)
    cache.append(k, v)
    assert cache.nbytes == 3 * 4 * 2 * (8 + 4) * 4


def test_8_bits_take_half_the_memory_of_16() -> None:
    sizes = dict(capacity=64, group=Ring.alone())
    kept, whole = (
        RingCache(1, 2, 128, dtype=dtype, **sizes).nbytes
        for dtype in (torch.float8_e4m3fn, torch.bfloat16)
    )
    assert kept == whole / 2 + 64 * 2 * 2 * 4  # a scale for each token and head


def shares() -> tuple[int, int]:
    cache = RingCache(1, 2, 8, layers=3, capacity=64, page=4)
    return cache.nbytes, cache.capacity


def test_each_rank_has_its_share_of_the_memory(pools: Callable) -> None:
    for nbytes, capacity in pools(4).run(shares):
        assert capacity == 64
        assert nbytes == 3 * 16 * 2 * 16 * 4
