"""A cache over ranks is one cache: whatever is done to it, attention is that of dense tensors."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.support.cache_stories import OPTIONS, Story, told

# of six stories in a row those that each ring tells; thorough, three ranks tell the rest, too
PLACES = {1: (0,), 2: (1, 5), 3: (0, 3, 4), 4: (2,)}
EXACT = 1e-12
DECODING = Story(deeds=("attend",), steps=20, most=3)


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
    deeds = (*Story.deeds, "prefill", *reloaded)
    found += [
        replace(rolling, seed=seed, page=2, windows=windows, deeds=deeds, steps=30, tied=True)
        for seed, windows in enumerate((None, (3, None), None))
    ]
    return found


@pytest.mark.parametrize(
    ("size", "places"), [*PLACES.items(), pytest.param(3, (1, 2, 5), marks=pytest.mark.thorough)]
)
def test_whatever_is_done_attention_is_dense(
    pools: Callable, size: int, places: tuple[int, ...]
) -> None:
    stories = [story for i, story in enumerate(cases()) if i % 6 in places]
    for errors in pools(size).run(told, stories):
        for story, error in zip(stories, errors):
            assert error < EXACT, story
