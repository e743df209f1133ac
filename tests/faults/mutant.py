"""Planted faults: what one is, and where in the sources of the package it belongs."""

import ast
import re
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, Protocol

FOLDERS = Path(__file__).parents[1]
PACKAGE = FOLDERS.parent / "ring_attention_pytorch"

_TOKEN = re.compile(
    r"""
    (?P<ignored> \s | \\\n | \#[^\n]* )
  | (?P<trailing> ,(?=(?:\s|\#[^\n]*)*[)\]}]) )
  | [A-Za-z]{0,2}(?: \"{3}(?:\\.|.)*?\"{3} | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*' )
  | \d(?: [\w.] | (?<=[eE])[+-] )* | \w+ | .
    """,
    re.VERBOSE | re.DOTALL,
)


class Mutant(NamedTuple):
    """One fault: in what `where` names, `old` becomes `new`.

    `where` is a file of the package and a function or method in it, "geometry/tiles.py:trim" say,
    or a name that the module assigns. `old` stands exactly once in the function's body, or in what
    is assigned, token for token: white space, comments and commas before a closing bracket do not
    count. What `old` and `new` begin and end with alike stays as the source has it.
    """

    name: str
    where: str
    old: str
    new: str

    def tree(self, sources: "Sources") -> ast.Module:
        """The tree of the file with the fault planted."""
        try:
            return ast.parse(sources.changed(self))
        except SyntaxError as error:
            raise Misplaced(f"{self.name}: no longer Python: {error}") from None


class Fault(Protocol):
    """One that is written down, a `Mutant`, or one that is generated."""

    @property
    def name(self) -> str: ...

    @property
    def where(self) -> str: ...

    def tree(self, sources: "Sources") -> ast.Module: ...


def planted(battery: str) -> list[Mutant]:
    """The faults of all folders that a battery must find."""
    found: list[Mutant] = []
    for file in sorted(FOLDERS.glob("*/faults.py")):
        module = import_module(f"tests.{file.parent.name}.faults")
        found += getattr(module, battery, [])
    return found


class Misplaced(Exception):
    """A fault that can't be planted, and what to do about it."""


class Place(NamedTuple):
    """A definition in a file of the package."""

    file: str
    name: str
    node: ast.FunctionDef | ast.Assign | ast.AnnAssign


class Sources:
    """The text of a package, and what is defined where."""

    def __init__(self, folder: Path = PACKAGE) -> None:
        self.folder = folder
        self.texts = {
            path.relative_to(folder).as_posix(): path.read_text()
            for path in sorted(folder.rglob("*.py"))
        }
        self.places = [
            Place(file, name, node)
            for file, text in self.texts.items()
            for name, node in definitions(ast.parse(text))
        ]

    def find(self, where: str) -> Place:
        """In the file that is named; if it is not there, in whichever it has moved to."""
        file, _, name = where.partition(":")
        everywhere = [place for place in self.places if place.name == name]
        found = [place for place in everywhere if place.file == file] or everywhere
        if len(found) != 1:
            files = ", ".join(place.file for place in found) or "no file"
            raise Misplaced(f"{where}: {name} is in {files}; say where the fault belongs now")
        return found[0]

    def changed(self, mutant: Mutant) -> str:
        """The text of the file with the fault planted."""
        place = self.find(mutant.where)
        text = self.texts[place.file]
        tokens, old = _counted(_tokens(text, *_span(text, place.node))), _texts(mutant.old)
        starts = [i for i in range(len(tokens)) if _same(tokens[i : i + len(old)], old)]
        if len(starts) != 1:
            raise Misplaced(
                f"{mutant.name}: {mutant.old!r} is {len(starts)} times in {place.file}:"
                f"{place.name}; plant the fault anew, by what is there exactly once"
            )
        head, fresh, tail = _change(mutant)
        going = tokens[starts[0] + head : starts[0] + len(old) - tail]
        if going:
            start, stop = going[0].start(), going[-1].end()
        else:
            start = stop = tokens[starts[0] + head - 1].end() if head else tokens[starts[0]].start()
        if head and not going:
            fresh = f" {fresh}"
        return text[:start] + (fresh + text[stop:] if fresh else text[stop:].lstrip(" "))


def definitions(tree: ast.AST, within: str = "") -> Iterator[tuple[str, ast.stmt]]:
    """Functions and methods by their qualified names, and what the module assigns."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield within + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from definitions(node, f"{within}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value and not within:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((each.id, node) for each in targets if isinstance(each, ast.Name))
        elif isinstance(node, ast.stmt):
            yield from definitions(node, within)


def _change(mutant: Mutant) -> tuple[int, str, int]:
    """How many tokens stay at the beginning of `old`, what comes instead of the others, at its end.

    Trailing commas count where both texts are a fault's own: they make tuples.
    """
    old, new = list(_tokens(mutant.old)), list(_tokens(mutant.new))
    head = _alike(old, new)
    tail = _alike(old[head:][::-1], new[head:][::-1])
    fresh = new[head : len(new) - tail]
    text = mutant.new[fresh[0].start() : fresh[-1].end()] if fresh else ""
    return len(_counted(old[:head])), text, len(_counted(old[len(old) - tail :]))


def _tokens(text: str, *span: int) -> Iterator[re.Match]:
    return (found for found in _TOKEN.finditer(text, *span) if not found["ignored"])


def _counted(tokens: Iterable[re.Match]) -> list[re.Match]:
    return [token for token in tokens if not token["trailing"]]


def _texts(text: str) -> list[str]:
    return [token.group() for token in _counted(_tokens(text))]


def _same(tokens: list[re.Match], texts: list[str]) -> bool:
    return [token.group() for token in tokens] == texts


def _alike(some: list[re.Match], others: list[re.Match]) -> int:
    """Return how many tokens both begin with."""
    same = (a.group() == b.group() for a, b in zip(some, others))
    return next((i for i, equal in enumerate(same) if not equal), min(len(some), len(others)))


def _span(text: str, node: ast.stmt) -> tuple[int, int]:
    """From where to where a function's body stands, or what is assigned."""
    first = node.body[0] if isinstance(node, ast.FunctionDef) else node.value
    lines = text.split("\n")

    def at(line: int, column: int) -> int:  # columns count bytes
        before = sum(len(each) + 1 for each in lines[: line - 1])
        return before + len(lines[line - 1].encode()[:column].decode())

    last = node if isinstance(node, ast.FunctionDef) else node.value
    return at(first.lineno, first.col_offset), at(last.end_lineno, last.end_col_offset)
