"""Causal routed attention."""

import pytest
import torch

from ring_attention_pytorch import routing
from ring_attention_pytorch.routing.autoregressive import Turns


def test_causal_attention_always_has_a_light_branch() -> None:
    numbers = dict(num_heavy_tokens_q=1, num_heavy_tokens_kv=1)
    with pytest.raises(TypeError, match="'has_light_attn'"):
        routing.ConditionalRoutedAutoregressiveAttention(8, has_light_attn=False, **numbers)
    with pytest.raises(ValueError, match="heavy_window_size must be at least 1, got 0"):
        routing.ConditionalRoutedAutoregressiveAttention(8, heavy_window_size=0, **numbers)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(
    ("windows", "queries", "keys"), [(3, 2, 1), (4, 1, 3), (2, 0, 2), (0, 1, 1)]
)
def test_a_query_comes_after_the_keys_of_earlier_windows_alone(
    windows: int, queries: int, keys: int, ranks: int
) -> None:
    turns = Turns.make(windows, queries, keys, ranks, torch.device("cpu"))

    def places(slots: list[torch.Tensor], at: list[torch.Tensor]) -> list[int]:
        """By slot, the place in the routed sequence, which is dealt in turn."""
        found = {}
        for rank, (some, there) in enumerate(zip(slots, at)):
            found |= {s: t * ranks + rank for s, t in zip(some.tolist(), there.tolist())}
        return [found[slot] for slot in range(len(found))]

    of_queries = places(turns.queries, turns.queries_at)
    of_keys = places(turns.keys, turns.keys_at)
    assert sorted(of_queries + of_keys) == [*range(windows * (queries + keys))]
    for query, place in enumerate(of_queries):
        before = [key for key, at in enumerate(of_keys) if at < place]
        assert before == [*range(query // queries * keys)]
