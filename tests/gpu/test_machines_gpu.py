"""The GPUs of this host as two machines, whose ranks share memory inside; one GPU will do."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.several_gpus
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_ranks_of_a_machine_share_memory_and_others_get_messages() -> None:
    """Errors and bits of each kernel; a rank that shares a GPU waits for its turn there."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.gpu.machines", "--only", "inside", "--tokens", "1024"],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "each machine's memory: ranks" in ran.stdout, ran.stdout
