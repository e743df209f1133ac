"""Processes in which Triton's interpreter runs kernels on the CPU.

It must be asked for before Triton is imported, and no other test is to see it.
"""

import importlib.util
import multiprocessing as mp
import os
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)


def interpreters(processes: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(
        processes, mp_context=mp.get_context("spawn"), initializer=_interpret
    )
