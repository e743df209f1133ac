"""The public surface: what it is, right calls of all of it, and wrong ones made of these.

__all__, docs/reference, names of 0.5.20  ──►  public()       what there is, by name
tests/support/surface_calls.py            ──►  a right call of each, by name of its parameters
wrong(call)                               ──►  the same call with one argument wrong
"""

import importlib
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

PACKAGE = "ring_attention_pytorch"
OTHERS_ARGUMENTS = ("trainer", "grpo", "accelerate")  # whose classes take what their packages' do
REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


def public(original: Mapping[str, str]) -> dict[str, Any]:
    """Return all functions and classes that users call, by name, and methods by `Class.name`.

    `original`: names of 0.5.20, by module.
    """
    paths = {(PACKAGE, name) for name in importlib.import_module(PACKAGE).__all__}
    for page in REFERENCE.glob("*.md"):
        named = re.findall(r"^::: (\S+)\.(\w+)$", page.read_text(), re.MULTILINE)
        paths |= {(module, name) for module, name in named if not module.endswith(OTHERS_ARGUMENTS)}
    for module, names in original.items():
        paths |= {(f"{PACKAGE}{module}", name) for name in names.split()}
    found: dict[str, Any] = {}
    for module, name in sorted(paths):
        add(found, name, getattr(importlib.import_module(module), name))
    return found


def add(found: dict[str, Any], name: str, value: Any) -> None:
    """Add a function or class, and its public methods that are written in this package."""
    found[name] = value
    for attribute in dir(value) if isinstance(value, type) else ():
        owner = next(each for each in value.__mro__ if attribute in vars(each))
        own = owner.__module__.startswith(PACKAGE) and not attribute.startswith("_")
        method = getattr(value, attribute)
        if own and callable(method) and not isinstance(method, type):
            found[f"{name}.{attribute}"] = method


class Call(NamedTuple):
    """A right call: a function that takes arguments by name, and those that are right."""

    function: Callable[..., Any]
    right: Mapping[str, Any]
    more: tuple[Callable[..., Any], ...] = ()  # whose parameters it takes as options, too
    alone: bool = True  # whether it can be made here: in one process, on a CPU, at no great cost


def parameters(call: Call) -> dict[str, tuple[Any, bool]]:
    """Return the type of each parameter, and whether it must be given."""
    found: dict[str, tuple[Any, bool]] = {}
    for function in (*call.more, call.function):
        called = function.func if isinstance(function, partial) else function
        called = called.__init__ if isinstance(called, type) else called
        hints = typing.get_type_hints(inspect.unwrap(called))
        for name, each in inspect.signature(function).parameters.items():
            hint = hints.get(name, Any)
            if each.kind is each.VAR_KEYWORD and typing.get_origin(hint) is typing.Unpack:
                of_options = typing.get_type_hints(typing.get_args(hint)[0])
                found |= {option: (type_, False) for option, type_ in of_options.items()}
            elif each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL) and name != "self":
                needed = each.default is each.empty and function is call.function
                found[name] = hint, needed
    return found


OTHERS = {
    bool: True, int: 2, float: 1.5, str: "none such", types.NoneType: None, list: [Ellipsis],
    Tensor: torch.zeros(3, 1, 2, dtype=torch.complex64), object: Ellipsis,
}  # fmt: skip


def kinds(hint: Any) -> set[type]:
    """Return those of OTHERS' types that a parameter of this type may take."""
    origin = typing.get_origin(hint)
    if hint is Any or isinstance(hint, typing.TypeVar):
        return {*OTHERS}
    if origin in (typing.Union, types.UnionType):
        return set().union(*map(kinds, typing.get_args(hint)))
    if origin in (typing.Annotated, typing.Required, typing.NotRequired):
        return kinds(typing.get_args(hint)[0])
    if origin is typing.Literal:
        return {type(value) for value in typing.get_args(hint)}
    return {hint} & {*OTHERS}


NUMBERS: dict[type, tuple[float, ...]] = {
    int: (0, -1),
    float: (0.0, -1.0, float("nan"), float("inf"), -float("inf")),
}


def wrong(call: Call) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield each wrong argument: its name, what is wrong with it, and all arguments with it."""
    right = dict(call.right)
    yield "none_such", "unknown", right | {"none_such": 1}
    for name, (hint, needed) in parameters(call).items():
        if needed:
            yield name, "missing", {other: right[other] for other in right if other != name}
        taken = kinds(hint)
        for kind, value in OTHERS.items():
            if kind not in taken and not (kind is int and float in taken):
                yield name, f"{kind.__name__}", right | {name: value}
        for kind in taken & {*NUMBERS}:
            for number in NUMBERS[kind]:
                yield name, repr(number), right | {name: number}
        if str in taken and hint is not Any:
            yield name, "text", right | {name: "none such"}


@dataclass
class Verdict:
    """The outcome of a wrong call: whether it was refused well, and the error."""

    name: str
    what: str
    said: str | None  # None if it was taken
    good: bool


def verdicts(
    name: str, call: Call, right_too: Mapping[str, str], words: Mapping[str, str]
) -> Iterator[Verdict]:
    """Make all wrong calls of a function; those that are right after all must be taken.

    `right_too`: what of a parameter is right, by `function.parameter` or by parameter; `words`:
    what else a parameter is called in errors.
    """
    for parameter, what, given in wrong(call):
        right, said_too = (
            table.get(f"{name}.{parameter}", table.get(parameter, "")).split()
            for table in (right_too, words)
        )
        if what not in right or call.alone:
            said, good = outcome(call, given, [parameter, *said_too])
            if what in right:
                good = said is None
            yield Verdict(parameter, what, said, good)


def outcome(call: Call, given: dict[str, Any], words: list[str]) -> tuple[str | None, bool]:
    """Return what a call says, and whether it says well, with one of these words, what is wrong.

    Good is a ValueError, or that there is no such file.
    """
    try:
        found = call.function(**given)
        if inspect.isgenerator(found):
            list(found)
    except Exception as error:
        text = str(error)
        plain = isinstance(error, ValueError | FileNotFoundError) and not isinstance(
            error, UnicodeError
        )
        raw = re.search(r"Error: |' object |__init__|not supported between|0x[0-9a-f]{6}", text)
        named = any(
            re.search(rf"(?<![a-zA-Z]){re.escape(word)}(?![a-zA-Z])", text) for word in words
        )
        return f"{type(error).__name__}: {text}", bool(plain and named and not raw)
    return None, False
