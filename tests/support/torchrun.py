"""GPU tests that are a module of their own, of which torchrun starts a process for each GPU."""

import os
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist

from benchmarks.lib.jobs import by_torchrun
from tests.support.ranks import take_gpu

ROOT = Path(__file__).parents[2]


def under_torchrun(module: str, ranks: int = 2, *options: str, timeout: float = 540.0) -> None:
    """Run a module as `torchrun -m` does; raise AssertionError with all that it said if it fails.

    `timeout` is in seconds.
    """
    ran = subprocess.run(
        [sys.executable, *by_torchrun(ranks, module, *options)],
        cwd=ROOT, capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr


def join_ranks() -> None:
    """Join the ranks that torchrun has started, over NCCL, each with its own GPU."""
    device = take_gpu(int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"]))
    dist.init_process_group("nccl", device_id=device)
