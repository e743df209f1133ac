"""Training that goes on after a process was killed, with the same numbers to the last bit."""

import os
import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils._pytree import tree_flatten_with_path

from examples import train_text
from examples.train_text import Checkpoints, Config
from tests.support.launched import launched
from tests.support.scripts import ROOT, WAIT, Script, linux

STEPS, EVERY = 24, 5
TINY = [
    f"--steps={STEPS}", f"--checkpoint-every={EVERY}", "--length=48", "--batch=6", "--dim=16",
    "--heads=2", "--depth=1", "--timeout=600",
]  # fmt: skip


def training(folder: Path, *options: str) -> list[str]:
    """`examples/train_text.py` with files in this folder, which is made."""
    folder.mkdir()
    files = f"--losses={folder / 'losses'}", f"--checkpoint={folder / 'run'}"
    return [str(ROOT / "examples" / "train_text.py"), *files, *TINY, *options]


def losses(folder: Path) -> dict[int, list[str]]:
    """Read all losses ever written of each step: several where it was repeated."""
    found: dict[int, list[str]] = defaultdict(list)
    if (folder / "losses").exists():
        for line in (folder / "losses").read_text().splitlines():
            step, loss = line.split()
            found[int(step)].append(loss)
    return found


def state(folder: Path) -> dict[str, Any]:
    """All that the last checkpoint holds, by name."""
    assert [path.name for path in (folder / "run").iterdir()] == [f"step-{STEPS}"]
    dcp_to_torch_save(folder / "run" / f"step-{STEPS}", folder / "state")
    leaves, _ = tree_flatten_with_path(torch.load(folder / "state"))
    return {str(path): leaf for path, leaf in leaves}


@linux
@pytest.mark.thorough
@pytest.mark.parametrize(("data_parallel", "ranks"), [("fsdp2", 2), ("ddp", 3)])
def test_after_a_kill_all_numbers_are_those_of_an_undisturbed_run(tmp_path, data_parallel, ranks):
    calm, struck = tmp_path / "calm", tmp_path / "struck"
    how = f"--data-parallel={data_parallel}"
    done = launched(*training(calm, how), ranks=ranks)
    assert done.returncode == 0, done.stderr
    torchrun = [
        "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
        "--max-restarts=1",
    ]  # fmt: skip
    with Script(*torchrun, *training(struck, how), folder=struck) as script:
        script.until(lambda: len(losses(struck)) > 2 * EVERY + 1)
        [victim] = script.others(having="RANK=1")
        os.kill(victim, signal.SIGKILL)
        assert script.ends(WAIT) == 0, script.text()
    wanted, found = losses(calm), losses(struck)
    assert list(wanted) == list(range(STEPS)) == sorted(found)
    assert all(len(each) == 1 for each in wanted.values())
    assert any(len(each) == 2 for each in found.values()), "nothing was repeated"
    assert all({*found[step]} == {*wanted[step]} for step in wanted)
    numbers = state(calm)
    assert len(numbers) > 50
    for name, value in state(struck).items():
        same = torch.equal(value, numbers[name]) if torch.is_tensor(value) else None
        assert value == numbers[name] if same is None else same, name


def alone(folder: Path, steps: int) -> list[str]:
    """Losses of training without torchrun, to so many steps in all."""
    options = [*TINY, f"--steps={steps}", f"--losses={folder / 'losses'}"]
    options.append(f"--checkpoint={folder / 'run'}")
    done = CliRunner().invoke(train_text.main, options)
    assert done.exit_code == 0, done.output
    return [loss for each in losses(folder).values() for loss in each]


def test_one_process_goes_on_where_it_ended(tmp_path):
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole = alone(tmp_path / "whole", 7)
    assert len(whole) == 7
    assert [len(alone(tmp_path / "parts", steps)) for steps in (3, 3, 7)] == [3, 3, 7]
    assert alone(tmp_path / "parts", 7) == whole
    assert [path.name for path in (tmp_path / "parts" / "run").iterdir()] == ["step-7"]


class Killed(BaseException):
    """An end of a process that it does not handle."""


@pytest.mark.parametrize("moment", ["dcp.save", "os.replace", "shutil.rmtree"])
def test_whenever_it_is_killed_there_is_a_checkpoint(tmp_path, monkeypatch, moment):
    """Killed before and after each act of the second save: it goes on from one of the two."""
    config = Config(steps=4, length=24, batch=2, dim=16, depth=1, heads=2)
    checkpoints = Checkpoints(tmp_path, every=2)
    wanted = [step.loss for step in train_text.train(config)]
    owner = {"dcp.save": train_text.dcp, "os.replace": os, "shutil.rmtree": train_text.shutil}
    name, act = moment.split(".")[1], getattr(owner[moment], moment.split(".")[1])

    for before in (True, False):
        steps = train_text.train(config, checkpoints)
        found = [next(steps).loss for _ in range(3)]  # one save is over

        def strike(*args: Any, before: bool = before, **kwargs: Any) -> None:
            if not before:
                act(*args, **kwargs)
            raise Killed

        with monkeypatch.context() as patch:
            patch.setattr(owner[moment], name, strike)
            found.append(next(steps).loss)
            with pytest.raises(Killed):
                next(steps)
        assert found == wanted
        again = list(train_text.train(config, checkpoints))
        assert [step.loss for step in again] == wanted[4 - len(again) :]
        assert len(again) in (0, 2)
        assert [path.name for path in tmp_path.iterdir()] == ["step-4"]
        for path in tmp_path.iterdir():
            train_text.shutil.rmtree(path)
