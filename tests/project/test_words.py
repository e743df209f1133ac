"""The glossary: few words, each with a row, and none of those that it replaced in any name."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GLOSSARY = ROOT / "docs" / "design" / "glossary.md"
MOST_ROWS = 40
# words that no name may have, and the word of the field that says it
RETIRED = {
    "aside": "by_copy_engine",
    "beside": "overlap",
    "claim": "must_match",
    "coming": "arriving, in_flight",
    "lasting": "cacheable, outside_graph_pool",
    "later": "deferred",
    "lent": "borrowed",
    "lightest": "fewest_launches",
    "meet": "wait, barrier",
    "meeting": "barrier",
    "meets": "waits",
    "overlapped": "overlapping",
    "overtaken": "low_priority",
    "shelf": "buffer",
    "shelves": "buffers",
    "spoil": "fill_nan",
    "tell": "report, notify",
    "tells": "reports",
    "told": "note, reported",
    "visit": "fused_copy",
    "visits": "fused_copies",
}


# how often docstrings of the package may have them: "what" as a noun, mostly, and riddles of who
MOST = {r"\bwhat\b": 10, r"\bthose of\b": 6, r"\b(tell|tells|told)\b": 0}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def names(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the file's name and those of its classes, functions, arguments and fields."""
    where = path.relative_to(ROOT).as_posix()
    yield where, path.stem
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{where}:{node.lineno}", node.name
            for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
                yield f"{where}:{node.lineno}", arg.arg
        elif isinstance(node, ast.ClassDef):
            yield f"{where}:{node.lineno}", node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield f"{where}:{node.lineno}", node.target.id


def words(name: str) -> list[str]:
    """Split a name at underscores and capitals.

    >>> words("RingPlan"), words("_spoil_here"), words("LSEMerge")
    (['ring', 'plan'], ['spoil', 'here'], ['lse', 'merge'])
    """
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def retired(path: Path) -> list[str]:
    return [
        f"{where}: {name}: write {RETIRED[word]} for {word}"
        for where, name in names(path)
        for word in words(name)
        if word in RETIRED
    ]


@pytest.mark.parametrize("folder", ["ring_attention_pytorch", "benchmarks", "examples"])
def test_no_name_has_a_word_that_the_glossary_replaced(folder):
    found = [each for path in sorted((ROOT / folder).rglob("*.py")) for each in retired(path)]
    assert not found, "\n".join(found)


def docstrings(path: Path) -> Iterator[str]:
    documented = ast.Module | ast.ClassDef | ast.FunctionDef
    for node in ast.walk(tree(path)):
        if isinstance(node, documented) and (text := ast.get_docstring(node)):
            yield f"{path.relative_to(ROOT)}: {text}"


def test_docstrings_name_things_and_write_no_riddles():
    texts = [t for p in (ROOT / "ring_attention_pytorch").rglob("*.py") for t in docstrings(p)]
    assert len(texts) > 2000
    for word, most in MOST.items():
        found = [text for text in texts if re.search(word, text, re.IGNORECASE)]
        assert len(found) <= most, "\n\n".join(found)


def test_a_name_with_such_a_word_is_found(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    path = tmp_path / "module.py"
    path.write_text("class Shelf:\n    def own(self, told_by: int): ...\n")
    assert len(retired(path)) == 2


def test_the_glossary_is_short_and_each_word_is_in_it_once():
    rows = re.findall(r"^\| \*\*(.+?)\*\* \|", GLOSSARY.read_text(), re.MULTILINE)
    assert 30 < len(rows) <= MOST_ROWS
    terms = re.findall(r"\*\*(.+?)\*\*", GLOSSARY.read_text())
    assert len({*terms}) == len(terms)
    assert not {*rows} & {*RETIRED}
