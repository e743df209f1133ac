"""Ranks whose caches hold other sequences find out: none goes on with wrong numbers."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ring_attention_pytorch import RingCache, RingError, ring_attn_with_cache
from ring_attention_pytorch.ranks.ring import Ring
from tests.support import threads
from tests.support.ranks import unhurried


def append(cache: RingCache) -> None:
    k = torch.ones(2, 1, 1, 4)
    cache.append(k, k)


DEEDS: dict[str, Callable[[RingCache], object]] = {
    "rollback": lambda cache: cache.rollback([0, 1]),
    "reorder": lambda cache: cache.reorder([1, 0]),
    "free": lambda cache: cache.free(1),
    "fork": lambda cache: cache.fork(0, 1),
    "append": append,
    "hide_before": lambda cache: cache.hide_before([1, 0]),
}
LATER = [deed for deed in DEEDS if deed not in ("rollback", "reorder")]
WAYS: dict[str, dict[str, Any]] = {
    "decoding": {},
    "a call of another shape": dict(n=2),
    "a chunk": dict(layout="contiguous", n=2),
    "pieces": dict(window=3, n=9),
    "check": dict(check="always"),
}


def attend(cache: RingCache, n: int = 1, **options: Any) -> None:
    q = torch.ones(2, n, 2, 4)
    ring_attn_with_cache(q, q[:, :, :1], q[:, :, :1], cache, **options)


def out_of_step(deed: str, way: str, seconds: float) -> str:
    """Return a rank's error in a call before which one rank changes its cache.

    They wait for one another for so many seconds.
    """
    group, options = dist.new_group(timeout=timedelta(seconds=seconds)), WAYS[way]
    window = options.get("window")
    cache = RingCache(2, 1, 4, windows=[window], spare=4, page=1, group=group)
    cache.hide_before([0, 0])
    append(cache)
    for _ in range(2):
        attend(cache, **{**options, "n": 1})
    if dist.get_rank() == 1:
        DEEDS[deed](cache)
    try:
        attend(cache, **options)
    except (ValueError, RingError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("way", [way for way in WAYS if way != "decoding"])
def test_where_ranks_compare_notes_all_hear_of_it_at_once(pools: Callable, way: str) -> None:
    for deed in DEEDS:
        first, *others = pools(3).run(out_of_step, deed, way, 300.0)
        assert others == [first, first]
        assert "what the cache holds must be the same on every rank" in first, (deed, first)
        assert "on ranks 0, 2" in first


@pytest.mark.parametrize(
    "deed", ["rollback", "reorder", *(pytest.param(d, marks=pytest.mark.thorough) for d in LATER)]
)
def test_where_they_only_send_messages_none_is_taken_for_another(
    pools: Callable, deed: str
) -> None:
    for text in pools(3).run(out_of_step, deed, "decoding", unhurried(3.0)):
        assert text.startswith("RingError: attention to a cache: call 3 by plan")
        assert "of caches to which all have done the same" in text


def numbers(ring: Ring) -> list[int]:
    """Return numbers of calls of caches changed alike; the last but one is of a state anew."""
    cache, found = RingCache(2, 1, 4, layers=2, page=1, group=ring), []

    def grow() -> None:
        k = torch.ones(2, 1, 1, 4)
        for layer in range(2):
            cache.append(k, k, layer)

    deeds: list[Callable[[], object]] = [
        lambda: cache.rollback(1),
        lambda: cache.rollback([2, 1]),
        lambda: (cache.reorder([1, 0]), cache.rollback(1)),
        lambda: (cache.hide_before([0, 1]), cache.rollback(1)),
        lambda: (cache.reorder([0, 0]), cache.rollback(1)),
        lambda: None,
    ]
    for _ in range(3):
        grow()
    for deed in deeds:
        for layer in range(2):
            attend(cache, layer=layer)
            found.append(ring.steps.now.plan)
        deed()
    return found


def test_a_call_s_number_is_one_of_what_the_cache_holds() -> None:
    (first, second), _ = threads.run(2, numbers)
    assert first == second
    assert first[:2] == first[2:4]
    assert len({*first}) == len(first) - 2


def told(ring: Ring) -> str:
    cache = RingCache(2, 1, 4, page=1, group=ring)
    append(cache)
    attend(cache)
    if ring.rank == 1:
        cache.reorder([1, 0])
    with pytest.raises(ValueError, match="what the cache holds must be the same") as raised:
        attend(cache, 2)
    return str(raised.value)


def test_a_new_plan_is_of_caches_that_are_alike() -> None:
    (first, second), _ = threads.run(2, told)
    assert first == second


def test_lengths_are_in_the_text(pools: Callable) -> None:
    first, *_ = pools(3).run(out_of_step, "rollback", "check", 300.0)
    assert 'got "[3, 3], ' in first
    assert '"[3, 2], ' in first
