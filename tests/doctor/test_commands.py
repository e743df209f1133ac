"""The commands: what they print, as text and as JSON, and how they end."""

import json
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from ring_attention_pytorch.doctor import commands
from ring_attention_pytorch.doctor.speed import Speed
from ring_attention_pytorch.doctor.trials import Parity, Trial
from ring_attention_pytorch.kernels import KERNELS

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "doctor.md"


def command(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = commands.main(words)
    return code, capsys.readouterr().out


def test_json_has_all_that_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    found = Trial([Parity("eager", "ring", "torch.float64", 1.0, 1e-11)], 2e9)
    with mock.patch.object(commands, "try_out", return_value=found):
        code, text = command("doctor", "--device", "cpu", "--json", capsys=capsys)
        plain_code, plain = command("doctor", "--device", "cpu", capsys=capsys)
    said = json.loads(text)
    assert code == plain_code == 1
    assert said["well"] is False
    assert said["bytes_per_second"] == 2e9
    assert [p["right"] for p in said["parity"]] == [False]
    for finding in said["findings"]:
        assert f"{finding['subject']}: {finding['text']}" in plain
    assert "BAD   eager, ring, 4 ranks: worst relative error 1.0e+00" in plain


def test_a_trial_that_fails_is_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    error = RuntimeError("rank 1 failed:\nTraceback\nRuntimeError: triton, ring: no memory\n")
    with mock.patch.object(commands, "try_out", side_effect=error):
        code, text = command("doctor", "--device", "cpu", capsys=capsys)
    assert code == 1
    assert "BAD   trial: RuntimeError: triton, ring: no memory" in text


@pytest.mark.parametrize(("measured", "slow"), [(4.1e9, False), (3.9e9, True)])
def test_a_third_of_the_expected_speed_comes_with_advice(
    measured: float, slow: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    trial = Trial([], 2e9, Speed(13e9, 12e9, measured), (0, 0, 1, 1), 2)
    with mock.patch.object(commands, "try_out", return_value=trial):
        _, text = command("doctor", "--device", "cpu", capsys=capsys)
        _, told = command("doctor", "--device", "cpu", "--json", capsys=capsys)
    assert f"{'note' if slow else 'ok  '}  speed: " in text
    assert ("-> ranks wait for cores" in text) is slow
    assert "4 ranks on 2; 4 heads and 2 key heads would take ulysses=2" in text
    assert [json.loads(told)[name] for name in ("machines", "ulysses")] == [2, 2]


def test_help_says_the_defaults_of_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        commands.main(["explain", "--help"])
    said, plain = capsys.readouterr().out, commands.parser().parse_args(["explain"])
    defaults = (plain.tokens, plain.ranks, "{} {}".format(*plain.heads), plain.width, plain.layout)
    assert all(f"({default})" in said for default in defaults)


def test_looking_starts_no_processes(capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.object(commands, "try_out", side_effect=AssertionError):
        _, text = command("doctor", "--device", "cpu", "--quick", "--json", capsys=capsys)
        _, wrong = command("doctor", "--device", "cpu", "--backend", "nccl", capsys=capsys)
    assert {f["subject"] for f in json.loads(text)["findings"]} >= {
        f"kernel {name}" for name in KERNELS
    }
    assert "BAD   backend: " in wrong


def test_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = command(capsys=capsys)
    assert code == 0
    assert all(f"\n    {name} " in text for name in ("demo", "doctor", "explain", "memory"))


def test_the_demo_draws_who_has_which_token(capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.object(commands, "try_out", return_value=Trial([], None)):
        _, text = command("demo", "--nproc", "2", capsys=capsys)
    assert "contiguous  000000000000111111111111\n" in text
    assert "striped     010101010101010101010101\n" in text
    assert "zigzag      000000111111111111000000\n" in text


def test_heads_that_do_not_divide_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["explain", "--heads", "4", "3"]) == 2
    assert "3 key heads must divide 4 query heads" in capsys.readouterr().err


def test_the_commands_of_the_guide_are_commands() -> None:
    said = re.findall(
        r"^    python -m ring_attention_pytorch (.+)$", GUIDE.read_text(), re.MULTILINE
    )
    assert len(said) == 2
    for words in said:
        commands.parser().parse_args(words.split())  # or it exits


@pytest.mark.thorough
def test_commands_run_as_users_call_them() -> None:
    def run(*words: str) -> str:
        line = [sys.executable, "-m", "ring_attention_pytorch", *words]
        root = Path(__file__).parents[2]
        ran = subprocess.run(line, cwd=root, capture_output=True, text=True, timeout=900)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    assert json.loads(run("doctor", "--nproc", "2", "--device", "cpu", "--json"))["parity"]
    text = run("explain", "--tokens", "8192", "--heads", "32", "8", "--ranks", "2")
    assert "rank 1 of 2: 4096 of 8192 tokens, zigzag, causal" in text
