"""The examples for Hugging Face train as transformers and TRL alone; the guide quotes them."""

import json
import re
from pathlib import Path

import pytest
import torch.distributed as dist

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from examples import train_llama
from ring_attention_pytorch.integrations.transformers import register
from tests.support.launched import Done, launched
from tests.support.trainers import as_launched

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "huggingface.md"
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
        for found in pools(2).run(losses, by):
            assert found == pytest.approx(want, rel=1e-5), by


def launch(example: str, ranks: int, *options: str) -> Done:
    run = [f"examples.{example}", *options]
    if ranks > 1:
        run = ["tests.support.hash_seeds", *run]  # sets differ between ranks
    done = launched(*run, ranks=ranks)
    assert done.returncode == 0, done.stderr
    return done


def losses_of(by: str, ranks: int, file: Path) -> list[float]:
    sizes = [f"--{name}={value}" for name, value in TINY.items()]
    launch("train_llama", ranks, f"--by={by}", *sizes, f"--losses={file}")
    return json.loads(file.read_text())


@pytest.mark.thorough
def test_lightning_trains_as_transformers_does_alone(tmp_path):
    pytest.importorskip("lightning", reason="not among the tested versions of requirements.txt")
    found = losses_of("lightning", 2, tmp_path / "two.json")
    assert found == pytest.approx(losses("plain"), rel=1e-5)


@pytest.mark.thorough
def test_sft_packs_documents_over_two_processes_as_over_one(tmp_path):
    pytest.importorskip("trl", reason="not among the tested versions of requirements.txt")
    two, one = (losses_of("sft", ranks, tmp_path / f"{ranks}.json") for ranks in (2, 1))
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
