"""In which block a call is: the innermost of this thread, and none after it has ended."""

import threading

import pytest
import torch

from ring_attention_pytorch import shard_batch
from ring_attention_pytorch.integrations import blocks


def batch():
    return shard_batch({"input_ids": torch.tensor([[1, 2, 3]])})


def test_the_block_is_the_innermost_one_that_is_open() -> None:
    assert blocks.opened() is None
    with batch():
        assert blocks.opened() is None  # a batch's block alone is none of a model
        placement = blocks.begun("outer")
        assert blocks.needed() == "outer"
        with batch():
            assert blocks.opened() is None
            assert blocks.begun("inner") is not placement
            assert blocks.needed() == "inner"
        assert blocks.needed() == "outer"
    assert blocks.opened() is None


def test_another_thread_is_in_no_block() -> None:
    found = []
    with batch():
        blocks.begun("this")
        other = threading.Thread(target=lambda: found.append(blocks.opened()))
        other.start()
        other.join()
    assert found == [None]


def test_where_a_block_is_needed_its_absence_is_told() -> None:
    with pytest.raises(ValueError, match="this model has ring attention, which needs its batch"):
        blocks.needed()
