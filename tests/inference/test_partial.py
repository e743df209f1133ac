"""Attention to the keys of one rank by PyTorch's operators."""

from ring_attention_pytorch.inference import partial
from tests.support.generation_cases import CASES


def test_a_long_chunk_s_scores_are_in_memory_some_at_a_time(monkeypatch) -> None:
    monkeypatch.setattr(partial, "_SCORES", 50)
    for case in (CASES[1], CASES[3]):
        assert case.same(case.over(), case.anew())
