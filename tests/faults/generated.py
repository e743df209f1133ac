"""Faults that nobody has written: `python -m tests.faults.generated --folder geometry`.

Each is a change in the syntax tree of a function (`changes`). It is hunted with the cases of the
tests beside that need this process alone, and with the batteries that answer for the file. Those
that nothing finds are in `survivors`, with a reason; any other is a gap in the tests.
"""

import argparse
import ast
import gc
import importlib
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from hypothesis import Phase, settings

from tests.faults import BATTERIES, hunt
from tests.faults.changes import Change, changes
from tests.faults.hunt import Case, Learnt, Verdict
from tests.faults.mutant import Misplaced, Sources, definitions
from tests.faults.planting import Planter
from tests.faults.survivors import SURVIVORS

SECONDS = 30  # of a CPU, at most, for a case to run once, and for the cases over a fault
TOGETHER = 8  # cases that run once in one process
ENOUGH = 12  # seconds of a CPU that the cases over a fault take: the slowest are left out
CASES = {
    "geometry/layouts.py": ("geometry/test_layouts*.py",),
    "geometry/tiles.py": tuple(f"geometry/test_{of}*.py" for of in ("layouts", "tiles", "masks")),
    **dict.fromkeys(
        ("geometry/balance.py", "geometry/documents.py", "geometry/segments.py"),
        ("geometry/test_[!l]*.py", "geometry/test_layouts*.py"),
    ),
    "schedule/": ("schedule/test_*.py",),
    "runtime/accumulate.py": ("runtime/test_running*.py", "runtime/test_accumulate*.py"),
    "runtime/rowwise.py": ("runtime/test_merge*.py", "runtime/test_rowwise*.py"),
    "ranks/agreement.py": ("ranks/test_agreement*.py", "stories/test_every_rank_hears*.py"),
    "ranks/notes.py": ("ranks/test_notes*.py",),
    "comm/collectives.py": ("comm/test_collectives*.py",),
    "recurrent/levels.py": ("recurrent/test_l*.py",),
    "plan/masks.py": ("plan/test_alike*.py", "plan/test_masks*.py"),
}
"""Test files whose cases answer for what a part of the package does."""


class Generated(NamedTuple):
    """The `number`-th change of its kind in a function."""

    where: str
    kind: str
    number: int

    @property
    def name(self) -> str:
        return f"{self.where}:{self.kind}:{self.number}"

    def tree(self, sources: Sources) -> ast.Module:
        tree, change = self._found(sources)
        change.make()
        return ast.fix_missing_locations(tree)

    def said(self, sources: Sources) -> str:
        """Its line, and what stands there before and after."""
        _, change = self._found(sources)
        line, before = getattr(change.at, "lineno", 0), _text(change.at)
        change.make()
        return f"line {line}: {before}  ->  {_text(change.at)}"

    def _found(self, sources: Sources) -> tuple[ast.Module, Change]:
        file, _, name = self.where.partition(":")
        tree = ast.parse(sources.texts[file])
        (function,) = (node for found, node in definitions(tree) if found == name)
        same = [change for change in changes(function) if change.kind == self.kind]
        if self.number >= len(same):
            raise Misplaced(f"{self.name}: there are {len(same)} of that kind")
        return tree, same[self.number]


def _text(node: ast.AST) -> str:
    return ast.unparse(ast.fix_missing_locations(node)).partition("\n")[0][:70]


def generated(sources: Sources, prefix: str = "") -> Iterator[Generated]:
    """All of the files whose names begin so, in a stable order."""
    for file, text in sources.texts.items():
        if not file.startswith(prefix):
            continue
        found = [*definitions(ast.parse(text))]
        times = Counter(name for name, _ in found)
        for name, node in found:
            if isinstance(node, ast.FunctionDef) and times[name] == 1 and not _is_elsewhere(node):
                numbers = Counter[str]()
                for change in changes(node):
                    yield Generated(f"{file}:{name}", change.kind, numbers[change.kind])
                    numbers[change.kind] += 1


def _is_elsewhere(function: ast.FunctionDef) -> bool:
    """A kernel that Triton compiles, or one that is there for type checkers."""
    names = {node.attr for each in function.decorator_list for node in ast.walk(each)
             if isinstance(node, ast.Attribute)}  # fmt: skip
    names |= {node.id for node in function.decorator_list if isinstance(node, ast.Name)}
    return bool(names & {"jit", "overload"}) or function.name in ("__repr__", "__str__")


def sampled(faults: Sequence[Generated], number: int, seed: int = 0) -> list[Generated]:
    """So many of them; a change in one function draws no others elsewhere."""
    return sorted(faults, key=lambda fault: zlib.crc32(f"{seed} {fault.name}".encode()))[:number]


# --- the hunt ---


class Hunter:
    """Who knows which cases reach which function, for some files of the package."""

    def __init__(self, prefix: str, processes: int = 2, quick: bool = False) -> None:
        settings.register_profile("hunt", derandomize=True, database=None, deadline=None,
                                  phases=(Phase.explicit, Phase.generate))  # fmt: skip
        settings.load_profile("hunt")
        torch.set_num_threads(1)
        from tests.faults.cases import cases_of

        hunt.import_package(prefix)
        patterns = {each: 0 for at, found in CASES.items() for each in found if _covers(at, prefix)}
        self.cases: list[Case] = [case for each in patterns for case in cases_of(each)]
        for name in () if quick else BATTERIES:
            battery = importlib.import_module(f"tests.faults.{name}")
            if any(_covers(at, prefix) for at in battery.ANSWERS_FOR):
                self.cases += battery.battery()
        gc.unfreeze()  # what is frozen is not found
        self.planter = Planter(Sources())
        self.faults = [
            fault
            for fault in generated(self.planter.sources, prefix)
            if self.planter.reaches(fault.where)
        ]
        self.learnt: list[Learnt] = []
        self.processes = processes
        self.left_out = 0

    def learn(self) -> None:
        """Leaves out what fails, or does not end, in a process of its own without any fault."""
        one_each = {fault.where: fault for fault in self.faults}.values()
        numbers = range(len(self.cases))
        together = [numbers[i : i + TOGETHER] for i in numbers[::TOGETHER]]
        with self.planter.marked(hunt.places(self.planter, one_each)) as now:
            known = self._known(together, now)
        hunt.import_too({name for each in known.values() for name in each.modules})
        good = [number for number in sorted(known) if not known[number].problem]
        self.left_out = len(self.cases) - len(good)
        self.cases = [self.cases[number] for number in good]
        self.learnt = [known[number] for number in good]

    def _known(self, together: list[Sequence[int]], now: set[tuple[str, str]]) -> dict[int, Learnt]:
        """Learn of cases by their numbers, some in a process; each alone where one fails."""
        jobs = [
            partial(hunt.learn, self.planter, [self.cases[number] for number in some], now)
            for some in together
        ]
        ended = Learnt("no end", [], [], [])
        known: dict[int, Learnt] = {}
        apart: list[Sequence[int]] = []
        for at, each in hunt.as_they_end(jobs, ended, SECONDS, self.processes):
            if not each.problem:
                of_each = zip(together[at], each.reached, each.seconds)
                known |= {n: Learnt("", [r], [s], each.modules) for n, r, s in of_each}
            elif len(together[at]) > 1:
                apart += [(number,) for number in together[at]]
            else:
                known[together[at][0]] = each
        return known | self._known(apart, now) if apart else known

    def verdicts(self, faults: Sequence[Generated]) -> Iterator[tuple[Generated, Verdict]]:
        """As they come."""
        ended = Verdict(True, f"died, or no end in {SECONDS} s")
        jobs = [partial(hunt.judge, self.planter, *self._near(fault), fault) for fault in faults]
        for number, verdict in hunt.as_they_end(jobs, ended, SECONDS, self.processes):
            yield faults[number], verdict

    def _near(self, fault: Generated) -> tuple[list[Case], Learnt]:
        """The cases that reach a fault, the quickest of them."""
        at = tuple(fault.where.split(":"))
        near = [number for number, each in enumerate(self.learnt) if at in each.reached[0]]
        near.sort(key=lambda number: self.learnt[number].seconds[0])
        times = accumulate(self.learnt[number].seconds[0] for number in near)
        near = [number for number, until in zip(near, times) if until < ENOUGH]
        reached = [self.learnt[number].reached[0] for number in near]
        seconds = [self.learnt[number].seconds[0] for number in near]
        return [self.cases[number] for number in near], Learnt("", reached, seconds, [])


def _covers(a: str, b: str) -> bool:
    return a.startswith(b) or b.startswith(a)


OUTCOMES = ("killed", "alive", "no case", "no room")


def outcome(verdict: Verdict) -> str:
    """There is "no room" for a fault without which a function loses an enclosing name, say."""
    if verdict.found:
        return "killed"
    if "cases reach" not in verdict.said:
        return "no room"
    return "no case" if verdict.said.startswith("0 cases") else "alive"


def told(hunter: Hunter, faults: Sequence[Generated]) -> dict[str, str]:
    """Survivors and what they are; a table, and how far it is, go to the terminal."""
    counts: dict[str, Counter[str]] = {}
    survived: dict[str, str] = {}
    begin = time.monotonic()
    for number, (fault, verdict) in enumerate(hunter.verdicts(faults)):
        came = outcome(verdict)
        counts.setdefault(fault.where.partition(":")[0], Counter())[came] += 1
        if came in ("alive", "no case"):
            survived[fault.name] = f"{came}, {fault.said(hunter.planter.sources)}"
        if sys.stderr.isatty() or number % 100 == 99:
            seconds = time.monotonic() - begin
            print(f"{number + 1} of {len(faults)}, {seconds:.0f} s", end="\r", file=sys.stderr)
    print(f"{'':32}{'faults':>9}" + "".join(f"{name:>9}" for name in OUTCOMES))
    for file, count in sorted(counts.items()):
        print(f"{file:32}{count.total():9}" + "".join(f"{count[name]:9}" for name in OUTCOMES))
    return survived


def main() -> int:
    parser = argparse.ArgumentParser(description="Hunt generated faults.")
    parser.add_argument("--folder", nargs="+", default=["geometry"], help="or a file, or several")
    parser.add_argument("--sample", type=int, help="so many of each; all if not given")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--quick", action="store_true", help="by the tests beside alone")
    parser.add_argument("--processes", type=int, default=2, help="at the same time")
    given = parser.parse_args()
    return max([_hunted(folder, given) for folder in given.folder])


def _hunted(folder: str, given: argparse.Namespace) -> bool:
    """True if any fault survives that is not listed."""
    begin = time.monotonic()
    hunter = Hunter(folder, given.processes, given.quick)
    hunter.learn()
    print(f"{folder}: {len(hunter.cases)} cases, {hunter.left_out} left out; "
          f"{len(hunter.faults)} faults; {time.monotonic() - begin:.0f} s", flush=True)  # fmt: skip
    faults = hunter.faults
    if given.sample is not None:
        faults = sampled(faults, given.sample, given.seed)
    survived = told(hunter, faults)
    known = survived.keys() & SURVIVORS.keys()
    for name in sorted(survived.keys() - known):
        print(f"{name}\n    {survived[name]}")
    for name in sorted(({fault.name for fault in faults} & SURVIVORS.keys()) - known):
        print(f"{name} is found now: take it from tests/faults/survivors.py")
    if survived.keys() - known:
        print("Nothing finds these. Write the test that does, beside; or, if the fault changes "
              "nothing, add its name and the reason to tests/faults/survivors.py.")  # fmt: skip
    print(f"{len(survived) - len(known)} new survivors, {len(known)} known; "
          f"{time.monotonic() - begin:.0f} s", flush=True)  # fmt: skip
    return bool(survived.keys() - known) or not hunter.cases


if __name__ == "__main__":
    sys.exit(main())
