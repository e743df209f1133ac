"""Planting a fault into the running process: a function goes on with the code of a changed text.

Whoever holds the function, by a decorator or a method's class, has the fault from then on; so
nothing is imported anew. What functions have kept of earlier calls is forgotten.
"""

import ast
import builtins
import gc
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import _lru_cache_wrapper
from types import CodeType, FunctionType

from ring_attention_pytorch.plan import plan_cache
from tests.faults.mutant import Fault, Misplaced, Place, Sources, definitions

_MARK = "_reached"  # among builtins


class Planter:
    """Plants into the package that this process has imported, all of it before this is made."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        # those of the package by file and name: a fork that looked at all others would copy them
        self.functions: dict[str, dict[str, list[FunctionType]]] = {}
        self.caches = []
        folder = f"{sources.folder}/"
        for each in gc.get_objects():
            if type(each) is FunctionType:
                if (code := each.__code__).co_filename.startswith(folder):
                    here = self.functions.setdefault(code.co_filename.removeprefix(folder), {})
                    here.setdefault(code.co_qualname, []).append(each)
            elif type(each) is _lru_cache_wrapper and self._is_ours(each.__module__):
                self.caches.append(each)

    def forget(self) -> None:
        """As if nothing had been called yet."""
        plan_cache.forget()
        for cache in self.caches:
            cache.cache_clear()

    def reaches(self, where: str) -> bool:
        """True if the function is there as it was written, and not what a decorator made of it."""
        file, _, name = where.partition(":")
        return name in self.functions.get(file, {})

    def plant(self, fault: Fault) -> Place:
        """This process goes on with the fault."""
        place, tree = self.sources.find(fault.where), fault.tree(self.sources)
        if isinstance(place.node, ast.FunctionDef):
            self._swap(place.file, tree, {place.name})
        else:
            self._assign(place, dict(definitions(tree))[place.name])
        return place

    @contextmanager
    def marked(self, places: Iterable[Place]) -> Iterator[set[tuple[str, str]]]:
        """Inside it each function that is reached adds its file and name to the set."""
        reached = set[tuple[str, str]]()
        setattr(builtins, _MARK, reached.add)
        by_file: dict[str, set[str]] = {}
        for place in places:
            if isinstance(place.node, ast.FunctionDef):
                by_file.setdefault(place.file, set()).add(place.name)
        before: list[tuple[FunctionType, CodeType]] = []
        for file, names in by_file.items():
            tree = ast.parse(self.sources.texts[file])
            for name, node in definitions(tree):
                if name in names:
                    node.body.insert(0, ast.parse(f"{_MARK}({(file, name)!r})").body[0])
            before += self._swap(file, ast.fix_missing_locations(tree), names)
        try:
            yield reached
        finally:
            for function, code in before:
                function.__code__ = code

    def _swap(
        self, file: str, tree: ast.Module, names: set[str]
    ) -> list[tuple[FunctionType, CodeType]]:
        """Give functions, and those that were made in them, the code that they have in a tree.

        Returns them, each with the code that it had.
        """
        filename = str(self.sources.folder / file)
        fresh: dict[str, list[CodeType]] = {}
        for code in _codes(compile(tree, filename, "exec", dont_inherit=True)):
            fresh.setdefault(code.co_qualname, []).append(code)
        for name in names:
            if not self.reaches(f"{file}:{name}"):
                raise Misplaced(f"{file}:{name} is in no module that was imported")
        before = []
        for name, functions in self.functions[file].items():
            if name.partition(".<locals>")[0] in names:
                for function in functions:
                    before.append((function, function.__code__))
                    _give(function, fresh.get(name, []))
        return before

    def _assign(self, place: Place, node: ast.Assign | ast.AnnAssign) -> None:
        filename = str(self.sources.folder / place.file)
        (module,) = (m for m in sys.modules.values() if getattr(m, "__file__", None) == filename)
        value = compile(ast.Expression(node.value), filename, "eval", dont_inherit=True)
        setattr(module, place.name, eval(value, vars(module)))

    def _is_ours(self, module: str | None) -> bool:
        return (module or "").partition(".")[0] == self.sources.folder.name


def _give(function: FunctionType, codes: list[CodeType]) -> None:
    name = function.__qualname__
    if len(codes) != 1:
        raise Misplaced(f"{name}: {len(codes)} functions of that name; plant the fault elsewhere")
    if codes[0].co_freevars != function.__code__.co_freevars:
        raise Misplaced(
            f"{name}: refers to {codes[0].co_freevars} of what encloses it, and did so to "
            f"{function.__code__.co_freevars}; plant a fault that refers to the same"
        )
    function.__code__ = codes[0]


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code objects of all that is defined in it."""
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each
            yield from _codes(each)
