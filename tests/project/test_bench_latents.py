"""The benchmark of latent keys, on one machine and on two; ranks of a host as ranks of machines."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from benchmarks.lib.machines import take_gpu
from ring_attention_pytorch.ranks.machines import machine_name
from tests.support.launched import launched
from tests.support.sampling import in_ci
from tests.support.scripts import Script, linux

ROOT = Path(__file__).parents[2]
SMALL = ["--device", "cpu", "--tokens", "32", "--heads", "4", "--rounds", "1"]
SMALL += ["--sizes", "16", "8", "16", "32"]


@pytest.mark.parametrize("machines", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_both_ways_agree_and_latents_are_fewer_bytes(machines: int, tmp_path) -> None:
    file = tmp_path / "rows.json"
    options = [*SMALL, "--save", str(file)]
    if machines == 1:
        run = launched("benchmarks", "latents", *options, ranks=2)
    else:
        run = subprocess.run(
            [sys.executable, "-m", "benchmarks", "latents", "--machines", "2", *options],
            cwd=ROOT, capture_output=True, text=True, timeout=500,
        )  # fmt: skip
    assert run.returncode == 0, run.stderr
    both = {row["subject"]: row for row in json.loads(file.read_text()) if row["pass"] == "both"}
    assert {*both} == {"latents", "expanded"}
    for row in both.values():
        assert max(row["differ"].values()) < 1e-5
        assert row["machines"] == machines
        assert row["ranks"] == 2 * machines
        assert row["command"].startswith("torchrun" if machines == 1 else "python -m benchmarks")
    # a token: 32 + 8 numbers, or 24 and 16 for each of four heads
    assert both["expanded"]["sent_mib"] > 2 * both["latents"]["sent_mib"] > 0
    if machines > 1:
        assert both["latents"]["loopback_mib"] > 0


BEGUN = "import os, time; open(os.path.join(os.environ['TMPDIR'], os.environ['RANK']), 'w')"
ASLEEP = f"""
from benchmarks.lib.machines import start
start(2, "timeit", ["-n", "1", {BEGUN!r} + "; time.sleep(1000)"], "cpu")
"""


@linux
@in_ci
def test_all_ranks_of_all_machines_end_when_they_are_told_to(tmp_path) -> None:
    """Ranks that wait for one another on GPUs would take these from whatever runs next."""
    with Script("-c", ASLEEP, folder=tmp_path) as script:
        script.until(lambda: len([*tmp_path.glob("[0-3]")]) == 4)
        os.kill(script.process.pid, signal.SIGTERM)
        assert script.ends() == 1


def test_ranks_that_share_a_gpu_are_hosts_to_nccl_and_one_machine_to_us(monkeypatch) -> None:
    """Else they would share no memory, and tests of what they share would test messages."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    names, hosts = set(), set()
    for rank in range(2):
        with mock.patch.dict(os.environ):
            for name in ("RANK", "NCCL_HOSTID", "RING_ATTENTION_MACHINE"):
                os.environ.pop(name, None)
            assert take_gpu(rank, 2) == torch.device("cuda", 0)
            names.add(machine_name())
            hosts.add(os.environ["NCCL_HOSTID"])
    assert len(names) == 1
    assert len(hosts) == 2
    with mock.patch.dict(os.environ, RANK="3", RING_ATTENTION_MACHINE="machine1"):
        take_gpu(1, 2)
        assert os.environ["NCCL_HOSTID"] == "rank 3"
        assert machine_name() == "machine1"
