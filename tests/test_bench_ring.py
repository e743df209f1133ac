"""The benchmark of rings runs on the CPU at toy sizes, and what it says is right is."""

import doctest
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import rings

ROOT = Path(__file__).parent.parent
RUN = [
    sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
]  # fmt: skip
SMALL = ["--device", "cpu", "--heads", "4", "2", "--repeats", "2"]


def run(*options: str, benchmark: str = "bench_ring", ranks: int = 2) -> str:
    own = [] if benchmark in ("bench_masks", "bench_few") else ["--dim-head", "16"]
    ran = subprocess.run(
        [*RUN, str(ranks), "-m", f"benchmarks.{benchmark}", *SMALL, *own, *options], cwd=ROOT,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_speeds_are_told_as_shown() -> None:
    failed, attempted = doctest.testmod(rings)
    assert (failed, attempted > 0) == (0, True)


def test_every_transport_is_measured_and_right(tmp_path: Path) -> None:
    said = run("--tokens", "48", "--ulysses", "1", "2", "--save", str(tmp_path))
    table = [line.split(" | ") for line in said.splitlines() if line.startswith("| 48")]
    names = {(row[1], row[2]) for row in table}
    for mask in ("causal", "full"):
        for name in (
            "theory, sdpa", "ring, sdpa", "gather, sdpa", "gather, sdpa, Ulysses 2",
            "calls alone, sdpa",
        ):  # fmt: skip
            assert (mask, name) in names
    for row in table:
        assert "failed" not in row[3]
        if "theory" not in row[2] and "alone" not in row[2]:
            assert re.findall(r"\de-\d+", row[-1])
            assert all(float(e) < 1e-5 for e in re.findall(r"\de-\d+", row[-1]))
    assert list(tmp_path.glob("*-ring.md"))


@pytest.mark.thorough
def test_masks_are_measured_and_right() -> None:
    said = run("--tokens", "48", "--window", "16", "--kernels", "sdpa", benchmark="bench_masks")
    table = [line.split(" | ") for line in said.splitlines() if line.startswith("| 48")]
    assert len(table) == 12
    for row in table[::2]:
        assert re.findall(r"\de-\d+", row[-1])
        assert all(float(e) < 1e-5 for e in re.findall(r"\de-\d+", row[-1]))
    received = {row[1]: int(row[7]) for row in table[::2]}
    assert received["causal"] == 48
    assert received["window 16, contiguous"] == 16


@pytest.mark.thorough
def test_one_rank_of_many_is_measured() -> None:
    options = "--tokens", "48", "--kernels", "sdpa", "--rounds", "1", "--ranks", "0", "3"
    said = run(*options, benchmark="bench_rank", ranks=1)
    table = [line.split(" | ") for line in said.splitlines() if line.startswith("| 48")]
    assert [row[1:4] for row in table] == [
        [rank, "sdpa", name] for rank in ("0", "3") for name in ("theory", "calls alone")
    ]


@pytest.mark.thorough
def test_traces_are_kept(tmp_path: Path) -> None:
    run("--tokens", "16", "--mask", "causal", "--trace", str(tmp_path))
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"{t}-sdpa-16-rank{r}.json" for t in ("ring", "gather") for r in (0, 1)}


@pytest.mark.thorough
def test_load_that_lasts_is_measured() -> None:
    options = "--tokens", "48", "--kernels", "sdpa", "--rounds", "1", "--load", "0.01"
    said = run(*options, benchmark="bench_sustained")
    table = [line.split(" | ") for line in said.splitlines() if line.startswith("| 48")]
    assert [row[3] for row in table] == ["theory", "calls alone", "gather"]
    assert table[0][7] == "100.0%"


@pytest.mark.thorough
def test_few_tokens_are_measured() -> None:
    said = run("--tokens", "48", "--rounds", "1", benchmark="bench_few")
    # backward is both less forward, which one round may have found to take longer
    assert re.search(r"\| 48 \| one \| chosen \| gather \| \d+ \| -?\d+ \| \d+ \| \d+ \|", said)
