"""The example and the benchmark of conditional routing, small."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import routing
from examples import train_routed, train_text
from examples.train_routed import Routed
from examples.train_text import Config

ROOT = Path(__file__).parents[2]
TINY = Config(steps=2, length=96, batch=4, dim=16, depth=1, heads=2)
SHORT = Routed(light_window=8, heavy_window=8, queries=1, keys=1, feed_forward=2)


def linear_flops(model: torch.nn.Module, n: int) -> int:
    """Return the FLOPs that PyTorch counts of a forward; it can't count attention itself."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, n, dtype=torch.long))
    by_op = {str(op): f for op, f in counter.get_flop_counts()["Global"].items()}
    return sum(f for op, f in by_op.items() if "attention" not in op)


def test_flops_are_those_that_pytorch_counts() -> None:
    n, dim = TINY.length, TINY.dim
    logits = 2 * n * dim * 256
    scores = 4 * dim * train_routed.pairs(n)
    counted = linear_flops(train_text.make_model(TINY, ring=False), n)
    assert counted == train_routed.dense_flops(TINY) - scores + logits
    width = train_routed.equal_width(TINY, SHORT)
    ours = train_routed.routed_flops(TINY, SHORT, width)
    turns = n // 8 * 2
    scores = 4 * dim * (train_routed.pairs(n, 8) + train_routed.pairs(turns))
    routers, null = n * 2 * dim * 3, 2 * dim * n // 8  # sums and products, not matrix products
    counted = linear_flops(train_routed.make_routed(TINY, SHORT, ring=False), n)
    assert abs(counted - (ours - scores - routers + logits)) <= 2 * null


def test_both_models_have_as_many_flops() -> None:
    for config, routed in ((TINY, SHORT), (Config(), Routed())):
        width = train_routed.equal_width(config, routed)
        ours, dense = (
            train_routed.routed_flops(config, routed, width),
            train_routed.dense_flops(config),
        )
        assert 0.98 < ours / dense <= 1.0
    with pytest.raises(ValueError, match="too few FLOPs"):
        train_routed.equal_width(TINY, Routed(light_window=96, heavy_window=2, queries=2, keys=2))


@pytest.mark.thorough
def test_training_over_processes_gives_one_process_losses() -> None:
    options = ["--steps=2", "--length=96", "--dim=16", "--depth=1", "--window=8"]
    alone = CliRunner().invoke(train_routed.main, options)
    assert alone.exit_code == 0, alone.output
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    run += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    done = subprocess.run(
        [*run, "examples/train_routed.py", *options],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    losses = [
        [line for line in text.splitlines() if "loss" in line]
        for text in (alone.output, done.stdout)
    ]
    assert len(losses[0]) == 2
    assert losses[0] == losses[1]
    assert "● routed   ○ dense" in done.stdout


@pytest.mark.parametrize("causal", [False, True])
def test_the_benchmark_runs(causal: bool) -> None:
    setting = routing.Setting("cpu", torch.float32, 16, 2, 1 / 8, 8, causal, repeats=1)
    found = routing.compare(64, setting, "contiguous")
    assert set(found) == {"dense", "routed", "scores", "routing"}
    assert all(figures.seconds > 0 for figures in found.values())
    dense, routed = routing.rows(64, found, setting)
    assert (dense["subject"], routed["subject"]) == ("dense", "routed")
    assert routed["times_faster"] > 0
