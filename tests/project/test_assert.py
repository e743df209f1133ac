"""The script that people run first."""

import importlib
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from ring_attention_pytorch.launch import spawn
from tests.support import ranks

assert ranks  # whose processes are forked with PyTorch imported

ROOT = Path(__file__).parents[2]


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "assert.py", *arguments],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def test_two_at_once_both_pass_and_name_every_gradient() -> None:
    runs = [
        start(
            "--world-size", "4", "--causal", "--num-sharded-batches", "2", "--batch-size-var-len"
        ),
        start("--world-size", "2", "--causal", "--striped-ring-attn", "--lookback", "9"),
    ]
    for run in runs:
        printed, _ = run.communicate(timeout=300)
        assert run.returncode == 0, printed
        assert "outputs and gradients are the same" in printed
        assert printed.count(" ok") == 26, printed
        assert "RingTransformer d token_emb.weight" in printed
        assert "RingAttention d input" in printed


def test_it_fails_where_an_answer_is_wrong(tmp_path: Path) -> None:
    """With the last scattering of gradients left out, it prints FAILED and exits with 1."""
    for name in ("assert.py", "ring_attention_pytorch"):
        source, copy = ROOT / name, tmp_path / name
        for file in [source] if source.is_file() else source.rglob("*.py"):
            target = copy if source.is_file() else copy / file.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(file.read_text())
    ring = tmp_path / "ring_attention_pytorch" / "comm" / "send_recv.py"
    line = "                total.add(slice(0, part.shape[1]), part)\n"
    assert ring.read_text().count(line) == 1
    ring.write_text(ring.read_text().replace(line, line.replace("total", "block and total")))
    run = subprocess.run(
        [sys.executable, "assert.py", "--world-size", "2"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env={"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert run.returncode == 1, run.stdout + run.stderr
    assert "FAILED" in run.stdout


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lower_precisions_have_limits_of_their_own(dtype: str, monkeypatch) -> None:
    script = importlib.import_module("assert")
    monkeypatch.setattr(script, "spawn", partial(spawn, start_method="forkserver"))
    done = CliRunner().invoke(script.main, ["--world-size", "2", "--dtype", dtype])
    assert done.exit_code == 0, done.output
    assert "outputs and gradients are the same" in done.output
