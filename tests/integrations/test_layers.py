"""Which layers of transformers can have ring attention."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")

import transformers

from ring_attention_pytorch.integrations.layers import check_layers, windows_of
from ring_attention_pytorch.integrations.transformers import register


def test_a_tower_that_picks_its_attention_from_a_table_keeps_transformers_own():
    register()
    sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=32)
    config = transformers.SamVisionConfig(**sizes, patch_size=16, output_channels=4, mlp_dim=8)
    config._attn_implementation = "ring"
    assert transformers.SamVisionModel(config).config._attn_implementation == "sdpa"


def config(**own: Any) -> SimpleNamespace:
    return SimpleNamespace(num_hidden_layers=2, max_position_embeddings=16, **own)


RIGHT = [
    {},
    dict(layer_types=["full_attention", "sliding_attention"]),
    dict(layers_block_type=["attention", "mlp", "moe"]),
    dict(attn_temperature_tuning=True, no_rope_layers=[1, 1]),
    dict(rope_parameters={"rope_type": "yarn"}),
    dict(rope_parameters={"rope_type": "dynamic", "original_max_position_embeddings": 40}),
]
WRONG = [
    (dict(layer_types=["full_attention", "linear_attention"]), "layers of linear_attention"),
    (dict(layers_block_type=["mamba", "attention", "conv"]), "layers of conv, mamba"),
    (dict(is_encoder_decoder=True), "an encoder and a decoder"),
    (dict(attn_temperature_tuning=True, no_rope_layers=[1, 0]), "attn_temperature_tuning"),
    (dict(trigram_input=True), "three tokens side by side"),
    (dict(rope_parameters={"rope_type": "dynamic"}), "beyond 16, and ranks differ in it; got 40"),
    (dict(rope_parameters={"a": {"rope_type": "longrope"}}), "type longrope depend on the longest"),
]


@pytest.mark.parametrize("own", RIGHT, ids=str)
def test_what_attention_alone_carries_along_can_be_spread(own: dict[str, Any]) -> None:
    check_layers(config(**own), 40)


@pytest.mark.parametrize(("own", "why"), WRONG)
def test_what_reads_the_sequence_in_another_way_can_not(own: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check_layers(config(**own), 40)


def test_recurrent_layers_count_if_each_is_known() -> None:
    mixed = config(layer_types=["linear_attention", "full_attention", "hybrid"])
    check_layers(mixed, 40, recurrent=2)
    for known in (0, 1):
        with pytest.raises(ValueError, match="layers of hybrid, linear_attention"):
            check_layers(mixed, 40, recurrent=known)
    with pytest.raises(ValueError, match="layers of conv,"):
        check_layers(config(layer_types=["conv"]), 40, recurrent=1)


def test_where_all_ranks_have_all_tokens_their_own_count_is_right() -> None:
    check_layers(config(attn_temperature_tuning=True, trigram_input=True), 0)


@pytest.mark.parametrize(
    ("own", "windows"),
    [
        ({}, [None, None]),
        (dict(sliding_window=8), [7, 7]),
        (dict(sliding_window=8, layer_types=["sliding_attention", "full_attention"]), [7, None]),
        (dict(sliding_window=None, layer_types=["sliding_attention"] * 2), [None, None]),
    ],
)
def test_a_window_counts_the_token_itself_only_there(own: dict[str, Any], windows: list) -> None:
    assert windows_of(config(**own)) == windows
