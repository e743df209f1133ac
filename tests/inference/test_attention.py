"""Attention to a cache: what it refuses, in the same words on all ranks, and what is empty."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounter

from ring_attention_pytorch.inference.attention import ring_attn_with_cache
from ring_attention_pytorch.inference.cache import RingCache
from ring_attention_pytorch.ranks.failures import RingError
from ring_attention_pytorch.ranks.ring import Ring
from tests.support.module_cases import check_refused
from tests.support.ranks import unhurried
from tests.support.reference import dense_attention


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
        "scales of a chunk": {"scale": 3.0},
        "sinks of one": {"sinks": torch.zeros(4)},
        "softclamp": {"softclamp": 0.0},
        "endless softclamp": {"softclamp": float("inf")},
        "scale": {"scale": float("nan")},
        "endless scale": {"scale": float("inf")},
        "kernel": {"kernel": "sdpa"},
        "sinks": {"sinks": torch.zeros(3)},
        "values differ": {"q": q + 1},
        "layout": {"layout": "spiral"},
        "check": {"check": "now and then"},
        "check of a chunk": {"check": "now and then"},
        "kernel of a chunk": {"kernel": "sdpa"},
        "shards": {"layout": "zigzag", "q": q[:, :0], "k": k[:, :0], "v": k[:, :0]},
        "q is no tensor": {"q": "q"},
    }
    if name == "values differ":
        call["check"] = "always"
    if name in ("layout", "shards") or name.endswith("of a chunk"):
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
    "windows differ": "window must be the same on every rank, got null on rank",
    "scales of a chunk": "scale must be the same on every rank, got 0.5 on rank",
    "sinks of one": "sinks must be the same on every rank, got null on rank",
    "softclamp": "softclamp must be None, or positive and finite, got 0.0",
    "endless softclamp": "softclamp must be None, or positive and finite, got inf",
    "scale": "scale must be finite, got nan",
    "endless scale": "scale must be finite, got inf",
    "kernel": "kernel must be None, 'triton' or 'eager', got 'sdpa'",
    "check": "check must be None or 'always', got 'now and then'",
    "check of a chunk": "check must be None or 'always', got 'now and then'",
    "kernel of a chunk": "kernel must be None, 'triton' or 'eager', got 'sdpa'",
    "sinks": "sinks must be floating [4], one for each head of q, on cpu; got torch.float32 [3]",
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


def longer_than_the_cache(odd_one: int, seconds: float) -> str:
    """Ranks attend from three tokens, of which one rank's cache has two, or all have."""
    group = dist.new_group(timeout=timedelta(seconds=seconds))
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
    for text in pools(2).run(longer_than_the_cache, 2, 300.0):
        assert "ValueError: RingCache: 3 queries without k and v are of the last 3" in text
        assert "the cache has [3, 2]" in text


@pytest.mark.thorough
def test_who_waits_for_a_rank_without_such_tokens_hears_why(pools: Callable) -> None:
    first, second = pools(2).run(longer_than_the_cache, 1, unhurried(4.0))
    assert "rank 1 raised ValueError: RingCache: 3 queries without k and v" in first
    assert "ValueError: RingCache: 3 queries" in second


def later_calls_that_one_rank_can_not_make() -> list[str]:
    """Report what each rank hears when rank 1 alone gives more tokens than before."""
    told = []
    for layout in (None, "zigzag"):
        for tied, wrong in (
            (False, {"v": "v"}),
            (False, {"sinks": torch.zeros(2, 2)}),
            (False, {"sinks": torch.zeros(1)}),
            (True, {"v": torch.ones(1, 3, 1, 4)}),
        ):
            cache = RingCache(1, 1, 4, tied=tied)
            for n in (1, 2, 3):
                q = torch.ones(1, n, 1, 4)
                given = dict(q=q, k=q, v=None if tied else q, cache=cache, layout=None)
                if n == 3:
                    given |= {"layout": layout, **(wrong if dist.get_rank() == 1 else {})}
                try:
                    ring_attn_with_cache(**given)
                except ValueError as error:
                    told.append(str(error))
    return told


def first_call_of_a_layer_with_a_window() -> str:
    """Call with as many tokens as in another layer; rank 1 gives a wrong v."""
    cache, q = RingCache(1, 1, 4, layers=2, windows=[None, 3]), torch.ones(1, 1, 1, 4)
    for layer, v in ((0, q), (0, q), (1, "v" if dist.get_rank() == 1 else q)):
        try:
            ring_attn_with_cache(q, q, v, cache, layer=layer)
        except ValueError as error:
            return str(error)
    return "nothing"


def test_the_first_call_of_a_layer_with_another_memory_is_refused_on_all_ranks(
    pools: Callable,
) -> None:
    assert all("v='v'" in told for told in pools(2).run(first_call_of_a_layer_with_a_window))


def test_a_later_call_of_other_tokens_is_refused_on_all_ranks(pools: Callable) -> None:
    first, second = pools(2).run(later_calls_that_one_rank_can_not_make)
    assert len(first) == len(second) == 8
    for mine, theirs in zip(first, second):
        assert theirs in mine
    for number, said in enumerate(("v='v'", "sinks must be", "sinks must be the same", "tied")):
        assert all(said in told[at] for told in (first, second) for at in (number, 4 + number))


def a_wrong_type_in_a_later_step(check: str | None, seconds: float) -> str:
    """One rank passes text for values, once ranks no longer agree on each call."""
    cache = RingCache(1, 1, 4, group=dist.new_group(timeout=timedelta(seconds=seconds)))
    q = torch.ones(1, 1, 1, 4)
    ring_attn_with_cache(q, q, q, cache, check=check)
    given: Any = "v" if dist.get_rank() == 1 else q
    try:
        ring_attn_with_cache(q, q, given, cache, check=check)
    except (ValueError, RingError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_wrong_type_is_refused_on_all_ranks_while_they_compare_values(pools: Callable) -> None:
    for text in pools(2).run(a_wrong_type_in_a_later_step, "always", 300.0):
        assert "v='v' violates type hint" in text


@pytest.mark.thorough
def test_a_rank_with_a_wrong_type_raises_at_once_and_others_hear_why(pools: Callable) -> None:
    first, second = pools(2).run(a_wrong_type_in_a_later_step, None, unhurried(4.0))
    assert "RingError: " in first
    assert "rank 1 raised ValueError: ring_attn_with_cache() parameter v='v'" in first
    assert second.startswith("WrongArgument: ")


def wrong_values_in_a_later_step(check: str | None, seconds: float) -> list[str]:
    """What ranks hear of calls that rank 1 gets wrong, in a step that rank 0 makes once."""
    cache = RingCache(1, 1, 4, group=dist.new_group(timeout=timedelta(seconds=seconds)))
    q = torch.ones(1, 1, 1, 4)
    ring_attn_with_cache(q, q, q, cache, check=check)
    wrong: list[dict[str, Any]] = [
        {"window": -1},
        {"sinks": torch.zeros(2)},
        {"v": q[..., :3]},
        {"q": q.double()},
    ]
    again = len(wrong) if check else 1
    told = []
    for given in wrong if dist.get_rank() == 1 else [{}] * again:
        try:
            ring_attn_with_cache(
                **{"q": q, "k": q, "v": q, "cache": cache, "check": check, **given}
            )
        except (ValueError, RingError) as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


IN_A_LATER_STEP = [
    "window must not be negative",
    "sinks must be floating",
    "k and v must be (1, 1, 1, 4) and (1, 1, 1, 4), got",
    "q must be torch.float32",
]


def test_wrong_values_are_refused_on_all_ranks_while_they_compare_values(pools: Callable) -> None:
    for told in pools(2).run(wrong_values_in_a_later_step, "always", 300.0):
        assert all(map(str.__contains__, told, IN_A_LATER_STEP))
        assert len(told) == len(IN_A_LATER_STEP)


def test_a_rank_with_wrong_values_raises_at_once_and_others_hear_why(pools: Callable) -> None:
    (first,), second = pools(2).run(wrong_values_in_a_later_step, None, unhurried(3.0))
    for text, why in zip(second, IN_A_LATER_STEP, strict=True):
        assert text.startswith(f"ValueError: attention to a cache: {why}")
    assert first.startswith("RingError: ")
    assert "rank 1 raised ValueError: q must be torch.float32" in first


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


def test_calls_are_refused_after_others_were_right() -> None:
    """A right call is checked once, so that check must look for everything."""
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


@pytest.mark.parametrize("layout", [None, "zigzag"])
def test_compiled_code_breaks_around_it_once_however_long_the_cache_is(layout) -> None:
    """Lengths are numbers of the host: traced, each would be compiled for itself."""
    cache, graphs = RingCache(1, 2, 8, dtype=torch.float64, group=Ring.alone()), CompileCounter()

    def step(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return ring_attn_with_cache(2 * q, k, k, cache, layout=layout) + 1

    compiled, keys = torch.compile(step, backend=graphs), torch.zeros(1, 0, 2, 8).double()
    for _ in range(4):
        q, k = torch.randn(1, 1, 4, 8).double(), torch.randn(1, 1, 2, 8).double()
        keys = torch.cat((keys, k), 1)
        want, _ = dense_attention(2 * q, keys, keys)
        torch.testing.assert_close(compiled(q, k) - 1, want)
    assert graphs.frame_count == 2
