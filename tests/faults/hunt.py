"""Whether planted faults are found, as JSON: `python -m tests.faults.hunt tests.faults.attention`.

First it is learnt, of the package as it is, which case of a battery reaches which function and how
long it takes. Then each fault is planted in a process of its own, forked from this one, that runs
cases until one fails: first those that reach the function, the quickest of them before others.
"""

import gc
import importlib
import json
import multiprocessing as mp
import pkgutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import redirect_stdout, suppress
from functools import partial
from io import StringIO
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple
from unittest import mock

import torch

from tests.faults.mutant import PACKAGE, Fault, Misplaced, Place, Sources
from tests.faults.planting import Planter
from tests.support import threads

SECONDS = 120  # of a CPU, that a battery may take over a fault
BUSY = 8  # times as long it may take where others want the CPUs, too, or if it hangs
PATIENCE = 10.0  # seconds, after which ranks that are threads wait no more for a faulty one
Case = Callable[[], None]


class Learnt(NamedTuple):
    """Facts about the cases of a battery, with the package as it is."""

    problem: str  # of the first that fails, if any does
    reached: list[set[tuple[str, str]]]  # file and name of functions that have faults
    seconds: list[float]
    modules: list[str]  # that were imported meanwhile


class Verdict(NamedTuple):
    found: bool
    said: str


# --- in processes of their own ---


def learn(planter: Planter, cases: Sequence[Case], now: set[tuple[str, str]]) -> Learnt:
    """Run each case; `now` is what functions are added to that are reached (`Planter.marked`)."""
    before = {*sys.modules}
    reached, seconds = [], []
    for number, case in enumerate(cases):
        now.clear()
        begin = time.process_time()  # of all threads, whatever else the machine does
        if said := _problem(planter, case):
            return Learnt(f"case {number}: {said}", [], [], [])
        seconds.append(time.process_time() - begin)
        reached.append({*now})
    return Learnt("", reached, seconds, [name for name in sys.modules if name not in before])


def judge(planter: Planter, cases: Sequence[Case], learnt: Learnt, mutant: Fault) -> Verdict:
    """Return whether a case fails when the fault is planted, or why nothing was."""
    if learnt.problem:
        return Verdict(False, f"not planted, for without it {learnt.problem}")
    try:
        place = planter.plant(mutant)
    except Misplaced as error:
        return Verdict(False, str(error))
    away = [place[:2] not in reached for reached in learnt.reached]
    with mock.patch.object(threads, "PATIENCE", PATIENCE):
        for number in sorted(range(len(cases)), key=lambda i: (away[i], learnt.seconds[i])):
            if said := _problem(planter, cases[number]):
                return Verdict(True, f"case {number}: {said}")
    return Verdict(False, f"{away.count(False)} cases reach {mutant.where}, and none fails")


def places(planter: Planter, planted: Iterable[Fault]) -> list[Place]:
    """Return where faults belong, of those that can be planted."""
    found = []
    for mutant in planted:
        with suppress(Misplaced):  # which is said when it is to be planted
            place = planter.sources.find(mutant.where)
            if planter.reaches(f"{place.file}:{place.name}"):
                found.append(place)
    return found


def _problem(planter: Planter, case: Case) -> str:
    """Return what a case finds wrong, as if it were the first to run."""
    planter.forget()
    torch.manual_seed(0)  # else a fault may show in some runs only
    try:
        with redirect_stdout(StringIO()):
            case()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"[:300]
    return ""


# --- which are started here ---


def forked(jobs: Iterable[Callable[[], Any]], ended: Any) -> list[Any]:
    """Return what each job returns, in a process of its own; `ended` if that ended too soon."""
    answers = dict(as_they_end(jobs, ended, SECONDS))
    return [answers[number] for number in sorted(answers)]


def as_they_end(
    jobs: Iterable[Callable[[], Any]], ended: Any, seconds: int, at_once: int = 2
) -> Iterator[tuple[int, Any]]:
    """The number of each job and what it returns, those first that are done first."""
    waiting = list(enumerate(jobs))[::-1]
    running: dict[Connection, tuple[int, mp.Process]] = {}
    while waiting or running:
        while waiting and len(running) < at_once:
            number, job = waiting.pop()
            ours, process = _start(job, seconds)
            running[ours] = number, process
        for ready in wait(list(running)):
            number, process = running.pop(ready)
            try:
                answer = ready.recv()
            except EOFError:
                answer = ended
            process.kill()
            process.join()
            yield number, answer


def _start(job: Callable[[], Any], seconds: int) -> tuple[Connection, mp.Process]:
    context = mp.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(job, theirs, seconds))
    process.start()
    theirs.close()
    return ours, process


def _answer(job: Callable[[], Any], to: Connection, seconds: int) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    # the end, whatever this process does and whoever waits for it
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.alarm(BUSY * seconds)
    torch.set_num_threads(1)  # before any other thread asks, for only one may be the first
    to.send(job())


def import_package(prefix: str = "") -> None:
    """All of it that faults are planted into, or the files whose names begin so."""
    prefix = f"{PACKAGE.name}.{prefix.removesuffix('.py').replace('/', '.')}"
    for found in pkgutil.walk_packages([str(PACKAGE)], f"{PACKAGE.name}."):
        if not found.name.startswith(prefix):
            continue
        if "._triton" not in found.name and ".compat." not in found.name:  # GPUs alone; old paths
            importlib.import_module(found.name)


def import_too(names: Iterable[str]) -> None:
    """Import the modules that cases import, so that not each process has to."""
    for name in sorted(names):
        with suppress(ImportError):  # not all of them come by their name
            importlib.import_module(name)
    gc.freeze()  # what is here already is not looked through in each process


def verdicts(names: Sequence[str]) -> dict[str, dict[str, Verdict]]:
    """On the faults of each module; "" is the package as it is."""
    import_package()
    modules = [importlib.import_module(name) for name in names]
    lists = [(list(module.battery()), module.MUTANTS) for module in modules]
    planter = Planter(Sources())
    too_long = Learnt(f"no end in {SECONDS} s", [], [], [])
    everywhere = places(planter, (mutant for _, planted in lists for mutant in planted))
    with planter.marked(everywhere) as now:
        learnt = forked((partial(learn, planter, cases, now) for cases, _ in lists), too_long)
    import_too({name for each in learnt for name in each.modules})
    jobs = [
        partial(judge, planter, cases, known, mutant)
        for (cases, planted), known in zip(lists, learnt)
        for mutant in planted
    ]
    told = iter(forked(jobs, Verdict(True, f"died, or no end in {SECONDS} s")))
    return {
        name: {"": Verdict(bool(known.problem), known.problem)}
        | {mutant.name: next(told) for mutant in planted}
        for name, (_, planted), known in zip(names, lists, learnt)
    }


def main(*names: str) -> None:
    print(json.dumps(verdicts(names)))


if __name__ == "__main__":
    main(*sys.argv[1:])
