"""The cases of test files, as a battery has them: those that need this process alone."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import pytest

from tests.faults.hunt import Case
from tests.faults.mutant import FOLDERS

_LEFT_OUT = {"skip", "skipif", "xfail", "thorough", "usefixtures", "several_gpus"}
_OF_ALL = {"test_the_examples_in_docstrings_are_true"}  # which import all of the package


def cases_of(pattern: str) -> Iterator[Case]:
    """Yield the cases of all test files that fit, "geometry/test_*.py" say, as pytest would."""
    for file in sorted(FOLDERS.glob(pattern)):
        module = import_module(f"tests.{file.parent.name}.{file.stem}")
        for name, function in vars(module).items():
            if name.startswith("test_") and callable(function) and name not in _OF_ALL:
                yield from _cases(module, function)


def _cases(module: ModuleType, function: Callable[..., None]) -> Iterator[Case]:
    marks = [*_marks(module), *_marks(function)]
    if _LEFT_OUT & {mark.name for mark in marks}:
        return
    tables = [list(_rows(*mark.args[:2])) for mark in marks if mark.name == "parametrize"]
    for rows in product(*tables):
        given = {name: value for row in rows for name, value in row.items()}
        wanted = {*_parameters(function)} - {*given}
        if wanted <= {"monkeypatch", "tmp_path"}:
            yield partial(_run, function, given, wanted)


def _marks(thing: object) -> list[Any]:
    found = getattr(thing, "pytestmark", [])
    return found if isinstance(found, list) else [found]


def _rows(names: str | tuple[str, ...], values: Any) -> Iterator[dict[str, Any]]:
    names = [n.strip() for n in names.split(",")] if isinstance(names, str) else [*names]
    for value in values:
        if hasattr(value, "marks"):  # pytest.param
            if value.marks:
                continue
            row = value.values
        else:
            row = [value] if len(names) == 1 else value
        yield dict(zip(names, row))


def _parameters(function: Callable[..., None]) -> list[str]:
    """List a test's parameters from pytest; Hypothesis gives its own, and hides them."""
    return [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is parameter.empty
    ]


def _run(function: Callable[..., None], given: dict[str, Any], wanted: set[str]) -> None:
    with ExitStack() as stack:
        fixtures = {}
        if "monkeypatch" in wanted:
            fixtures["monkeypatch"] = stack.enter_context(pytest.MonkeyPatch.context())
        if "tmp_path" in wanted:
            fixtures["tmp_path"] = Path(stack.enter_context(TemporaryDirectory()))
        function(**given, **fixtures)
