"""What a cache refuses: in the same words on all ranks, and before anything is written."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ring_attention_pytorch import explain_cache
from ring_attention_pytorch.inference.attention import ring_attn_with_cache
from ring_attention_pytorch.inference.cache import RingCache
from ring_attention_pytorch.ranks.failures import RingError
from ring_attention_pytorch.ranks.ring import Ring
from tests.support.module_cases import check_refused


def misuse(name: str) -> None:
    odd_one = dist.get_rank() == 1
    given: dict[str, Any] = dict(sequences=2, key_heads=2, head_dim=4)
    wrong_caches: dict[str, dict[str, Any]] = {
        "page": {"page": 257},
        "capacity": {"capacity": 0},
        "dtype": {"dtype": torch.int32},
        "heads of a cache": {"key_heads": 0},
        "pages differ": {"page": 3},
        "a size is no number": {"layers": "two"},
    }
    if odd_one and name in wrong_caches:
        given |= wrong_caches[name]
    cache = RingCache(**given)
    q, k = torch.zeros(2, 1, 4, 4), torch.zeros(2, 1, 2, 4)
    call: dict[str, Any] = dict(q=q, k=k, v=k)
    wrong: dict[str, dict[str, Any]] = {
        "batch": {"q": q[:1]},
        "heads": {"q": torch.zeros(2, 1, 3, 4)},
        "no token": {"q": q[:, :0], "k": k[:, :0], "v": k[:, :0]},
        "keys of other tokens": {"k": torch.zeros(2, 2, 2, 4), "v": torch.zeros(2, 2, 2, 4)},
        "width of v": {"v": k[..., :3]},
        "dtype of q": {"q": q.double()},
        "no v": {"v": None},
        "layer": {"layer": 1},
        "window": {"window": -1},
        "windows differ": {"window": 3},
        "softclamp": {"softclamp": 0.0},
        "endless softclamp": {"softclamp": float("inf")},
        "scale": {"scale": float("nan")},
        "endless scale": {"scale": float("inf")},
        "kernel": {"kernel": "sdpa"},
        "sinks": {"sinks": torch.zeros(3)},
        "values differ": {"q": q + 1},
        "layout": {"layout": "spiral"},
        "shards": {"layout": "zigzag", "q": q[:, :0], "k": k[:, :0], "v": k[:, :0]},
        "q is no tensor": {"q": "q"},
    }
    if name == "values differ":
        call["check"] = "always"
    if name in ("layout", "shards"):
        call["layout"] = "zigzag"
    if odd_one or name == "shards":
        call |= wrong[name]
    ring_attn_with_cache(cache=cache, **call)


REFUSED = {
    "page": "page must be from 1 to 256, got 257",
    "capacity": "capacity must be at least 1, or None",
    "dtype": "dtype must be one of",
    "heads of a cache": "key_heads must be at least 1, got 0",
    "pages differ": "page must be the same on every rank",
    "a size is no number": "layers='two' violates type hint",
    "batch": "q must be [2, n, h, 4], got [1, 1, 4, 4]",
    "heads": "heads of q must be a multiple of 2, got 3",
    "no token": "q must have a token",
    "keys of other tokens": "q and k must be of the same tokens and dtype, got 1 in",
    "width of v": "k and v must be (2, 1, 2, 4) and (2, 1, 2, 4)",
    "dtype of q": "q must be torch.float32 on cpu, as the cache is",
    "no v": "k and v must be given together",
    "layer": "layer must be from 0 to 0, got 1",
    "window": "window must not be negative, got -1",
    "windows differ": "scores must be the same on every rank",
    "softclamp": "softclamp must be None, or positive and finite, got 0.0",
    "endless softclamp": "softclamp must be None, or positive and finite, got inf",
    "scale": "scale must be finite, got nan",
    "endless scale": "scale must be finite, got inf",
    "kernel": "kernel must be None, 'triton' or 'eager', got 'sdpa'",
    "sinks": "sinks must be [4] on cpu, got [3] on cpu",
    "values differ": "values of q, k and v must be the same on every rank",
    "layout": "layout must be the same on every rank",
    "shards": "a chunk must have a token",
    "q is no tensor": "violates type hint",
}


@pytest.mark.parametrize("size", [2, 4])
def test_what_cannot_be_is_refused_in_the_same_words_on_all_ranks(
    pools: Callable, size: int
) -> None:
    check_refused(pools(size), misuse, REFUSED)


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


def longer_than_the_cache(odd_one: int) -> str:
    """Ranks attend from three tokens, of which one rank's cache has two, or all have."""
    group = dist.new_group(timeout=timedelta(seconds=4.0))
    cache, q = RingCache(2, 1, 4, group=group), torch.ones(2, 3, 1, 4)
    cache.append(q, q)
    ring_attn_with_cache(q, None, None, cache)
    if odd_one in (dist.get_rank(), 2):
        cache.rollback([0, 1])
    try:
        ring_attn_with_cache(q, None, None, cache)
    except (ValueError, RingError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_queries_are_of_tokens_that_there_are(pools: Callable) -> None:
    for text in pools(2).run(longer_than_the_cache, 2):
        assert "ValueError: RingCache: 3 queries without k and v are of the last 3" in text
        assert "the cache has [3, 2]" in text


@pytest.mark.thorough
def test_who_waits_for_a_rank_without_such_tokens_hears_why(pools: Callable) -> None:
    first, second = pools(2).run(longer_than_the_cache, 1)
    assert "rank 1 raised ValueError: RingCache: 3 queries without k and v" in first
    assert "ValueError: RingCache: 3 queries" in second


def test_queries_and_scores_that_can_not_be_are_refused() -> None:
    cache, q = RingCache(1, 1, 4, group=Ring.alone()), torch.ones(1, 3, 1, 4)
    cache.append(q, q)
    for _ in range(2):  # by a new plan, and by a known one
        for given, why in (
            (dict(scale=float("inf")), "scale must be finite"),
            (dict(softclamp=float("inf")), "softclamp must be None, or positive and finite"),
            (dict(q=torch.ones(1, 4, 1, 4)), "4 queries without k and v"),
        ):
            with pytest.raises(ValueError, match=why):
                ring_attn_with_cache(**{"q": q, "k": None, "v": None, "cache": cache, **given})


def test_an_empty_sequence_has_nothing_to_be_seen() -> None:
    cache, q = RingCache(2, 1, 4, group=Ring.alone()), torch.ones(2, 2, 1, 4)
    cache.append(q, q)
    cache.free(1)
    out, lse = ring_attn_with_cache(q, None, None, cache, return_lse=True)
    assert out.tolist()[1] == [[[0.0] * 4]] * 2
    assert lse[1].isneginf().all()
    assert (out[0] == 1.0).all()


def test_a_layer_with_a_window_keeps_no_more() -> None:
    cache = RingCache(1, 1, 4, layers=2, windows=[None, 3], spare=2, page=1, group=Ring.alone())
    k = torch.ones(1, 20, 1, 4)
    for layer in range(2):
        cache.append(k, k, layer)
    q = k[:, :3]
    for refused, why in {
        lambda: ring_attn_with_cache(q, q, q, cache, layer=1): "keeps a window of 3 tokens",
        lambda: ring_attn_with_cache(q, q, q, cache, layer=1, window=4): "must be at most that",
        lambda: ring_attn_with_cache(q, q, q, cache, layer=1, window=4, layout="zigzag"): "keeps a",
        lambda: ring_attn_with_cache(q, None, None, cache, layer=1, window=3): "at most 2 tokens",
        lambda: cache.rollback(3): "keep 2 more, and sequence 0, of which there were 20",
        lambda: RingCache(1, 1, 4, windows=[3, 3], group=cache.ring): "those of 1 layers, got 2",
        lambda: RingCache(1, 1, 4, windows=[-1], group=cache.ring): "must not be negative",
        lambda: RingCache(1, 1, 4, windows=[1], spare=0, group=cache.ring): "at least 1, got 0",
    }.items():
        with pytest.raises(ValueError, match=why):
            refused()
        assert cache.lengths_of.tolist() == [[20], [20]]
    cache.rollback(2)
    assert cache.memory(1).local(0, 1)[2].tolist() == [13, 14, 15, 16, 17]
    assert sum(pool.nbytes for pool in cache.pools.of(1)) == (3 + 2 * 2) * 2 * 4 * 4
    whole = RingCache(1, 1, 4, layers=2, group=Ring.alone())
    for layer in range(2):
        whole.append(k, k, layer)
    with pytest.raises(ValueError, match="the states hold 5 of the 18 tokens"):
        whole.load_state_dict(cache.state_dict())
    cache.load_state_dict(whole.state_dict())
    assert cache.lengths == [20]


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


def test_calls_are_refused_after_others_were_right() -> None:
    """What makes a call right is looked at once, so all of it must be looked for."""
    cache = RingCache(2, 1, 4, layers=2, group=Ring.alone())
    q, sinks = torch.ones(2, 1, 2, 4), torch.zeros(2)
    right: dict[str, Any] = dict(q=q, k=q[:, :, :1], v=q[:, :, :1], layer=0, sinks=sinks)
    ring_attn_with_cache(cache=cache, **right)
    for wrong, why in (
        ({"q": q.double()}, "q must be torch.float32"),
        ({"q": q.to("meta")}, "q must be torch.float32 on cpu"),
        ({"q": q[:1]}, "q must be"),
        ({"k": q}, "k and v must be"),
        ({"v": q}, "k and v must be"),
        ({"v": right["v"].double()}, "k and v must be torch.float32"),
        ({"layer": 2}, "layer must be from 0 to 1"),
        ({"sinks": torch.zeros(3)}, "sinks must be"),
        ({"sinks": sinks.to("meta")}, "sinks must be"),
        ({"alibi_slopes": torch.zeros(3)}, "alibi_slopes must be"),
    ):
        with pytest.raises(ValueError, match=why):
            ring_attn_with_cache(cache=cache, **{**right, **wrong})
    assert cache.lengths == [1, 1]


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


def moved(sizes: tuple[int, int], options: dict[str, Any]) -> float:
    """Take what ranks of one cache hold over to a cache of other ranks."""
    k = torch.randn(2, 11, 1, 4, generator=torch.Generator().manual_seed(1))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    groups = {size: dist.new_group(list(range(size))) for size in (1, *sizes)}
    states: list[Any] = [None] * ranks
    mine = None
    if rank < sizes[0]:
        cache = RingCache(2, 1, 4, page=2, group=groups[sizes[0]], **options)
        cache.append(k, -k)
        cache.rollback([0, 4])
        mine = cache.state_dict()
    dist.all_gather_object(states, mine)
    if rank >= sizes[1]:
        return 0.0
    other = RingCache(2, 1, 4, page=3, group=groups[sizes[1]], **options)
    with pytest.raises(ValueError, match="give those of all ranks"):
        other.load_state_dict(*states[: sizes[0] - 1], states[0])
    other.load_state_dict(*states[: sizes[0]])
    assert other.lengths == [11, 7]
    worst, k = 0.0, other.rounded(k)
    for i in range(2):
        keys, values, tokens = other.memory(0).local(i)
        worst = max(worst, (keys - k[i, tokens]).abs().max().item() if len(keys) else 0.0)
        worst = max(worst, (values + k[i, tokens]).abs().max().item() if len(keys) else 0.0)
    return worst


MOVES = [
    ((2, 3), dict(dtype=torch.float8_e4m3fn)),
    ((3, 1), {}),
    ((3, 2), dict(windows=[2], spare=4)),
]


@pytest.mark.parametrize(("sizes", "options"), MOVES)
def test_a_cache_can_be_taken_over_by_other_ranks(
    sizes: tuple[int, int], options: dict[str, Any], pools: Callable
) -> None:
    assert pools(3).run(moved, sizes, options) == [0.0] * 3


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
