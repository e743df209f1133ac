"""The GPUs of this host as two machines, whose ranks share memory inside; one GPU will do."""

from pathlib import Path

import pytest
import torch

from benchmarks.lib.jobs import Job, run


@pytest.mark.several_gpus
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_ranks_of_a_machine_share_memory_and_others_get_messages(tmp_path: Path) -> None:
    """Errors and bits of each kernel; a rank that shares a GPU waits for its turn there."""
    command = "-m", "tests.gpu.machines", "--only", "inside", "--tokens", "1024"
    file = tmp_path / "said.txt"
    problem = run(Job("machines", command, 500), file)
    assert problem is None, file.read_text()
    assert "each machine's memory: ranks" in file.read_text(), file.read_text()
