"""Who may know whom, and the limits of the house."""

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "ring_attention_pytorch"
FILES = sorted(PACKAGE.rglob("*.py"))

# a file may import those of its own folder, and of these
BELOW = {
    "geometry": set(),
    "schedule": {"geometry"},
    "runtime": {"geometry", "schedule"},
    "ranks": {"runtime"},
    "comm": {"geometry", "schedule", "runtime", "ranks"},
    "kernels": {"geometry", "runtime"},
    "plan": {"geometry", "schedule", "runtime", "ranks", "comm", "kernels"},
}
BELOW["second_order"] = {*BELOW}
BELOW["attention"] = {*BELOW} - {"comm", "ranks"}
BELOW["top_keys"] = {"comm", "ranks"}
BELOW["shared_keys"] = {*BELOW} - {"second_order", "kernels", "schedule", "geometry"}
BELOW["operators"] = {*BELOW} - {"second_order"}
BELOW["tensor_kinds"] = {*BELOW} - {"attention", "second_order", "operators"}
BELOW["functional"] = BELOW["decoding"] = {*BELOW}
BELOW["warm_up"] = {"attention", "plan", "ranks", "runtime", "shared_keys"}
BELOW["inference"] = {*BELOW} - {"decoding", "second_order"}
BELOW["decoding"] = BELOW["functional"] | {"inference"}
BELOW["recurrent"] = {"geometry", "runtime", "ranks", "comm", "plan", "tensor_kinds"}
BELOW["latent"] = {"runtime", "ranks", "plan", "attention", "tensor_kinds", "inference"}
BELOW["nn"] = {*BELOW} - {"decoding", "second_order"}
BELOW["routing"] = BELOW["nn"] | {"nn"}
BELOW["summaries"] = BELOW["nn"] | {"nn", "decoding"}
BELOW["training"] = BELOW["nn"] | {"nn"}
BELOW["integrations"] = {"ranks", "geometry", "plan", "runtime", "functional", "inference"}
BELOW["integrations"] |= {"nn", "training", "doctor", "recurrent", "latent", "attention"}
BELOW["launch"] = {"ranks"}
BELOW["doctor"] = BELOW["nn"] | {"nn", "training", "launch"}
BELOW["__main__"] = {"doctor"}
BELOW["compat"] = {*BELOW} - {"routing", "schedule", "recurrent"}
BELOW["__init__"] = {*BELOW}
BELOW["arguments"] = BELOW["progress"] = BELOW["svg"] = set()
EVERYBODY = {"arguments", "progress", "svg"}  # are used by all, and use nothing
# calls upwards: a method of what is below, in whose body the import stands; no other circle may be
UPWARDS = {"plan.ring_plan": "warm_up"}
# point-to-point and collectives are nobody else's business
MAY_COMMUNICATE = {
    "ranks.alone", "ranks.failures", "ranks.failure_reports", "ranks.notes", "ranks.ring",
    "comm.symmetric_memory", "launch",
}  # fmt: skip
MAY_ASK = {"doctor.facts"}  # what there is to communicate with
TYPES = ("ProcessGroup", "DeviceMesh", "DTensor", "FSDPModule")  # of torch.distributed


def name_of(file: Path) -> str:
    return ".".join(file.relative_to(PACKAGE).with_suffix("").parts)


@cache
def imported(file: Path) -> set[str]:
    """Full names of all that is imported, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative imports hide who imports whom"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def folder_of(file: Path) -> str:
    """The folder that a file is in, or its own name."""
    return name_of(file).split(".")[0]


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_files_import_only_what_is_below(file):
    names = [name.split(".") for name in imported(file)]
    found = {parts[1] for parts in names if parts[0] == PACKAGE.name and len(parts) > 1}
    old = {name for name in found if (PACKAGE / "compat" / f"{name}.py").exists()}
    folders = found - old | ({"compat"} if old else set())
    up = {UPWARDS.get(name_of(file))}
    assert folders - up <= BELOW[folder_of(file)] | {folder_of(file)} | EVERYBODY


def modules_imported(file: Path) -> set[str]:
    """Names of the files that a file imports; but that of the package, which every import runs."""
    known = {name_of(other).removesuffix(".__init__") for other in FILES} - {"__init__"}
    modules = set()
    for full_name in imported(file):
        package, _, name = full_name.partition(".")
        for module in (name, name.rpartition(".")[0]):
            for path in (module, f"compat.{module}"):
                if package == PACKAGE.name and path in known:
                    modules.add(path)
    return modules - {name_of(file).removesuffix(".__init__")}


def test_no_modules_import_one_another_in_a_circle_not_even_inside_functions():
    imports = {name_of(file).removesuffix(".__init__"): modules_imported(file) for file in FILES}
    del imports["__init__"]
    for file, above in UPWARDS.items():
        imports[file].remove(above)
    TopologicalSorter(imports).prepare()  # raises a CycleError that names the circle


def test_what_is_below_is_there():
    assert {*BELOW} == {folder_of(file) for file in FILES}


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_only_few_files_speak_with_other_processes(file):
    talks = {n for n in imported(file) if n.startswith("torch.distributed")}
    types = {n for n in talks if n.rsplit(".", 1)[1] in TYPES}
    assert name_of(file) in MAY_COMMUNICATE | MAY_ASK or talks == types


# what executes what another process has sent, by the name of a module or of a function
UNPICKLING = re.compile(
    r"c?pickle|_pickle|dill|cloudpickle|marshal|shelve|joblib|torch\.(load|package)"
    r"|\w+_object(_list|s)?|\w+_objects?_list|ForkingPickler|Unpickler"
)


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_nothing_is_unpickled(file):
    """Ranks send tensors and JSON, as SECURITY.md says."""
    used = {part for full_name in imported(file) for part in full_name.split(".")}
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute):
            used |= {node.attr, ast.unparse(node)}
    assert not {name for name in used if UNPICKLING.fullmatch(name)}


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_files_are_short(file):
    text = file.read_text()
    strings = [
        range(node.lineno, node.end_lineno + 1)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ]
    told = {number for lines in strings for number in lines}
    code = [
        line
        for number, line in enumerate(text.splitlines(), 1)
        if number not in told and line.strip() and not line.strip().startswith("#")
    ]
    assert len(code) <= 600


def assigned(init: ast.FunctionDef) -> set[str]:
    """Attributes of self that a function assigns, each by itself: not those of an unpacked call."""
    found = set()
    for node in ast.walk(init):
        targets = getattr(node, "targets", []) + [getattr(node, "target", None)]
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            targets += getattr(targets[0], "elts", [])
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            found |= {t.attr for t in targets if isinstance(t, ast.Attribute)}
    return found


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_attributes_are_declared_where_they_are_assigned(file):
    for owner in ast.walk(ast.parse(file.read_text())):
        body = owner.body if isinstance(owner, ast.ClassDef) else []
        declared = {
            node.target.id for node in body if isinstance(node, ast.AnnAssign) and not node.value
        }
        made = [node for node in body if getattr(node, "name", "") == "__init__"]
        assert not declared & {name for init in made for name in assigned(init)}, owner.name


def test_kernels_use_one_dimension_of_the_grid():
    """The other two end at 65,535: fewer than a user's documents, runs or rows can be."""
    others = re.compile(r"(?:program_id|num_programs)\((?!0\))")
    assert [file.name for file in FILES if others.search(file.read_text())] == []


def test_there_is_no_drawer_for_odds_and_ends():
    assert not [f for f in FILES if f.stem in ("utils", "util", "helpers", "common", "misc")]


ALONE = f"""
import importlib, pkgutil, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("triton", "flash_attn", "cutlass", "transformers", "accelerate"):
            raise ModuleNotFoundError(f"refused: {{name}}", name=name)

sys.meta_path.insert(0, Refuse())
import {PACKAGE.name} as package
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    if not any(part in module.name for part in ("._triton", ".compat.", ".integrations.")):
        importlib.import_module(module.name)
import torch
import torch.distributed as dist
assert not dist.is_initialized()
q = torch.randn(1, 5, 2, 8)
from {PACKAGE.name} import ring_attn, ring_flash_attn
for attend in (ring_attn, ring_flash_attn):
    assert attend(q, q, q, causal=True).shape == q.shape
assert not dist.is_initialized()
print("fine")
"""


def test_the_package_works_without_optional_packages_and_starts_no_group(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:ring_attention_pytorch", "-c", ALONE],
        cwd=PACKAGE.parent, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert ran.stdout.strip() == "fine", ran.stderr
