"""Benchmarks run on the CPU at toy sizes, and what they say is right is."""

import doctest
import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import decode, few, sweep
from benchmarks.lib import attempts, blocks, calls, cpu_work, jobs, results, sequences
from ring_attention_pytorch import RingPlan
from ring_attention_pytorch.comm.symmetric_memory import PeerGroup
from ring_attention_pytorch.kernels._configs import config_for
from ring_attention_pytorch.runtime.interfaces import Traits
from tests.support import threads
from tests.support.cases import over_shared_memory
from tests.support.forks import context
from tests.support.launched import launched

ROOT = Path(__file__).parents[2]
THOROUGH = pytest.mark.thorough
SMALL = ["--device", "cpu", "--heads", "4", "2", "--dim-head", "16", "--repeats", "2"]
ONE = {"device": "CPU", "command": "python -m benchmarks ring"}
# a benchmark in which a gather of 32 tokens fails on some ranks, after an exchange with the others
FAILING = """
import os, sys, torch
from datetime import timedelta
from importlib import import_module
from benchmarks.lib import attempts

name, ranks, *options = sys.argv[1:]
benchmark = import_module(f"benchmarks.{name}")
planned, attempts.PATIENCE = benchmark.planned, timedelta(seconds=2)

def failing(plan):
    def attend(q, k, v):
        out = planned(plan)(q, k, v)
        if os.environ["RANK"] in ranks.split(",") and q.requires_grad and q.shape[1] == 32:
            raise torch.OutOfMemoryError(f"{1 + plan.ring.rank} GiB are too much\\nat all")
        return out
    return attend

benchmark.planned = failing
benchmark.main(options)
"""


def run(name: str, *options: str, ranks: int = 2) -> str:
    """Run a benchmark of small tensors; return its table."""
    ran = launched("benchmarks", name, *options, ranks=ranks)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def saved(file: Path, name: str, *options: str, ranks: int = 2) -> list[dict[str, Any]]:
    """Run a benchmark with --save; return its rows of both passes."""
    run(name, *SMALL, *options, "--save", str(file), ranks=ranks)
    rows = json.loads(file.read_text())
    start = f"torchrun --nproc-per-node {ranks} -m benchmarks {name} --device cpu"
    assert all(row["command"].startswith(start) for row in rows)
    assert not any("--save" in row["command"] for row in rows)
    return [row for row in rows if row["pass"] == "both"]


def are_right(rows: list[dict[str, Any]]) -> bool:
    return all(error < 1e-5 for row in rows for error in row["errors"].values())


@pytest.mark.parametrize("module", [attempts, calls, decode, jobs, results, sequences])
def test_examples_are_as_shown(module) -> None:
    failed, attempted = doctest.testmod(module)
    assert (failed, attempted > 0) == (0, True)


def test_every_benchmark_is_listed_with_what_it_does(capsys) -> None:
    assert command.main([]) == 0
    listed = capsys.readouterr().out
    for name, module in command.NAMES.items():
        assert (ROOT / "benchmarks" / f"{module}.py").exists()
        assert f"  {name:14}{command.about(name)}\n" in listed
        assert len(command.about(name)) > 20
    modules = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
    assert modules - {"__init__", "__main__"} == set(command.NAMES.values())


def test_an_unknown_benchmark_is_told(capsys) -> None:
    assert command.main(["rings"]) == 2
    assert "reading-path" in capsys.readouterr().out


def test_saved_rows_come_first_and_replace_those_of_the_same_command(tmp_path: Path) -> None:
    file, other = tmp_path / "ring.json", {"device": "CPU", "command": "another"}
    results.save([ONE | {"tflops": 1.0}, other], file)
    results.save([ONE | {"tflops": 2.0}], file)
    assert json.loads(file.read_text()) == [ONE | {"tflops": 2.0}, other]


@pytest.mark.parametrize("argv", [["--save", "a.json", "--n", "1"], ["--save", "--n", "1"]])
def test_a_command_is_told_without_save(argv: list[str]) -> None:
    assert results.command("ring", argv) == "python -m benchmarks ring --n 1"


@THOROUGH
def test_kernels_are_measured_on_documents_of_all_lengths(tmp_path: Path) -> None:
    options = "--tokens", "128", "--rounds", "1", "--load", "0", "--dim-value", "8"
    rows = saved(tmp_path / "documents.json", "documents", *options, ranks=1)
    assert are_right(rows)
    of_kinds = [[row for row in rows if row["mask"] == mask] for mask in {r["mask"] for r in rows}]
    assert len(of_kinds) == 6
    assert all(len(each) == 2 and sum("chosen" in r for r in each) == 1 for each in of_kinds)


def test_every_transport_is_measured_and_right(tmp_path: Path) -> None:
    rows = saved(tmp_path / "ring.json", "ring", "--tokens", "48", "--ulysses", "1", "2")
    for mask in ("causal", "full"):
        assert {row["subject"] for row in rows if row["mask"] == mask} >= {
            "theory", "ring", "gather", "gather, Ulysses 2", "calls alone",
        }  # fmt: skip
    ours = [row for row in rows if row["subject"] not in ("theory", "calls alone")]
    assert ours
    assert are_right(ours)
    assert all(row["share"] == 1.0 for row in rows if row["subject"] == "theory")


@pytest.mark.parametrize(
    ("name", "ranks"), [("ring", "1"), ("ring", "0,1"), pytest.param("masks", "0", marks=THOROUGH)]
)
def test_a_rank_that_fails_alone_ends_all_soon_and_rows_stay(
    name: str, ranks: str, tmp_path: Path
) -> None:
    """A failure on all ranks is a row, which is not kept."""
    script, file = tmp_path / "failing.py", tmp_path / "rows.json"
    script.write_text(FAILING)
    options = ["--tokens", "16", "32", "--kernels", "sdpa", "--save", str(file)]
    options += ["--transports", "ring", "--mask", "causal"] if name == "ring" else []
    ran = launched(str(script), name, ranks, *SMALL, *options, ranks=2)
    rows = json.loads(file.read_text())
    assert ("ring" if name == "ring" else "gather", 16) in [
        (row["subject"], row["tokens"]) for row in rows
    ]
    if ranks == "0,1":
        assert ran.returncode == 0, ran.stderr
        assert "| ring | sdpa | one by one | OutOfMemoryError: 1 GiB are too much" in ran.stdout
    else:
        others = [1 - int(ranks)]
        assert ran.returncode != 0
        assert f"FailedAloneError: failed here, and not on ranks {others}: OutOf" in ran.stderr
        assert all(row["tokens"] == 16 for row in rows)


def test_documents_of_magi_attention_are_of_a_quarter_at_most() -> None:
    mask = sequences.packed("as MagiAttention counts them", 1 << 14, 2, packs=21)
    cut = mask.options["cu_seqlens"]
    assert (cut[0], cut[-1]) == (0, 1 << 14)
    assert max(map(int.__rsub__, cut, cut[1:])) <= 1 << 12
    squares = [
        sequences.squares(sequences.borders("as MagiAttention counts them", 1 << 14, draw))
        for draw in map(random.Random, range(21))
    ]
    assert sequences.squares(cut) == sorted(squares)[10]


@pytest.mark.thorough
def test_masks_are_measured_and_right(tmp_path: Path) -> None:
    options = "--tokens", "48", "--window", "16", "--kernels", "sdpa"
    rows = saved(tmp_path / "masks.json", "masks", *options)
    assert len(rows) == 14
    gathers = [row for row in rows if row["subject"] == "gather"]
    assert are_right(gathers)
    received = {row["mask"]: row["keys_received"] for row in gathers}
    assert received["causal"] == 48
    assert received["window 16, contiguous"] == 16


@pytest.mark.thorough
def test_one_rank_of_many_is_measured(tmp_path: Path) -> None:
    options = "--tokens", "48", "--kernels", "sdpa", "--rounds", "1", "--ranks", "0", "3"
    rows = saved(tmp_path / "rank.json", "rank", *options, ranks=1)
    assert [(row["rank"], row["ranks"], row["subject"]) for row in rows] == [
        (rank, 4, name) for rank in (0, 3) for name in ("theory", "calls alone")
    ]


@pytest.mark.thorough
def test_traces_are_kept(tmp_path: Path) -> None:
    run("ring", *SMALL, "--tokens", "16", "--mask", "causal", "--trace", str(tmp_path))
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"{t}-sdpa-16-rank{r}.json" for t in ("ring", "gather") for r in (0, 1)}


@pytest.mark.thorough
def test_load_that_lasts_is_measured(tmp_path: Path) -> None:
    options = "--tokens", "48", "--kernels", "sdpa", "--rounds", "1", "--load", "0.01"
    rows = saved(tmp_path / "sustained.json", "sustained", *options)
    assert [row["subject"] for row in rows] == ["theory", "calls alone", "gather"]
    assert rows[0]["share"] == 1.0
    assert {row["load"] for row in rows} == {"lasting"}


@pytest.mark.thorough
def test_few_tokens_are_measured(tmp_path: Path) -> None:
    (row,) = saved(tmp_path / "few.json", "few", "--tokens", "48", "--rounds", "1")
    assert (row["subject"], row["kernel"], row["mode"]) == ("gather", "sdpa", "one by one")
    assert row["microseconds"] > 0


@pytest.mark.parametrize("square", [False, True])
def test_keys_come_together_as_a_plan_has_them(square: bool, monkeypatch) -> None:
    """A kernel that knows square causal tiles only takes own keys by themselves."""
    q = torch.randn(1, 16, 2, 4)

    def space(ring: threads.ThreadRing, _: torch.device) -> PeerGroup:
        return PeerGroup(threads.ThreadSpace(ring.hub, ring.rank), None, (0, 1))

    def main(ring: threads.ThreadRing) -> None:
        messages = RingPlan.make(q, q, q, causal=True, layout="zigzag", group=ring)
        plan = replace(messages, kernel=messages.kernel._replace(traits=Traits(square=square)))
        ways = {}, dict(own_apart=True) if square else dict(together=True)
        many, together = (over_shared_memory(plan, [q] * 3, ring, 9, **way) for way in ways)
        chosen = together.chosen._replace(overlapping_transport=many.transport)
        of_few = replace(together, chosen=chosen)
        found = few.both_ways(of_few)
        assert found["gather, together"] is of_few
        assert found["gather, overlapping"].transport is many.transport
        found = few.both_ways(many)
        assert found["gather, overlapping"].transport is many.transport
        assert found["gather, together"].schedule == together.schedule

    monkeypatch.setattr(few, "shared_by", space)
    threads.run(2, main)


@pytest.mark.thorough
def test_defaults_are_measured() -> None:
    options = "--tokens", "48", "--rounds", "1", "--repeats", "1"
    table = run("defaults", *SMALL, *options)
    assert "| 48 tokens a rank, sdpa, SendRecv | us |" in table
    assert "| RingPlan.make, anew |" in table


@pytest.mark.thorough
def test_cpu_time_is_measured_and_right(tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "cpu.json"
    options = ["--length", "64", "--ranks", "2", "--repeats", "1", "--save", str(file)]
    monkeypatch.setattr(cpu_work, "_context", context)
    command.main(["cpu", *options])
    rows = {row["subject"]: row for row in json.loads(file.read_text())}
    assert are_right([rows[name] for name in ("zigzag", "striped", "contiguous")])
    assert "zigzag, compute alone" in rows  # the ring that hands every message back
    assert rows["one process, SDPA"]["relative"] == 1.0


@pytest.mark.parametrize(
    ("options", "subjects"),
    [
        pytest.param(
            ("--keys", "64", "--batch", "2"),
            {"ours", "ours, one GPU", "tree_attn_decode"},
            marks=THOROUGH,
        ),
        pytest.param(
            ("--prefill", "64", "32"), {"prompt at once", "prompt in chunks of 32"}, marks=THOROUGH
        ),
    ],
)
def test_decoding_is_timed_by_as_many_exchanges_on_every_rank(
    options: tuple[str, ...], subjects: set[str], tmp_path: Path
) -> None:
    file = tmp_path / "decode.json"
    run("decode", "--device", "cpu", "--save", str(file), *options)
    rows = {row["subject"]: row for row in json.loads(file.read_text())}
    assert rows.keys() == subjects  # none has failed
    if "ours" in rows:  # one that has all keys reads twice as many
        assert rows["ours, one GPU"]["floor"] == pytest.approx(2 * rows["ours"]["floor"], rel=0.02)


def test_what_does_not_fit_is_a_row_that_says_so(monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(decode, "too_much", lambda *given: asked.append(given) or "needs more")
    cpu = torch.device("cpu")
    (row,) = decode.rows("ours", 8, 1 << 40, 1e12, cpu)  # nothing is made of that size
    assert row["failed"] == "needs more"
    assert asked == [(decode.Case(8, 1 << 40, 1).nbytes, cpu)]


@pytest.mark.parametrize("direction", sweep.DIRECTIONS)
def test_a_sweep_tries_the_blocks_that_are_chosen_for_keys_and_values_of_two_sizes(
    direction: str,
) -> None:
    shape = blocks.Shape(d=192, d_v=128, heads=16, key_heads=16)
    tried = sweep.configs(direction, shape)
    assert config_for(direction, (192, 128), torch.bfloat16, (9, 0)) in tried
    assert len(tried) == len(set(tried))
    square = replace(shape, d_v=None).flops()
    assert shape.flops() * (192 + 192) == pytest.approx(square * (192 + 128))


def test_rows_are_kept_as_they_come(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    run = results.Run("ring", [], "CPU", file)
    run.add([{"subject": "ring", "tflops": 1.0}])
    run.add([{"subject": "gather", "tflops": 2.0}, *results.failed({"subject": "other"}, "no")])
    assert [row["subject"] for row in json.loads(file.read_text())] == ["ring", "gather"]


@pytest.mark.thorough
def test_first_steps_are_timed_of_a_package_that_lies_elsewhere(tmp_path: Path) -> None:
    """A folder that has benchmarks of its own, of before there was this one."""
    (tmp_path / "ring_attention_pytorch").symlink_to(ROOT / "ring_attention_pytorch")
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").touch()
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks", "first", "--device", "cpu", "--kernels", "sdpa",
         "--tokens", "16", "--package", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert [line[:20] for line in ran.stdout.splitlines()[2:]] == [
        "| sdpa | 16 | empty ", "| sdpa | 16 | kept |"
    ]  # fmt: skip
