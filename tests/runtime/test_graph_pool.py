"""Tensors that outlive a call are made by another thread where its memory is a graph's."""

import sys
import threading
from contextlib import nullcontext
from unittest import mock

import torch

from ring_attention_pytorch.runtime import graph_pool


def test_where_there_are_no_pools_this_thread_makes_them():
    found = graph_pool.outside_graph_pool(threading.get_ident, torch.device("cpu"))
    assert found == threading.get_ident()


def test_beside_a_pool_another_thread_makes_them_and_waits_for_its_device():
    stream = mock.Mock()
    with (
        mock.patch.dict(sys.modules, {graph_pool._POOLS: mock.Mock()}),
        mock.patch.object(torch.cuda, "device", return_value=nullcontext()),
        mock.patch.object(torch.cuda, "current_stream", return_value=stream),
    ):
        found = {
            graph_pool.outside_graph_pool(threading.get_ident, torch.device("cuda"))
            for _ in range(2)
        }
        assert (
            graph_pool.outside_graph_pool(threading.get_ident, torch.device("cpu"))
            == threading.get_ident()
        )
    assert len(found) == 1  # always the same one
    assert threading.get_ident() not in found
    assert stream.synchronize.call_count == 2
