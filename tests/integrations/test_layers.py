"""Which layers of transformers can have ring attention."""

import pytest

pytest.importorskip("transformers")

import transformers

from ring_attention_pytorch.integrations.transformers import register


def test_a_tower_that_picks_its_attention_from_a_table_keeps_transformers_own():
    register()
    sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=32)
    config = transformers.SamVisionConfig(**sizes, patch_size=16, output_channels=4, mlp_dim=8)
    config._attn_implementation = "ring"
    assert transformers.SamVisionModel(config).config._attn_implementation == "sdpa"
