"""Environment variables of the package stand on their page, and messages go to one logger."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from ring_attention_pytorch.plan import plan_cache

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "ring_attention_pytorch").rglob("*.py"))
READERS = {"os.environ.get", "os.environ.pop", "os.environ.setdefault", "os.getenv"}
# a command's output, an exit's text, and progress that was asked for
PRINTS = {"doctor/commands.py", "launch.py", "progress.py"}


def is_environ(node: ast.AST) -> bool:
    return ast.unparse(node) == "os.environ"


def read(tree: ast.AST) -> Iterator[str]:
    """The names that are looked up in os.environ; names of constants as they are."""
    for node in ast.walk(tree):
        key = None
        if isinstance(node, ast.Subscript) and is_environ(node.value):
            key = node.slice
        elif isinstance(node, ast.Compare) and is_environ(node.comparators[-1]):
            key = node.left
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in READERS:
            key = node.args[0]
        if key is not None:
            yield key.value if isinstance(key, ast.Constant) else ast.unparse(key)


def test_the_page_has_all_variables_that_are_read_and_no_others():
    found = {name for file in FILES for name in read(ast.parse(file.read_text()))}
    found = found - {"name"} | {*plan_cache._SETTINGS}
    table = (ROOT / "docs" / "environment.md").read_text().split("## The logger")[0]
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`([A-Z_]+)`", row)} == found


def test_there_is_one_logger_and_nothing_else_prints():
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            if called == "logging.getLogger":
                (name,) = [arg.value for arg in node.args]
                assert name in ("ring_attention_pytorch", "ring_attention_pytorch.progress"), file
            prints = called == "print" or called.startswith("sys.stderr.write")
            assert not prints or str(file).endswith(tuple(PRINTS)), file
