"""Ranks that stall at random, and compile: each step ends, with the loss of an eager twin."""

import pytest

from ring_attention_pytorch.launch import spawn
from tests.support.stalls import train


@pytest.mark.thorough
def test_ranks_that_stall_and_compile_end_each_step_with_the_same_loss():
    for run in spawn(train, 2, 2, 8, 7, timeout=600.0, start_method="forkserver"):
        assert len(run.seconds) == 8
        assert run.error < 1e-5
