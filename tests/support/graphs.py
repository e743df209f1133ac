"""Graphs that do again what a CPU was told."""

from collections.abc import Callable

import pytest
import torch

from ring_attention_pytorch.runtime import graphs, replay


def again(function: Callable, given: tuple, results: tuple, device: torch.device) -> Callable:
    """A graph that computes anew with whatever it is given."""

    def replay(tensors: tuple) -> None:
        function(*tensors[: len(given)], into=tensors[len(given) :])

    return replay


def stand_in(patch: pytest.MonkeyPatch) -> None:
    """Graphs work on the CPU from now on."""
    patch.setattr(graphs, "captured", again)
    patch.setattr(graphs, "capturing", lambda device: False)
    patch.setattr(replay, "current_stream", lambda device: None)
    patch.setattr(graphs, "can_be_set", lambda: True)
