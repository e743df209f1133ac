"""A cache over ranks is one cache: whatever is done to it, attention is that of dense tensors."""

import gc
import random
from collections.abc import Callable
from dataclasses import replace
from weakref import ref

import pytest
import torch

from ring_attention_pytorch import RingCache, ring_attn_with_cache
from tests.inference.stories import Story, told

SIZES = (1, 2, 3, 4)
EXACT = 1e-12
DECODING = Story(deeds=("attend",), steps=20, most=3)
OPTIONS = [
    dict(options={"window": 3}),
    dict(options={"window": 0}),
    dict(options={"softclamp": 1.5, "scale": 0.7}),
    dict(given=("sinks",)),
    dict(given=("alibi_slopes",), options={"window": 6}),
    dict(given=("starts",)),
    dict(key_heads=1, given=("sinks", "starts"), options={"window": 4}),
    dict(key_heads=4, layers=2),
]


def cases() -> list[Story]:
    found = [replace(DECODING, page=page) for page in (1, 2, 3, 16)]
    found += [replace(DECODING, page=2, **each) for each in OPTIONS]
    found += [
        Story(seed, page=(1, 2, 3)[seed % 3], sequences=3, layers=1 + seed % 2, steps=25)
        for seed in range(6)
    ]
    found += [Story(seed, page=2, sequences=3, capacity=30, steps=25) for seed in range(4)]
    found += [
        Story(seed, page=2, sequences=3, given=("starts",), options={"window": 5})
        for seed in range(3)
    ]
    chunks = Story(page=2, deeds=("prefill", "attend", "rollback"), steps=12)
    found += [replace(chunks, **each) for each in OPTIONS]
    found += [replace(chunks, seed=seed, sequences=1, page=3) for seed in range(3)]
    found += [replace(story, kept=torch.float8_e4m3fn) for story in (*found[12:14], *found[-2:])]
    deeds = ("prefill", "attend", "rollback", "rollback", "reorder")
    found += [Story(5, sequences=3, page=1, windows=(2,), deeds=deeds, steps=20)]
    rolling = Story(sequences=3, layers=2, steps=20, deeds=(*Story.deeds, "prefill", "prefill"))
    found += [
        replace(rolling, page=1, windows=(3, None)),
        replace(rolling, seed=1, page=3, windows=(0, 4), spare=6, capacity=60),
        replace(
            rolling, page=2, windows=(5, 5), options={"window": 4}, given=("starts", "sinks"),
            kept=torch.float8_e4m3fn,
        ),
    ]  # fmt: skip
    reloaded = ("reload", "reload", "rollback", "attend", "attend", "attend", "reorder", "free")
    found += [
        Story(sequences=3, layers=2, deeds=reloaded, steps=20),
        Story(1, sequences=2, deeds=reloaded, given=("starts",), capacity=40, steps=20),
        replace(rolling, seed=2, deeds=reloaded, windows=(3, None), steps=40, page=4),
        Story(3, deeds=reloaded, windows=(5,), steps=40, kept=torch.float8_e4m3fn),
    ]
    return found


@pytest.mark.parametrize("size", SIZES)
def test_whatever_is_done_attention_is_dense(pools: Callable, size: int) -> None:
    stories = cases()
    for errors in pools(size).run(told, stories):
        for story, error in zip(stories, errors):
            assert error < EXACT, story


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
