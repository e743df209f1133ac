"""The script that people run first."""

import importlib
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from ring_attention_pytorch.launch import spawn
from tests.support.sampling import in_ci

ROOT = Path(__file__).parents[2]


def here(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str]:
    """Run it in this process, with ranks that are forked: they need not import PyTorch again."""
    script = importlib.import_module("assert")
    monkeypatch.setattr(script, "spawn", partial(spawn, start_method="forkserver"))
    done = CliRunner().invoke(script.main, arguments)
    return done.exit_code, done.output


@in_ci
def test_two_at_once_both_pass_and_name_every_gradient(monkeypatch) -> None:
    script = subprocess.Popen(
        [sys.executable, "assert.py", *["--world-size", "2", "--causal", "--striped-ring-attn"],
         "--lookback", "9"],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    options = "--world-size 4 --causal --num-sharded-batches 2 --batch-size-var-len"
    code, printed = here(monkeypatch, *options.split())
    other, _ = script.communicate(timeout=900)
    for status, text in ((code, printed), (script.returncode, other)):
        assert status == 0, text
        assert "outputs and gradients are the same" in text
        assert text.count(" ok") == 26, text
        assert "RingTransformer d token_emb.weight" in text
        assert "RingAttention d input" in text


@pytest.mark.thorough
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
        cwd=tmp_path, capture_output=True, text=True, timeout=900,
        env={"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert run.returncode == 1, run.stdout + run.stderr
    assert "FAILED" in run.stdout


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lower_precisions_have_limits_of_their_own(dtype: str, monkeypatch) -> None:
    code, printed = here(monkeypatch, "--world-size", "2", "--dtype", dtype)
    assert code == 0, printed
    assert "outputs and gradients are the same" in printed


@pytest.mark.parametrize("option", ["--batch-size", "--seq-len"])
def test_there_is_something_to_compare(option: str, monkeypatch) -> None:
    code, printed = here(monkeypatch, "--world-size", "1", option, "0")
    assert code == 2, printed
    assert f"'{option}': 0 is not in the range x>=1" in printed
