"""Decoding goes on where a prompt ends, with near tokens and far summaries."""

import pytest

from tests.support.summary_cases import decoded


@pytest.mark.parametrize(
    ("layout", "distance", "gates", "pool", "prompt"),
    [
        ("contiguous", None, False, "mean", 31), ("zigzag", 14, False, "attention", 30),
        ("striped", 14, True, "mean", 32), ("contiguous", 5, False, "mean", 17),
        ("zigzag", None, True, "mean", 4),
    ],
)  # fmt: skip
def test_decoding_goes_on_where_a_prompt_ends(pools, layout, distance, gates, pool, prompt) -> None:
    for found in pools(3).run(decoded, layout, distance, gates, pool, prompt):
        assert found["prompt"] < 1e-6, found  # angles are computed in float32
        assert found["later"] < 1e-6, found
        assert found["recent"] <= 5 + 2 * 3 + 4
        cells = (prompt + 25 - 5) // 3 + 1
        assert found["far"] <= (cells if distance is None else (distance - 5) // 3)
