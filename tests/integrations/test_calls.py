"""A layer's arguments of attention must say what its mask says, or be of no use to it."""

import pytest

pytest.importorskip("transformers")

from ring_attention_pytorch.integrations.calls import check_call
from ring_attention_pytorch.integrations.masks import Visible

CAUSAL, BOTH = Visible(True, 7), Visible(False, 7)


@pytest.mark.parametrize(
    ("visible", "given"),
    [
        (CAUSAL, {"sliding_window": 8}),  # which counts the token itself
        (BOTH, {"sliding_window": 7}),
        (BOTH, {"sliding_window": 8}),
        (Visible(True, None), {"is_causal": True, "use_cache": True}),
        (BOTH, {"is_causal": False}),
        (CAUSAL, {"anything": None, "else_": False}),
        (CAUSAL, {"position_embeddings": (1, 2), "cache_position": [3]}),
    ],
)
def test_what_agrees_or_is_idle_passes(visible: Visible, given: dict) -> None:
    check_call(visible, given)


@pytest.mark.parametrize(
    ("visible", "given", "why"),
    [
        (CAUSAL, {"sliding_window": 7}, "sliding_window=7, but its mask's is 7"),
        (BOTH, {"sliding_window": 9}, "sliding_window=9, but its mask's is 7"),
        (Visible(True, None), {"sliding_window": 8}, "its mask's is None"),
        (CAUSAL, {"is_causal": False}, "is_causal=False, but its mask's is True"),
        (CAUSAL, {"s_aux_2": 1, "bias": 2}, "was given bias, s_aux_2, which ring attention does"),
        (CAUSAL, {"output_attentions": True}, "was given output_attentions"),
    ],
)
def test_what_contradicts_or_is_unknown_is_told(visible: Visible, given: dict, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check_call(visible, given)
