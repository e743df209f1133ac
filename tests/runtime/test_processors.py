"""What is read from a GPU to cut programs for it."""

from types import SimpleNamespace
from unittest import mock

import torch

from ring_attention_pytorch.recurrent import state_maps
from ring_attention_pytorch.runtime.processors import Processors


def test_a_gpu_is_read_and_a_cpu_has_room():
    read = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=232448)
    with mock.patch.object(torch.cuda, "get_device_properties", return_value=read):
        assert Processors.of(torch.device("cuda", 0)) == (132, 232448)
    assert Processors.of(torch.device("cpu")).shared > 232448


def test_walks_are_narrow_where_a_gpu_has_little_room():
    for room, columns in ((232448, [64, 128]), (101376, [64, 64])):
        state_maps._width.cache_clear()
        with mock.patch.object(Processors, "of", return_value=Processors(132, room)):
            assert [state_maps._width(d_v, torch.device("cpu")) for d_v in (64, 65)] == columns
    state_maps._width.cache_clear()
