"""Commands that are run one after the other: checks and benchmarks of several GPUs."""

import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from argparse import ArgumentParser, Namespace
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch

from benchmarks import __main__ as benchmarks
from benchmarks import decode, everything, masks
from benchmarks.lib import calls
from benchmarks.lib.jobs import Job, run, run_all
from tests.gpu import check, curves, machines

LEAVES = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid)
"""
ASLEEP = "import time; print('asleep', flush=True); time.sleep(1000)"


def test_one_that_fails_or_hangs_takes_no_other_along(tmp_path, capsys) -> None:
    jobs = [
        Job("hangs", ("-c", ASLEEP), 1),
        Job("fails", ("-c", "raise SystemExit('no memory')"), 200),
        Job("runs", ("-c", "import os; print('found', os.environ['N'])"), 200, {"N": "4"}),
    ]
    start = time.monotonic()
    assert run_all(jobs, tmp_path / "said") == 1
    assert time.monotonic() - start < 500
    screen = capsys.readouterr().out
    assert "not done after 1 s\n" in screen
    assert "exit status 1\n" in screen
    assert "no memory" in screen
    assert "not done: hangs, fails" in screen
    assert "ok: found 4" in screen
    assert (tmp_path / "said" / "runs.txt").read_text().splitlines()[1:] == ["found 4"]
    assert "asleep" in (tmp_path / "said" / "hangs.txt").read_text()


def test_what_a_command_leaves_is_ended(tmp_path) -> None:
    file = tmp_path / "said.txt"
    assert run(Job("leaves", ("-c", LEAVES), 200), file) is None
    child = int(file.read_text().split()[-1])
    for _ in range(600):
        if not is_running(child):
            return
        time.sleep(0.1)
    raise AssertionError("it still runs")


def is_running(process: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{process}/stat").read_text()  # one that nobody waits for
    except FileNotFoundError:
        return False


def test_time_for_all_is_kept(tmp_path, capsys) -> None:
    jobs = [Job("hangs", ("-c", ASLEEP), 50), Job("late", ("-c", "print('here')"), 50)]
    assert run_all(jobs, tmp_path, within=1.0) == 1
    assert "no time left" in capsys.readouterr().out
    assert not (tmp_path / "late.txt").exists()


WAITS = """
import pathlib, sys, time
here, other = map(pathlib.Path, sys.argv[1:])
here.touch()
for _ in range(500):
    if other.exists():
        print("met"); break
    time.sleep(0.02)
else:
    raise SystemExit("alone")
"""


@pytest.mark.parametrize(
    ("at_once", "status"), [(2, 0), pytest.param(1, 1, marks=pytest.mark.thorough)]
)
def test_some_run_side_by_side(at_once: int, status: int, tmp_path, capsys) -> None:
    """Each waits for the other to begin; one after the other the first waits in vain."""
    places = [str(tmp_path / name) for name in "ab"]
    jobs = [
        Job(name, ("-c", WAITS, *places[::order]), 20)
        for name, order in (("first", 1), ("second", -1))
    ]
    assert run_all(jobs, tmp_path / "said", at_once=at_once) == status
    said = capsys.readouterr().out
    assert said.index("1/2  first") < said.index("2/2  second")
    assert f"{2 - status} of 2 are done" in said


INTERRUPTED = """
import signal, sys
from pathlib import Path
from benchmarks.lib.jobs import Job, run_all

signal.signal(signal.SIGINT, signal.default_int_handler)  # in a shell's background it is ignored
waits = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
run_all([Job(name, ("-c", waits), 60) for name in "abc"], Path(sys.argv[1]), at_once=2)
"""


def test_an_interrupt_ends_what_runs_and_begins_nothing(tmp_path) -> None:
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path)]
    runs = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    files = [tmp_path / f"{name}.txt" for name in "ab"]
    while not all(file.exists() and re.search(r"^\d+$", file.read_text(), re.M) for file in files):
        assert runs.poll() is None
        time.sleep(0.1)
    runs.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in runs.communicate(timeout=900)[1]
    assert not (tmp_path / "c.txt").exists()
    for file in files:
        assert not is_running(int(file.read_text().split()[-1]))


@pytest.mark.parametrize(("at_once", "pools"), [(1, 3), (3, 1), (9, 1)])
def test_jobs_side_by_side_share_the_cpus(at_once: int, pools: int, monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(16)})
    monkeypatch.setattr(check, "find_spec", lambda _: True)
    assert check.workers(4, at_once) == pools


def test_as_many_run_as_were_asked_for(monkeypatch) -> None:
    ran = mock.Mock(return_value=0)
    monkeypatch.setattr(check, "run_all", ran)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert check.main(["--at-once", "3"]) == 0
    assert ran.call_args.kwargs == {"within": float("inf"), "at_once": 3, "archive": None}


def test_a_round_has_fewer_calls_of_what_takes_long(monkeypatch) -> None:
    rounds = []

    def slowest(run, calls: int, number: int, device: torch.device) -> float:
        run()
        rounds.append((calls, number))
        return 3e4  # microseconds a call

    monkeypatch.setattr(calls, "slowest", slowest)
    ran = []
    assert calls.slowest_of_round(ran.append, 10, torch.device("cpu")) == 3e4
    assert ran == [1, 3]
    assert rounds == [(1, 1), (3, 5)]


@pytest.mark.parametrize(("gpus", "jobs", "ranks"), [("1", 18, 2), ("2", 15, 2), ("8", 15, 8)])
def test_checks_of_gpus_are_listed_without_any(gpus: str, jobs: int, ranks: int, capsys) -> None:
    assert check.main(["--list", "--gpus", gpus]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len({*lines}) == jobs
    assert sum(f"nproc-per-node {ranks}" in line for line in lines) == 7
    whole = [line for line in lines if "pytest" in line and "several_gpus" not in line]
    assert len(whole) == (5 if gpus == "1" else 0)


def test_files_that_are_checked_exist() -> None:
    for name in {*check.ALONE, *check.FILES}:
        assert (Path(check.__file__).parent / f"test_{name}_gpu.py").exists(), name


class Parsed(Exception):
    """A benchmark's options are right."""


MODULES = {"benchmarks": benchmarks, "tests.gpu.machines": machines, "tests.gpu.curves": curves}


@pytest.mark.parametrize("trial", [[], ["--trial"]])
@pytest.mark.parametrize(("gpus", "jobs"), [("1", 8), ("2", 16), ("4", 15), ("8", 15)])
def test_everything_is_listed_and_every_benchmark_takes_its_options(
    gpus: str, jobs: int, trial: list[str], capsys, monkeypatch
) -> None:
    monkeypatch.setattr(everything, "find_spec", lambda _: True)
    assert everything.main(["--gpus", gpus, "--list", *trial]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == jobs

    def parsed(parser: ArgumentParser, argv: list[str]) -> None:
        assert parser.parse_known_args(argv)[1] == []
        raise Parsed

    monkeypatch.setattr(ArgumentParser, "parse_args", parsed)
    for line in lines:
        launcher, _, given = line.rpartition(" -m ")
        module, *options = given.split()
        assert f"--nproc-per-node {gpus}" in launcher or launcher.endswith("s  python")
        if module != everything.LLAMA:  # its options are not argparse's
            with pytest.raises(Parsed):
                MODULES[module].main(options)


def test_what_lacks_a_package_is_left_out_and_said(monkeypatch, capsys) -> None:
    monkeypatch.setattr(everything, "find_spec", lambda _: None)
    found = everything.jobs(2, True, ["triton"], Path("rows"))
    assert "Llama" not in [job.name for job in found]
    assert capsys.readouterr().out == "Llama is left out: torchtitan is not installed\n"


@pytest.mark.parametrize("inside", [False, True])
def test_an_archive_has_rows_and_what_was_said_so_far(inside: bool, tmp_path) -> None:
    """Once, also where one folder is in the other, and so is the archive."""
    said = tmp_path / "said"
    rows = (said if inside else tmp_path) / "rows"
    archive = (said if inside else tmp_path / "new") / "all.tar.gz"
    jobs = [
        Job("writes", ("-c", f"open({str(rows / 'some.json')!r}, 'w').write('[]')"), 50),
        Job("late", ("-c", "raise SystemExit('late')"), 50),
    ]
    rows.mkdir(parents=True)
    assert run_all(jobs, said, archive=archive, more=[rows]) == 1
    with tarfile.open(archive) as packed:
        names = sorted(each.name for each in packed if each.isfile())
    kept = "said/rows/some.json" if inside else "rows/some.json"
    assert names == sorted(["said/writes.txt", "said/late.txt", kept])
    assert not [*archive.parent.glob("*.tmp")]


@pytest.mark.parametrize("gpus", [1, 2, 8])
@pytest.mark.parametrize("quick", [True, False])
def test_names_of_jobs_and_of_what_they_say_differ(gpus: int, quick: bool) -> None:
    found = everything.jobs(gpus, quick, everything.kernels(), Path("rows"))
    assert len({job.file for job in found}) == len(found)


@pytest.mark.parametrize(
    ("module", "work", "argv", "said"),
    [
        (decode, "group", ["--batch", "2"], "--batch goes with --keys"),
        (decode, "group", ["--tune", "--ours"], "--ours: not allowed with argument --tune"),
        (decode, "group", ["--ours", "--bits"], "--bits: not allowed with argument --ours"),
        (check, "jobs", ["--gpus", "2"], "--gpus goes with --list"),
        (check, "jobs", ["--gpus", "2", "--only", "rings"], "--gpus goes with --list"),
        (check, "jobs", ["--at-once", "0"], "--at-once must be 1 or more, got 0"),
        (everything, "jobs", ["--gpus", "1", "--quick"], "are for several GPUs, and there is one"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(
    module, work: str, argv: list[str], said: str, capsys, monkeypatch
) -> None:
    monkeypatch.setattr(module, work, mock.Mock(side_effect=AssertionError("it goes to work")))
    with pytest.raises(SystemExit) as ended:
        module.main(argv)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ([], ([8192, 32768], [64, 8], 128, 5)),
        (["--magi"], ([8192], [64, 8], 128, 20)),
        (["--tokens", "64", "32", "--magi", "--repeats", "3"], ([64, 32], [64, 8], 128, 3)),
        (["--magi", "--heads", "4", "2", "--dim-head", "16"], ([8192], [4, 2], 16, 20)),
    ],
)
def test_sizes_of_a_published_grid_give_way_to_those_that_are_given(
    given: list[str], found: tuple, monkeypatch
) -> None:
    seen = []

    def shapes(asked: Namespace, device: torch.device) -> list:
        seen.append((asked.tokens, asked.heads, asked.dim_head, asked.repeats))
        return []

    monkeypatch.setattr(masks, "joined", lambda name: nullcontext(torch.device("cpu")))
    monkeypatch.setattr(masks, "shapes", shapes)
    masks.main(given)
    assert seen == [found]
