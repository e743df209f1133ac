"""The example and the benchmark of summaries, small."""

import doctest
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from benchmarks import summaries as benchmark
from examples import draw_summaries, train_summaries
from examples.train_text import Config
from ring_attention_pytorch import Summaries
from tests.support.summary_reference import summary_attention


def test_the_example_trains_all_models_and_says_what_they_cost(tmp_path: Path) -> None:
    options = ["--steps=2", "--length=96", "--dim=16", "--depth=1", "--window=8", "--stride=4"]
    measured, drawn = str(tmp_path / "history.jsonl"), tmp_path / "curves.svg"
    options += ["--equal-flops", f"--history={measured}"]
    ran = CliRunner().invoke(train_summaries.main, options)
    assert ran.exit_code == 0, ran.output
    assert "● exact   ○ window   × summaries   ◉ several" in ran.output
    *_, exact, window, summaries = (line.split() for line in ran.output.splitlines())
    assert (exact[0], window[0], summaries[0]) == train_summaries.NAMES
    assert float(window[2]) < float(summaries[2]) < float(exact[2])
    assert int(exact[5]) == 2 <= int(summaries[5]) <= int(window[5])
    ran = CliRunner().invoke(draw_summaries.main, [measured, str(drawn)])
    assert ran.exit_code == 0, ran.output
    assert drawn.read_text().count("<polyline") == 3 * 4
    found = draw_summaries.read([measured])
    by_steps = [row.split()[1] for row in ran.output.splitlines()[1:]]
    assert by_steps == [f"{draw_summaries.loss_at(p, 'steps', 2):.3f}" for p in found.values()]


def test_keys_that_the_example_counts_are_those_that_are_seen() -> None:
    """By the reference: with values of 1 at one key, the gates of all keys add up to the count."""
    assert doctest.testmod(train_summaries).failed == 0
    assert doctest.testmod(draw_summaries).failed == 0
    given, n = Summaries(window=5, stride=3, distance=11), 30
    zeros = torch.zeros(1, n, 1, 2, dtype=torch.float64)
    weights = torch.zeros(1, 3, dtype=torch.float64)
    seen = 0.0
    ones = torch.ones(1, n, 1, 1, dtype=torch.float64)
    for token in range(n):  # what of its value a query takes is 1 / keys seen, or less of a summary
        v = ones.clone()
        v[:, :token] = 0.0
        out = summary_attention(zeros, zeros, v, **given.rule._asdict(), weights=(weights,) * 2)
        seen += 1 / out[0, token, 0, 0].item()  # it sees itself: all others are 0
    assert seen / n == pytest.approx(train_summaries.keys_seen("summaries", n, given))


def test_models_begin_alike() -> None:
    config = Config(length=32, dim=16, depth=1, heads=2)
    exact, other = (
        train_summaries.make_model(config, given, ring=False)
        for given in (None, Summaries(window=4, stride=2))
    )
    own = dict(other.named_parameters())
    assert all(torch.equal(p, own[name]) for name, p in exact.named_parameters())


def test_the_benchmark_counts_keys_by_the_formula() -> None:
    setting = benchmark.Setting("cpu", torch.float32, 2, 1, 8, window=16, stride=4, distance=64)
    assert setting.keys("exact", 1000) == 500
    assert setting.keys("summaries", 1000) == 16 + 2 + 125
    assert setting.keys("bounded", 1000) == 16 + 2 + 20
    row = benchmark.measured(setting, "bounded", 256, 1)
    assert row["ms"] > 0
    assert benchmark.error(setting).max() < 1e-6
