"""The cache of a model's layers: windows where they are shorter, pages for few tokens."""

from typing import Any

import pytest

from ring_attention_pytorch.inference import model_cache

KEPT: list[Any] = [
    (4000, None, [None, 100, None], 256),
    (800, None, [None, 100, None], 104),
    (130, None, [None, None, None], None),
    (4000, 1990, [None, None, None], None),
    (None, 7, [None, 100, 4096], 7),
]


@pytest.mark.parametrize(("capacity", "given", "kept", "spare"), KEPT)
def test_a_layer_keeps_its_window_where_that_is_less(capacity, given, kept, spare) -> None:
    cache = model_cache.model_cache([None, 100, 4096], 1, 1, 4, capacity=capacity, spare=given)
    pools = [cache.memory(layer) for layer in range(3)]
    assert [each.window for each in pools] == kept
    assert pools[1].at_once == spare


def test_pages_are_smaller_for_short_sequences() -> None:
    assert model_cache.page_for(10, 4) == 1
    assert model_cache.page_for(10**6, 8) == 64
