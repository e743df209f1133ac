"""Rows of results, as benchmarks/results/*.json have them: flat, one figure each.

A row says what was measured (`Subject`, tokens, mask), of which pass, and the figure. A run adds
when, where, of which revision and by which command.
"""

import datetime
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

RESULTS = Path(__file__).parents[1] / "results"
PASSES = ("forward", "backward", "both")
ONE_BY_ONE, GRAPH = "one by one", "graph"
WHO = ("ranks", "rank", "batch", "tokens", "mask", "head_dim", "subject", "kernel", "mode")
UNSHOWN = (*WHO, "pass", "heads", "dtype", "load", "losses")
Row = dict[str, Any]


class Subject(NamedTuple):
    """A subject of a measurement: its name, its kernel if it is one of ours, how it is launched."""

    name: str
    kernel: str | None = None
    mode: str = ONE_BY_ONE

    def about(self) -> Row:
        """Return what rows say of it."""
        return {"subject": self.name, "kernel": self.kernel, "mode": self.mode}


def rounded(figure: float) -> float:
    """Round to three digits, or to a whole number.

    >>> rounded(84.7512), rounded(575.4), rounded(1234.5)
    (84.8, 575, 1234)
    """
    return round(figure) if figure >= 100 else float(f"{figure:.3g}")


def tflops(flops: float, forward: float, both: float) -> list[float]:
    """Return TF/s of each pass, by seconds; backward has 2.5 times forward's FLOPs.

    >>> tflops(4e12, 2.0, 7.0)
    [2.0, 2.0, 2.0]
    """
    backward = both - forward
    lost = backward <= 0  # in noise
    return [
        flops / forward / 1e12,
        float("nan") if lost else 2.5 * flops / backward / 1e12,
        3.5 * flops / both / 1e12,
    ]


def microseconds(forward: float, both: float) -> list[float]:
    """Return microseconds of each pass, by seconds.

    >>> microseconds(1.0, 3.5)
    [1000000.0, 2500000.0, 3500000.0]
    """
    return [1e6 * forward, 1e6 * (both - forward), 1e6 * both]


def by_pass(about: Row, unit: str, figures: Sequence[float], **of_both: Any) -> list[Row]:
    """Make a row of each pass, unless noise has swallowed it.

    Args:
        about: what every row says.
        unit: the name of the figures.
        figures: forward, backward and both.
        of_both: what the row of both passes says, too; None is left out.

    >>> for row in by_pass({"subject": "ring"}, "tflops", [5, float("nan"), 7], share=None):
    ...     print(row)
    {'subject': 'ring', 'pass': 'forward', 'tflops': 5.0}
    {'subject': 'ring', 'pass': 'both', 'tflops': 7.0}
    """
    rows = [
        {**about, "pass": each, unit: rounded(figure)}
        for each, figure in zip(PASSES, figures)
        if figure > 0
    ]
    rows[-1] |= {name: value for name, value in of_both.items() if value is not None}
    return rows


def failed(about: Row, problem: str) -> list[Row]:
    """Make the row of what could not be measured; it is shown and not kept."""
    return [{**about, "pass": "both", "failed": problem}]


def named_errors(names: Sequence[str], errors: Sequence[float]) -> dict[str, float]:
    """Keep one digit of each error.

    >>> named_errors(("out", "dq"), (0.00312, 2.9e-7))
    {'out': 0.003, 'dq': 3e-07}
    """
    return {name: float(f"{error:.0e}") for name, error in zip(names, errors)}


class Run:
    """The rows of one run: shown and kept as they come, and shown as a table at its end.

    They are kept in `file`, if that is not None; so those of a run that ends early are there.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str] | None,
        device: str,
        file: Path | None = None,
        **facts: Any,
    ) -> None:
        self.file = file
        self.parts: dict[str, list[Row]] = {}
        self.first = not dist.is_initialized() or dist.get_rank() == 0
        self.facts = dict(
            device=device, date=str(datetime.date.today()), torch=torch.__version__, **facts,
            revision=revision(), command=command(name, sys.argv[1:] if argv is None else argv),
        )  # fmt: skip

    def add(self, rows: Iterable[Row], part: str = "") -> None:
        """Show new rows; those of a part have a table of their own."""
        new = list(rows)
        self.parts.setdefault(part, []).extend(new)
        if self.first:
            for line in lines(new):
                print(" | ".join(map(cell, line.values())), flush=True)
            self._save()

    def _save(self) -> None:
        rows = [row for rows in self.parts.values() for row in rows if "failed" not in row]
        if self.file is not None:
            save([self.facts | row for row in rows], self.file)

    def finish(self) -> None:
        """Print all rows in tables, and where they are kept."""
        if not self.first:
            return
        print("\n" + ", ".join(f"{name} {fact}" for name, fact in self.facts.items()))
        for part, rows in self.parts.items():
            print(f"\n{part}\n\n{table(rows)}" if part else f"\n{table(rows)}")
        if self.file is not None:
            print(f"\nsaved {self.file}")


def lines(rows: Iterable[Row]) -> list[Row]:
    """Join the rows of a subject's passes, as one line of a table."""
    found: dict[tuple[tuple[str, Any], ...], Row] = {}
    for row in rows:
        who = tuple((name, row[name]) for name in WHO if name in row)
        of = f"{row['pass']} " if row.get("pass", "both") != "both" else ""
        figures = {of + name: row[name] for name in row if name not in UNSHOWN}
        found.setdefault(who, dict(who)).update(figures)
    return list(found.values())


def table(rows: Sequence[Row]) -> str:
    """Write rows in Markdown, a line for each subject.

    >>> print(table(by_pass({"tokens": 64}, "tflops", [1, 2, 3], share=0.5)))
    | tokens | forward tflops | backward tflops | tflops | share |
    | --- | --- | --- | --- | --- |
    | 64 | 1.0 | 2.0 | 3.0 | 0.5 |
    """
    found = lines(rows)
    head = list(dict.fromkeys(name for line in found for name in line))
    cells = [[cell(line.get(name)) for name in head] for line in found]
    return markdown(head, cells)


def markdown(head: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """Write a table in Markdown."""
    every = [head, ["---"] * len(head), *cells]
    return "\n".join("| " + " | ".join(line).replace("\n", " ") + " |" for line in every)


def cell(value: Any) -> str:
    """Write a value; errors, which have names, in one digit.

    >>> cell({"out": 0.00312, "dq": 0.0029}), cell([1.5, 2]), cell(None)
    ('3e-03, 3e-03', '1.5, 2', '')
    """
    if isinstance(value, dict):
        return ", ".join(f"{each:.0e}" for each in value.values())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)


def save(rows: Sequence[Row], file: Path) -> None:
    """Put rows before those of a file, less those of the same command on the same device."""
    old = json.loads(file.read_text()) if file.exists() else []
    new = {(row["command"], row["device"]) for row in rows}
    kept = [row for row in old if (row.get("command"), row["device"]) not in new]
    text = ",\n".join(json.dumps(row) for row in [*rows, *kept])
    half = file.with_suffix(".tmp")
    half.write_text(f"[\n{text}\n]\n")
    half.replace(file)  # whole, whenever this process ends


def command(name: str, argv: Sequence[str]) -> str:
    """Return the command that runs this again, without `--save`."""
    python = "python"
    if dist.is_torchelastic_launched():
        python = f"torchrun --nproc-per-node {os.environ['LOCAL_WORLD_SIZE']}"
    options = re.sub(r"--save( (?!--)\S+)?", "", shlex.join(argv))
    return " ".join([python, "-m benchmarks", name, *options.split()])


def revision() -> str:
    """Return the commit that is checked out, or "unknown" without git."""
    asked = ["git", "rev-parse", "--short=7", "HEAD"]
    try:
        said = subprocess.run(asked, cwd=RESULTS.parent, capture_output=True, text=True)
    except FileNotFoundError:
        return "unknown"
    return said.stdout.strip() or "unknown"
