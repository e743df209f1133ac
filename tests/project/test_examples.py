"""The examples, end to end and small: what they promise to print is there, and true."""

import doctest
import inspect
import io
import json
import multiprocessing
import os
import re
import runpy
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch.multiprocessing import ProcessRaisedException

from examples import demo, pictures, train_documents, train_text
from examples.train_text import Config, Step
from ring_attention_pytorch.geometry.tiles import Mask, Tile
from tests.support.forks import context
from tests.support.launched import Done, launched
from tests.support.sampling import in_ci
from tests.support.scripts import fails_late

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
TINY = Config(steps=3, length=96, batch=4, dim=16, depth=1, heads=2)
CAUSAL = Mask(causal=True)


class Terminal(io.StringIO):
    """A stdout that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo's ranks are forked from where its imports are, too."""
    for module in (multiprocessing, demo.mp):
        monkeypatch.setattr(module, "get_context", lambda _: context)


@pytest.mark.parametrize(
    "name", [file.stem for file in EXAMPLES if "@click.command" in file.read_text()]
)
def test_an_example_says_its_options_without_processes(name: str) -> None:
    if name == "train_torchtitan":
        pytest.importorskip("torchtitan")
    said = CliRunner().invoke(import_module(f"examples.{name}").main, ["--help"])
    assert (said.exit_code, said.exception) == (0, None)
    assert "Usage:" in said.output


@pytest.mark.parametrize(
    "name", [file.stem for file in EXAMPLES if "ArgumentParser(" in file.read_text()]
)
def test_an_example_without_options_says_what_it_is(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(ROOT / "examples" / f"{name}.py")
    monkeypatch.setattr(sys, "argv", [file, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(file, run_name="__main__")
    assert end.value.code == 0
    assert f"examples/{name}.py" in capsys.readouterr().out


def test_an_example_of_many_processes_alone_says_how_it_is_started() -> None:
    said = CliRunner().invoke(import_module("examples.meshes").main, [])
    assert said.exit_code == 2
    assert "torchrun --nproc-per-node 4 examples/meshes.py" in said.output


def under_torchrun(file: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Over two ranks, on a port that is free."""
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    run += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    return subprocess.run([*run, file, *options], cwd=ROOT, capture_output=True, text=True)


def over_four(file: str, *options: str) -> Done:
    """Over four ranks, which are forked."""
    return launched(file, *options, ranks=4)


@pytest.mark.parametrize(
    ("launch", "options"),
    [
        pytest.param(
            under_torchrun, ["--data-parallel=ddp", "--layout=zigzag"], marks=pytest.mark.thorough
        ),
        (over_four, ["--data-parallel=ddp", "--layout=zigzag", "--layers=ra"]),
        pytest.param(
            over_four, ["--data-parallel=fsdp2", "--layout=striped", "--lookback=20"],
            marks=pytest.mark.thorough,
        ),
    ],
)  # fmt: skip
def test_training_over_ranks_has_one_process_gradients(launch, options):
    small = ["--check", "--steps=1", "--length=101", "--dim=16", "--heads=2"]
    done = launch(str(ROOT / "examples" / "train_text.py"), *small, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS: allowed is 1e-10" in done.stdout
    assert "layers.*.0.to_qkv.1.weight" in done.stdout
    assert done.stdout.count("step     0   loss") == 1
    assert "Warning" not in done.stderr


def test_training_without_torchrun():
    options = "--check --steps 11 --length 64 --dim 16 --heads 2 --depth 1 --dtype bfloat16"
    done = CliRunner().invoke(train_text.main, options.split())
    assert done.exit_code == 0, done.output
    assert "PASS" in done.output
    assert "step     0" in done.output
    assert "step    10" in done.output


def test_a_wrong_gradient_ends_training_with_an_error(monkeypatch):
    monkeypatch.setattr(train_text, "gradient_errors", lambda config: {"weight": 1e-9})
    done = CliRunner().invoke(train_text.main, ["--check"])
    assert done.exit_code == 1
    assert "FAIL" in done.output
    assert "step" not in done.output.split("FAIL")[1]


def test_batches_are_the_same_whoever_draws_them():
    assert torch.equal(train_text.sequences(TINY, 2), train_text.sequences(TINY, 2))
    assert not torch.equal(train_text.sequences(TINY, 2), train_text.sequences(TINY, 3))
    assert train_text.sequences(TINY, 0).shape == (4, 97)


def test_demo_equality(capsys, forked):
    assert demo.show_equality(demo.Screen(), length=37)
    text = capsys.readouterr().out
    assert text.count("PASS") == 25
    assert "24 cases; the worst error is" in text
    assert "\x1b" not in text


def test_demo_fails_for_one_wrong_gradient(capsys, monkeypatch):
    found = [[1e-16] * 4] * 23 + [[1e-16, 1e-16, 1e-9, 1e-16]]
    monkeypatch.setattr(demo, "on_ranks", lambda *_: iter(found))
    assert not demo.show_equality(demo.Screen())
    text = capsys.readouterr().out
    assert text.count("PASS") == 23
    assert "FAIL: 24 cases; the worst error is 1.0e-09" in text


def test_demo_pictures(capsys):
    assert demo.show_pictures(demo.Screen(), seconds=0.0)
    text = capsys.readouterr().out
    for promised in ("zigzag      0000111122223333", "hop 2 left out", "not sent", "triangle"):
        assert promised in text
    assert "the busiest rank does 1.72 x the average; with 8192 tokens 1.75 x" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.thorough
def test_demo_costs(capsys, forked):
    assert demo.show_costs(demo.Screen(), demo.Sizes(batch=2, length=512, bucket=32))
    text = capsys.readouterr().out
    assert text.count("PASS") == 9
    assert "one process, regular" in text


def test_demo_training_equals_one_process(capsys, forked):
    assert demo.show_training(demo.Screen(), TINY)
    text = capsys.readouterr().out
    assert "4 processes  step    1   loss" in text
    assert "one process  step    1   loss" in text
    assert "◉ both" in text
    assert "PASS: losses differ by at most" in text


def test_demo_fails_where_a_loss_differs(capsys, monkeypatch):
    monkeypatch.setattr(demo, "on_ranks", lambda *_: iter([Step(0, 5.0, 1.0), Step(1, 4.0, 1.0)]))
    monkeypatch.setattr(demo, "train", lambda _: iter([Step(0, 5.0, 1.0), Step(1, 4.01, 1.0)]))
    assert not demo.show_training(demo.Screen(), TINY)
    assert "FAIL: losses differ by at most 2.5e-03" in capsys.readouterr().out


def test_demo_ends_with_an_error_where_something_fails(monkeypatch):
    monkeypatch.setitem(demo.PARTS, "costs", lambda screen: False)
    done = CliRunner().invoke(demo.main, ["--part", "costs"])
    assert done.exit_code == 1
    assert "FAIL: not so: costs" in done.output


def test_an_error_in_a_rank_is_raised(forked):
    with pytest.raises(ProcessRaisedException, match="in a rank"):
        list(demo.on_ranks(fails_late))


@pytest.mark.parametrize("rich", [True, False])
def test_a_terminal_gets_colours_with_rich_or_without(monkeypatch, rich):
    if not rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys, "stdout", Terminal())
    screen = demo.Screen()
    assert (screen.console is not None) == rich
    assert demo.show_pictures(screen, seconds=0.0)
    screen.table(["case", ""], [["one", "PASS"], ["two", "FAIL"]])
    text = sys.stdout.getvalue()
    assert "\x1b[38;5;" in text
    assert "two" in text
    assert ("\x1b[1A" in text) == rich  # the picture is drawn over itself


def test_pictures_show_what_their_docstrings_say():
    failed, attempted = doctest.testmod(pictures)
    assert failed == 0
    assert attempted >= 6


def test_hops_shows_owners_states_and_work():
    text = pictures.hops("contiguous", 24, 4, CAUSAL)
    lines = text.splitlines()
    assert lines[0].split() == ["hop", "0", "hop", "1", "hop", "2", "hop", "3", "work"]
    third = next(line for line in lines if line.startswith("rank 2"))
    owners = [word for before, word in zip(third.split(), third.split()[1:]) if before == "keys"]
    assert owners == ["2", "1", "0", "3"]
    assert [text.count(state) for state in ("triangle", "all", "skipped", "part")] == [4, 6, 6, 0]
    assert "7.0%" in text
    assert "43.0%" in text


def test_hops_grows_with_what_is_shown():
    first, last = (pictures.hops("zigzag", 24, 4, CAUSAL, shown=shown) for shown in (1, 4))
    assert "hop 1" not in first
    assert first.count("keys") == 4
    assert last.count("keys") == 16
    assert len(first.splitlines()) == len(last.splitlines())


@pytest.mark.parametrize(("length", "ring_size"), [(0, 2), (3, 4), (7, 3), (5, 1), (40, 8)])
@pytest.mark.parametrize("layout", ["contiguous", "striped", "zigzag"])
def test_pictures_of_any_length_and_ring(layout, length, ring_size):
    for visible in (CAUSAL, Mask(), Mask(True, 2)):
        work = pictures.pairs_by_hop(layout, length, ring_size, visible)
        assert len(work) == ring_size
        text = pictures.hops(layout, length, ring_size, visible)
        assert text.count("rank") == ring_size
    assert sum(map(sum, pictures.pairs_by_hop(layout, length, ring_size, CAUSAL))) == (
        length * (length + 1) // 2
    )


def test_block_state():
    diagonal = Tile(slice(1, 4), slice(0, 3), None, 0)
    assert pictures.block_state([], 4, 4) == "skipped"
    assert pictures.block_state([diagonal], 4, 4) == "triangle"
    assert pictures.block_state([Tile(slice(0, 4), slice(0, 4), None, None)], 4, 4) == "all"
    assert pictures.block_state([Tile(slice(0, 4), slice(0, 4), 2, 0)], 4, 4) == "part"


def test_colour_takes_no_room():
    painted = pictures.hops("striped", 24, 4, CAUSAL, paint=pictures.colour)
    assert painted != pictures.hops("striped", 24, 4, CAUSAL)
    assert pictures._ESCAPE.sub("", painted) == pictures.hops("striped", 24, 4, CAUSAL)


def test_curves_mark_what_differs():
    text = pictures.curves({"a": [3.0, 2.0, 1.0], "b": [3.0, 2.0, 2.0]}, height=3)
    assert text.splitlines()[:3] == ["   3.00 │◉", "        │ ◉○", "   1.00 │  ●"]
    assert pictures.curves({"a": [2.0]}).count("●") == 2


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("train_embeddings", ["--pool=mean"]),
        ("train_embeddings", ["--pool=last"]),
        ("train_reranker", []),
        ("distill", []),
    ],
)
def test_losses_over_four_ranks_are_those_of_one_process(name, options):
    pytest.importorskip("transformers")
    file = ROOT / "examples" / f"{name}.py"
    assert sum(map(bool, file.read_text().splitlines())) <= 60
    found = []
    for ranks in (1, 4):
        done = launched(str(file), *options, ranks=ranks)
        assert done.returncode == 0, done.stdout + done.stderr
        found.append([float(loss) for loss in re.findall(r"loss (\S+)", done.stdout)])
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert len({*found[0]}) == 3  # each step has its own


@in_ci
def test_training_on_documents_is_that_of_one_process(tmp_path):
    many, one, curves = (tmp_path / name for name in ("many.json", "one.json", "curves.svg"))
    small = ["--steps=3", "--length=101", "--double"]
    done = launched("examples/train_documents.py", *small, f"--losses={many}", ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    run = CliRunner()
    assert run.invoke(train_documents.main, [*small, f"--losses={one}"]).exit_code == 0
    pairs = zip(json.loads(many.read_text()), json.loads(one.read_text()), strict=True)
    assert max(abs(a - b) for a, b in pairs) < 1e-10
    drawn = run.invoke(train_documents.main, ["--draw", str(many), str(one), str(curves)])
    assert "3 steps" in drawn.output
    assert curves.read_text().count("<polyline") == 2


def test_training_on_documents_has_four_lines_of_ours():
    text = Path(train_documents.__file__).read_text()
    assert len(re.findall(r"# [1-9]: ", text)) == 4
    step = inspect.getsource(train_documents.train).splitlines()
    assert len(step) + len(inspect.getsource(train_documents.Block.forward).splitlines()) <= 30


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="limits and figures of memory are Linux's")
def test_a_prompt_that_one_process_cannot_hold_generates_over_four():
    options = "--tokens=4096 --new=8 --chunk=256 --budget=30"
    done = subprocess.run(
        [sys.executable, "-m", "examples.long_prompt", *options.split()],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same limit: RingCache: 4104 tokens" in done.stdout
    assert "do not fit the memory of this process" in done.stdout
    assert done.stdout.splitlines()[-1] == "PASS"
