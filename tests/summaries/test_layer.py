"""The far part of a layer: numbers that can't be."""

import pytest

from ring_attention_pytorch.summaries import Summaries

# --- what is refused ---


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (dict(window=-1), "window must be at least 0"),
        (dict(window=4, stride=4, block=3), "block must be at least stride=4, got 3"),
        (dict(window=4, stride=4, distance=10), "distance must be window=4 and a multiple"),
        (dict(window=4, stride=4, distance=0), "distance must be window=4 and a multiple"),
        (dict(window=4, select=-1), "select must be at least 0"),
        (dict(window=4, pool="max"), "pool must be one of 'mean', 'attention'"),
    ],
)
def test_numbers_that_cannot_be_are_refused(given: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Summaries(**given)
