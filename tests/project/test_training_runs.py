"""Training that others can check: losses over ranks, their picture and tables, and torchtitan."""

import doctest
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import curves
from benchmarks.lib import training
from docs import draw_curves

ROOT = Path(__file__).parents[2]
SIZES = dict(length=250, dim=32, depth=2, heads=2)


def plain(model: nn.Module, whole: dict[str, Any]) -> Tensor:
    """The loss and gradients of one process, a document after the other, without this library."""
    losses, tokens = [], 0
    for at in (slice(*ends) for ends in pairwise(whole["cu_seqlens"])):
        ids = whole["input_ids"][:, at]
        logits = model(ids, torch.arange(ids.shape[1])[None])[0, :-1]
        losses.append(F.cross_entropy(logits, ids[0, 1:], reduction="sum"))
        tokens += ids.shape[1] - 1
    loss = sum(losses) / tokens
    loss.backward()
    return loss.detach()


def losses(by: str, mask: str) -> list[float]:
    """For a pool: the losses of a few steps."""
    curves.STEPS["plain"] = (curves.PyTorchModel, plain)
    return curves.train(by, mask, torch.device("cpu"), SIZES, steps=5)[0]


@pytest.mark.parametrize("mask", curves.MASKS)
def test_losses_over_any_number_of_ranks_are_those_of_plain_pytorch(pools, mask) -> None:
    (want,) = pools(1).run(losses, "plain", mask)
    assert want[-1] < want[0]
    for ranks in (1, 2):
        for found in pools(ranks).run(losses, "ring", mask):
            assert found == pytest.approx(want, abs=1e-4)


@pytest.mark.thorough
def test_losses_are_kept_with_their_command(tmp_path: Path) -> None:
    file = tmp_path / "curves.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    options = "2 -m benchmarks curves --device cpu --steps 2 --length 96 --dim 16 --depth 1 "
    options += "--heads 2 --mask documents causal"
    subprocess.run(
        [*command, *options.split(), f"--save={file}"],
        cwd=ROOT, check=True, capture_output=True, timeout=900,
    )  # fmt: skip
    rows = json.loads(file.read_text())
    assert [(row["mask"], len(row["losses"])) for row in rows] == [("documents", 2), ("causal", 2)]


@pytest.mark.parametrize("module", [training, draw_curves])
def test_examples_are_as_shown(module) -> None:
    failed, attempted = doctest.testmod(module)
    assert (failed, attempted > 0) == (0, True)


def test_the_picture_of_losses_is_what_its_script_draws_of_the_results() -> None:
    rows = json.loads(draw_curves.RESULTS.read_text())
    assert draw_curves.drawing(rows) == (ROOT / "docs" / "curves.svg").read_text()


@pytest.mark.thorough
def test_torchtitan_trains_with_ring_attention_as_with_its_own(tmp_path: Path) -> None:
    pytest.importorskip("torchtitan", reason="not among the tested versions of requirements.txt")
    file = tmp_path / "rows.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    options = "-m examples.train_torchtitan --flavor tiny --tokens 512 --by ring --by torchtitan"
    subprocess.run(
        [*command, *options.split(), f"--save={file}"], cwd=ROOT, check=True, timeout=900,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True,
    )  # fmt: skip
    ring, own = (row["losses"] for row in json.loads(file.read_text()))
    assert ring == pytest.approx(own, abs=1e-4)
