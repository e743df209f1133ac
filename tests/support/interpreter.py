"""Processes in which Triton's interpreter runs kernels on the CPU.

It must be asked for before Triton is imported, and no other test is to see it. So they are forked
from where PyTorch has been imported, and Triton has not.
"""

import importlib.util
import os
import sys
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from tests.support.ranks import context

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


def _interpret() -> None:
    assert "triton" not in sys.modules
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)


def interpreters(processes: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(processes, mp_context=context, initializer=_interpret)
