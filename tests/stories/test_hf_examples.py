"""The examples for Hugging Face train as transformers and TRL alone; the guide quotes them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from examples import train_llama
from ring_attention_pytorch.integrations.transformers import register
from tests.support.trainers import as_launched

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guide" / "huggingface.md"
TINY = dict(steps=3, length=96)


def losses(by: str) -> list[float]:
    """For a pool: the losses of a few steps by one of the trainers."""
    register()
    with as_launched():
        return train_llama.BY[by](**TINY)


@pytest.mark.thorough
def test_trainer_and_accelerate_train_as_transformers_does_alone(pools):
    want = losses("plain")
    assert not dist.is_initialized()
    for by in ("trainer", "accelerate"):
        for found in pools(4).run(losses, by):
            assert found == pytest.approx(want, rel=1e-5), by


def launch(example: str, ranks: int, *options: str) -> subprocess.CompletedProcess[str]:
    run = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    run += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    run += ["-m", "tests.support.hash_seeds", f"examples.{example}"]  # sets differ between ranks
    done = subprocess.run(
        [*run, *options],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


def launched(by: str, ranks: int, file: Path) -> list[float]:
    sizes = [f"--{name}={value}" for name, value in TINY.items()]
    launch("train_llama", ranks, f"--by={by}", *sizes, f"--losses={file}")
    return json.loads(file.read_text())


@pytest.mark.thorough
def test_lightning_trains_as_transformers_does_alone(tmp_path):
    pytest.importorskip("lightning", reason="not among the tested versions of requirements.txt")
    found = launched("lightning", 2, tmp_path / "two.json")
    assert found == pytest.approx(losses("plain"), rel=1e-5)


@pytest.mark.thorough
def test_sft_packs_documents_over_two_processes_as_over_one(tmp_path):
    pytest.importorskip("trl", reason="not among the tested versions of requirements.txt")
    two, one = (launched("sft", ranks, tmp_path / f"{ranks}.json") for ranks in (2, 1))
    assert two == pytest.approx(one, rel=1e-5)


@pytest.mark.thorough
def test_grpo_trains_as_trl_does_alone():
    pytest.importorskip("trl", reason="not among the tested versions of requirements.txt")
    two = launch("grpo", 2, "--steps=2")
    one = launch("grpo", 1, "--steps=2", "--plain")
    steps = [re.findall(r"^step .*", done.stdout, re.MULTILINE) for done in (two, one)]
    assert len(steps[1]) == 2, one.stderr
    assert steps[0] == steps[1], two.stderr


def test_the_guide_quotes_the_examples():
    source = [line.strip() for line in Path(train_llama.__file__).read_text().splitlines()]
    for block in re.findall(r"```py\n(.*?)```", GUIDE.read_text(), re.DOTALL):
        lines = [line.strip() for line in block.splitlines()]
        starts = range(len(source) - len(lines) + 1)
        assert any(source[at : at + len(lines)] == lines for at in starts), block
