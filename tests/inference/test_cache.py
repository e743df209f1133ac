"""A cache over ranks: what it refuses, before anything is written, and when it is gone."""

import copy
import gc
from collections.abc import Callable
from weakref import ref

import pytest
import torch
import torch.distributed as dist

from ring_attention_pytorch import RingCache, explain_cache, ring_attn_with_cache
from ring_attention_pytorch.ranks.ring import Ring
from tests.support.reference import dense_attention, relative_error


@pytest.mark.parametrize("layout", [None, "contiguous"])
def test_a_cache_that_nobody_has_is_gone_at_once(layout: str | None) -> None:
    """With its memory, and its process group: plans that it keeps do not keep it."""
    collects = gc.isenabled()
    gc.disable()
    try:
        cache = RingCache(1, 2, 4, layers=2, windows=(None, 3))
        q, k = torch.randn(1, 3, 4, 4), torch.randn(1, 3, 2, 4)
        for layer, window in enumerate((None, 3)):
            ring_attn_with_cache(q, k, k, cache, layer=layer, window=window, layout=layout)
        parts = [ref(cache), *(ref(cache.memory(layer)) for layer in (0, 1))]
        del cache
        assert [part() for part in parts] == [None] * 3
    finally:
        if collects:
            gc.enable()


def gone_on_apart() -> list[float]:
    """Errors of a cache, and of a deep copy of it that goes on with other tokens."""
    draw = torch.Generator().manual_seed(0)
    sizes = 2, 20, 2, 8
    first, other = (torch.randn(3, *sizes, generator=draw).double() for _ in range(2))
    cache = RingCache(2, 2, 8, page=2, dtype=torch.float64)
    ring_attn_with_cache(*first[:, :, :9], cache)
    copied, errors = copy.deepcopy(cache), []
    assert copied.ring is cache.ring
    assert not copied.plans  # they attend to the other one's memory
    copied.rollback(3)
    for to, cached, begin in ((first, cache, 9), (other, copied, 6)):
        whole = torch.cat((first[:, :, :begin], to[:, :, begin:]), dim=2)
        want, _ = dense_attention(*whole, causal=True)
        for i in range(begin, 20):
            out = ring_attn_with_cache(*whole[:, :, i : i + 1], cached)
            errors.append(relative_error(out, want[:, i : i + 1]))
    return errors


@pytest.mark.parametrize("size", [1, 3])
def test_a_copy_of_a_cache_goes_on_by_itself(pools: Callable, size: int) -> None:
    for errors in pools(size).run(gone_on_apart):
        assert max(errors) < 1e-12


def test_a_cache_records_nothing_for_gradients() -> None:
    cache, k = RingCache(2, 1, 4, group=Ring.alone()), torch.ones(2, 3, 1, 4, requires_grad=True)
    cache.append(k, 2 * k)
    assert not any(t.requires_grad for t in (*cache.keys, *cache.values))
    assert cache.lengths == [3, 3]


def test_a_tied_cache_gets_no_values_and_what_it_can_not_be() -> None:
    for kinds, why in (
        (dict(value_dim=5), "value_dim must be at most 4, got 5"),
        (dict(dtype=torch.float8_e4m3fn), "a tied cache can't be of torch.float8_e4m3fn"),
    ):
        with pytest.raises(ValueError, match=why):
            RingCache(2, 1, 4, tied=True, **kinds)
    cache, plain = RingCache(2, 1, 4, value_dim=3, tied=True), RingCache(2, 1, 4, value_dim=3)
    k = torch.randn(2, 2, 1, 4)
    for call, why in (
        (lambda: cache.append(k, k[..., :3]), "give no v"),
        (lambda: ring_attn_with_cache(k, k, k[..., :3], cache), "give no v"),
        (lambda: plain.append(k, None), "v must be given"),
    ):
        with pytest.raises(ValueError, match=why):
            call()
    cache.append(k, None)
    plain.append(k, 2 * k[..., :3])
    assert torch.equal(cache.values[0], cache.keys[0][..., :3])
    with pytest.raises(ValueError, match="not the first numbers of keys"):
        cache.load_state_dict(plain.state_dict())
    assert "reads 0.00 MiB" in explain_cache(cache, heads=2)


def test_who_is_alone_is_told_too() -> None:
    cache = RingCache(2, 1, 4, capacity=3, page=1, group=Ring.alone())
    k = torch.ones(2, 2, 1, 4)
    cache.append(k, k)
    for refused, why in {
        lambda: cache.append(k, k): "would have 4 tokens, more than the capacity of 3",
        lambda: cache.rollback(3): "rollback takes from 0 to as many tokens as there are",
        lambda: cache.rollback([1]): "rollback takes",
        lambda: cache.reorder([0, 2]): "reorder takes a number from 0 to 1",
        lambda: cache.fork(0, 2): "there are 2 sequences, and no 2",
        lambda: cache.hide_before([0]): "starts must be 2 numbers",
        lambda: cache.hide_before([0, 1 << 30]): r"from 0, below 2 \*\* 30, got \[0, 1073741824\]",
        lambda: cache.append(k.double(), k.double()): "k and v must be torch.float32",
        lambda: cache.reserve(-1): "reserve takes a number of tokens from 0 to 3, got -1",
        lambda: cache.reserve(4): "reserve takes a number of tokens from 0 to 3, got 4",
        lambda: cache.owner(-1): "owner takes a token from 0 to 2, got -1",
        lambda: cache.owner(3): "owner takes a token from 0 to 2, got 3",
        lambda: explain_cache(cache, 0): "heads must be a multiple of the cache's 1, got 0",
        lambda: explain_cache(cache, 1, 0): "tokens must be at least 1, got 0",
        lambda: explain_cache(cache, 1, dtype=torch.int32): "dtype must be torch.float32, as",
        lambda: explain_cache(RingCache(1, 2, 4), 3): "heads must be a multiple of the cache's 2",
    }.items():
        with pytest.raises(ValueError, match=why):
            refused()
        assert cache.lengths == [2, 2]


def test_what_has_no_capacity_is_told_no_largest_token() -> None:
    cache = RingCache(1, 1, 4, page=2, group=Ring.alone())
    assert cache.owner(10**9) == 0
    with pytest.raises(ValueError, match="owner takes a token from 0, got -1"):
        cache.owner(-1)
    cache.reserve(0)


def test_8_bits_are_for_what_is_wider_and_of_one_dtype() -> None:
    cache = RingCache(1, 1, 4, dtype=torch.float8_e4m3fn, group=Ring.alone())
    q = torch.ones(1, 1, 1, 4)
    small = q.to(torch.float8_e4m3fn)
    for refused, why in {
        lambda: cache.append(small, small): "k and v must be torch.float64 or torch.float32 or",
        lambda: cache.append(q, q.double()): "k and v must be",
        lambda: ring_attn_with_cache(small, q, q, cache): "q must be torch.float64 or",
        lambda: ring_attn_with_cache(q.double(), q, q, cache): "of the same tokens and dtype",
    }.items():
        with pytest.raises(ValueError, match=why):
            refused()
    assert cache.lengths == [0]


def test_layers_of_different_lengths_are_not_taken_for_even_ones() -> None:
    cache, k = RingCache(2, 1, 4, layers=2, group=Ring.alone()), torch.ones(2, 3, 1, 4)
    cache.append(k, k)
    for refused in (lambda: cache.reorder([1, 0]), lambda: cache.free(0), cache.state_dict):
        with pytest.raises(ValueError, match="layers have different lengths"):
            refused()
    with pytest.raises(ValueError, match="roll back at least to there"):
        cache.rollback(2)
    cache.rollback(3)
    assert cache.lengths_of.tolist() == [[0, 0], [0, 0]]


def without_memory() -> str:
    """One rank has none for its share."""
    pool = RingCache._pool

    def short(cache: RingCache, pages: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
        return pool(cache, pages, 1 << 48 if dist.get_rank() == 1 else dim, dtype)

    RingCache._pool = short
    try:
        RingCache(2, 1, 4, capacity=64, page=1)
    except ValueError as error:
        return str(error)
    finally:
        RingCache._pool = pool
    return "no error"


def test_all_ranks_hear_that_one_lacks_memory(pools: Callable) -> None:
    first, *others = pools(3).run(without_memory)
    assert "64 tokens of 2 sequences and 1 layers do not fit the memory of 3 ranks" in first
    assert "(on rank 1)" in first
    assert others == [first, first]
