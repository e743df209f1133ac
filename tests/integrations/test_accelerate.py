"""The mesh of accelerate: its sizes, and no context parallelism but ours."""

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from ring_attention_pytorch.integrations.accelerate import RingParallelismConfig


def test_the_mesh_has_the_sizes_of_accelerate_launch(monkeypatch):
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "4")
    assert RingParallelismConfig().cp_size == 4


def test_accelerate_is_told_of_a_mesh_and_of_no_context_parallelism():
    config = RingParallelismConfig(cp_size=4, dp_shard_size=2)
    assert not config.cp_enabled
    assert config.fsdp_dim_names == ["dp_shard_cp"]
    assert (config.cp_size, config.data_parallel_size, config.total_size) == (4, 2, 8)
    assert RingParallelismConfig().total_size == 1
