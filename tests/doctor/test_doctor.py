"""The doctor: broken installations get a right diagnosis, and wrong attention is seen."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest
import torch

from ring_attention_pytorch import kernels
from ring_attention_pytorch.doctor import commands, trials
from ring_attention_pytorch.doctor.facts import Facts, gather_facts
from ring_attention_pytorch.doctor.findings import Finding, findings_of, keeps_from_trying
from ring_attention_pytorch.doctor.trials import Parity, Trial, worst
from ring_attention_pytorch.kernels import KERNELS
from ring_attention_pytorch.ranks.ring import Ring

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "doctor.md"
WELL = Facts(
    python="3.12.1",
    torch="2.11.0",
    ours="1.0.0",
    place="/somewhere",
    listed=("1.0.0",),
    numpy="2.4.6",
    packages={"triton": None, "flash-attn-4": None},
    device="cuda",
    kernels={"sdpa-cudnn": None, "sdpa": "runs on the CPU, the tensors are on cuda"},
    gpus=("H200", "H200"),
    apart=(),
    backends=("gloo", "nccl"),
    launched=0,
)


def told(facts: Facts, subject: str, backend: str = "nccl", nproc: int = 2) -> Finding:
    (found,) = [f for f in findings_of(facts, backend, nproc) if f.subject == subject]
    return found


def test_a_good_installation_is_well() -> None:
    found = findings_of(WELL, "nccl", 2)
    assert {f.status for f in found} == {"ok"}
    assert not any(map(keeps_from_trying, found))


# subject, what is otherwise, how bad that is, words of the diagnosis, whether nothing can be tried
BROKEN: list[tuple[str, dict[str, Any], str, str, bool]] = [
    ("numpy", {"numpy": None}, "ok", "nothing here needs it", False),
    ("package", {"listed": ("1.0.0", "0.5.20")}, "bad", "0.5.20 of that name", False),
    ("processes", {"launched": 2}, "bad", "there is no process group", True),
    ("backend", {"device": "cpu"}, "bad", "nccl moves tensors on GPUs, yours are on cpu", True),
    ("backend", {"backends": ("gloo",)}, "bad", "this torch has no nccl; it has gloo", True),
    ("backend", {"backends": ()}, "bad", "it has none", True),
    ("GPUs' memory", {"apart": ((0, 1), (1, 0))}, "note", "not shared: 0 to 1, 1 to 0", False),
    ("processes", {"gpus": ("H200",)}, "bad", "2 processes need as many GPUs, got 1", True),
    ("GPUs", {"gpus": ()}, "bad", "none is seen", True),
    ("kernels", {"kernels": {"sdpa": "needs this"}}, "bad", "no kernel runs on cuda", True),
    ("kernel sdpa", {"kernels": {"sdpa": "needs this"}}, "note", "needs this", True),
]


@pytest.mark.parametrize(("subject", "otherwise", "status", "words", "ends"), BROKEN)
def test_what_is_broken_gets_its_diagnosis(
    subject: str, otherwise: dict[str, Any], status: str, words: str, ends: bool
) -> None:
    facts = replace(WELL, **otherwise)
    finding = told(facts, subject)
    assert finding.status == status
    assert words in finding.text
    assert bool(finding.advice) == (status == "bad" or subject == "GPUs' memory")
    assert any(map(keeps_from_trying, findings_of(facts, "nccl", 2))) == ends


def test_gloo_with_tensors_on_gpus_is_told() -> None:
    finding = told(WELL, "backend", backend="gloo")
    assert finding.status == "bad"
    assert 'init_process_group("nccl")' in finding.advice


# a package, its files, how bad that is, words of the diagnosis
PACKAGES: list[tuple[str, dict[str, str], str, str]] = [
    ("triton", {}, "note", "needs triton 3.4 or later (pip install"),
    ("triton", {"triton/__init__.py": "__version__ = '2.0.0'"}, "note", "got 2.0.0"),
    ("flash-attn", {}, "note", "which is not installed"),
    ("flash-attn-4", {"flash_attn/__init__.py": ""}, "note", "which is not installed"),
    (
        "flash-attn-4",
        {
            "flash_attn/__init__.py": "",
            "flash_attn/cute/__init__.py": "",
            "flash_attn/cute/interface.py": "import nvidia_cutlass_of_nobody",
        },
        "bad",
        "can't be imported: No module named 'nvidia_cutlass_of_nobody'",
    ),
    (
        "flash-attn",
        {
            "flash_attn/__init__.py": "",
            "flash_attn/flash_attn_interface.py": "raise ImportError('undefined symbol: _ZN3c10')",
        },
        "bad",
        "undefined symbol: _ZN3c10",
    ),
]


@contextmanager
def site_of(folder: str) -> Iterator[None]:
    """Of the packages that kernels need there are those of a folder, whatever this machine has."""
    names = ("triton", "flash_attn")
    kept = {n: m for n, m in sys.modules.items() if n.split(".")[0] in names}
    kernels.forget()
    with mock.patch.dict(sys.modules), mock.patch.object(sys, "path", [folder, *sys.path]):
        for name in kept:
            del sys.modules[name]
        with mock.patch.object(sys, "meta_path", [Hidden(names), *sys.meta_path]):
            yield
    kernels.forget()


class Hidden:
    """A finder that finds some packages in the first folder of sys.path, or nowhere."""

    def __init__(self, names: tuple[str, ...]):
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        del target
        wanted = name in self.names and path is None
        if wanted and not (Path(sys.path[0]) / name).is_dir():
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.mark.parametrize(("package", "files", "status", "words"), PACKAGES)
def test_broken_packages_get_their_diagnosis(
    package: str, files: dict[str, str], status: str, words: str
) -> None:
    with TemporaryDirectory() as folder, site_of(folder):
        for name, text in files.items():
            place = Path(folder) / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
        finding = told(gather_facts("cpu"), package, "gloo")
    assert finding.status == status, finding
    assert words in finding.text


def test_every_kernel_that_runs_here_is_tried_and_right(pools: Any) -> None:
    parities, speed, rates = worst(pools(2).run(trials.trial, "cpu"))
    assert {(p.kernel, p.transport) for p in parities} == {
        (kernel, transport) for kernel in ("sdpa", "eager") for transport in ("ring", "gather")
    }
    assert all(p.right and p.error < 1e-14 for p in parities)
    assert speed is not None
    assert speed > 0
    assert rates is not None
    assert all(rate > 0 for rate in rates)


def wrong(kernel: str, rank: int) -> Trial:
    """For a pool: what the trials say of a kernel that makes a mistake in a gradient of a rank."""
    real = trials.ring_attn

    def mistaken(*qkv: torch.Tensor, **options: Any) -> torch.Tensor:
        q, k, v = qkv
        if options["kernel"] == kernel and Ring().rank == rank:
            k = k + 1e-6 * (k - k.detach())  # its gradient is off by 1e-6
        return real(q, k, v, **options)

    with mock.patch.object(trials, "ring_attn", mistaken):
        return trials.trial("cpu")


def test_a_wrong_gradient_on_one_rank_is_seen(pools: Any) -> None:
    parities, *_ = worst(pools(2).run(wrong, "sdpa", 1))
    assert {p.kernel for p in parities if not p.right} == {"sdpa"}


def test_nan_is_not_right() -> None:
    good, bad = (Parity("eager", "ring", "torch.float64", e, 1e-11) for e in (1e-15, float("nan")))
    for ranks in ([good, bad], [bad, good]):
        (found,), *_ = worst([Trial([parity], None) for parity in ranks])
        assert not found.right


def test_alone_there_are_no_links() -> None:
    parities, speed, _ = trials.trial("cpu")
    assert speed is None
    assert all(p.right for p in parities)


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
    assert all(f"\n    {name} " in text for name in ("demo", "doctor", "explain"))


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
        ran = subprocess.run(line, cwd=root, capture_output=True, text=True, timeout=300)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    assert json.loads(run("doctor", "--nproc", "2", "--device", "cpu", "--json"))["parity"]
    text = run("explain", "--tokens", "8192", "--heads", "32", "8", "--ranks", "2")
    assert "rank 1 of 2: 4096 of 8192 tokens, zigzag, causal" in text
