"""Where tests are: `a/b.py` of the package is tested by `tests/a/test_b.py`.

A module that begins or ends with an underscore is tested by the file of its name without:
`_varlen.py` by `test_varlen.py`, `__init__.py` by `test_init.py`. What needs several modules is a
story, in `tests/stories/`. What tests share is in `tests/support/`.
"""

import ast
from pathlib import Path

from tests.conftest import LONGEST
from tests.support import check_install

ROOT = Path(__file__).parents[2]
PACKAGE, TESTS = ROOT / "ring_attention_pytorch", ROOT / "tests"
# folders of tests that are of no folder of the package
OTHERS = {"stories", "project", "gpu", "typing", "support", "faults"}
# modules that no file is named by, and why
EXEMPT = {"comm.fabric": "protocols, which fabrics implement"}
# the lists below may only become shorter: a line goes when its test file comes
WITHOUT: set[str] = set()
# test files that no module has the name of: to be cut by module, or to become stories
UNNAMED: set[str] = set()
# test modules, with those that they import: what they share belongs in tests/support
IMPORTS: set[tuple[str, str]] = set()


def name_of(file: Path, root: Path) -> str:
    return ".".join(file.relative_to(root).with_suffix("").parts)


def is_tested_by_its_caller(file: Path) -> bool:
    """Tell whether it is Triton's language, or an `__init__` in which nothing is defined."""
    defines = (ast.FunctionDef, ast.ClassDef)
    return file.stem.startswith("_triton") or (
        file.stem == "__init__"
        and not any(isinstance(node, defines) for node in ast.parse(file.read_text()).body)
    )


def file_of_tests(module: Path) -> Path:
    folder = TESTS / module.relative_to(PACKAGE).parent
    return folder / f"test_{module.stem.strip('_')}.py"


MODULES = sorted(file for file in PACKAGE.rglob("*.py") if not is_tested_by_its_caller(file))
FILES = sorted(TESTS.rglob("test_*.py"))


def test_every_module_has_a_test_file_of_its_name():
    missing = {name_of(each, PACKAGE) for each in MODULES if not file_of_tests(each).exists()}
    new, done = missing - WITHOUT - {*EXEMPT}, WITHOUT - missing
    assert not new, f"write the test files of {sorted(new)}"
    assert not done, f"these have one: take them off WITHOUT: {sorted(done)}"
    assert {*EXEMPT} <= missing


def test_every_test_file_has_the_name_of_a_module_or_is_a_story():
    named = {*map(file_of_tests, MODULES)}
    strange = {
        name_of(each, TESTS)
        for each in FILES
        if each not in named and each.relative_to(TESTS).parts[0] not in OTHERS
    }
    new, done = strange - UNNAMED, UNNAMED - strange
    assert not new, f"these are of no module: cut them by module, or make stories: {sorted(new)}"
    assert not done, f"these are gone: take them off UNNAMED: {sorted(done)}"


def imported_tests(file: Path) -> set[str]:
    """Return the names of the test modules that a file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
    modules = {f"tests.{name_of(each, TESTS)}" for each in FILES}
    return {name.removeprefix("tests.") for name in found & modules}


def test_no_test_module_imports_another():
    batteries = {
        f for f in TESTS.rglob("*.py") if f.name == "faults.py" or f.parent.name == "faults"
    }
    files = {*TESTS.rglob("*.py")} - batteries
    found = {(name_of(f, TESTS), other) for f in files for other in imported_tests(f)}
    assert not found - IMPORTS, f"put what is shared into tests/support: {found - IMPORTS}"
    assert not IMPORTS - found, f"take these off IMPORTS: {IMPORTS - found}"


def test_files_that_others_name_are_there():
    assert {*LONGEST} <= {each.stem for each in FILES}
    assert all((TESTS / name).exists() for name in check_install.TESTS)
