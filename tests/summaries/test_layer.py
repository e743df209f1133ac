"""The far part of a layer: numbers that can't be."""

import pytest
import torch

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


@torch.no_grad()
def test_autocast_takes_nothing_from_the_summary_of_a_block() -> None:
    draw = torch.Generator().manual_seed(0)
    far = Summaries(4, 4, pool="attention").layer(16, 8, 2, 2)
    for p in far.parameters():
        p.normal_(generator=draw)
    k, v = torch.randn(2, 2, 4, 2, 8, generator=draw).bfloat16()
    found = []
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found.append(far._pooled(k, v, 0, 3, None))
    assert all(map(torch.equal, *found))
