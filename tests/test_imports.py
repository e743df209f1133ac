"""Who may know whom, and the limits of the house."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "ring_attention_pytorch"
FILES = sorted(PACKAGE.rglob("*.py"))

# of this package, a file may import these and no others; "*" is any
KERNEL = {"contract", "dropout", "layouts", "rows", "running"}
ALLOWED = {
    "__init__": {"*"},
    "segments": set(),
    "layouts": {"segments"},
    "lanes": set(),
    "graphs": {"lanes"},
    "rows": {"_triton_rows"},
    "running": {"lanes", "rows"},
    "_triton_rows": set(),
    "_triton_moves": set(),
    "dropout": set(),
    "contract": {"dropout", "layouts", "rows", "running"},
    "scores": set(),
    "balance": {"documents", "layouts", "segments"},
    "documents": {"layouts", "ring", "segments"},
    "notes": set(),
    "launch": {"failures"},
    "failures": {"notes"},
    "steps": {"failures", "notes"},
    "ring": {"failures", "notes", "steps"},
    "agreement": {"notes", "ring"},
    "proposal": {
        "agreement",
        "checks",
        "contract",
        "documents",
        "dropout",
        "kernels",
        "layouts",
        "masks",
        "measure",
        "scores",
        "transports",
        "ulysses",
    },
    "masks": {"contract", "documents", "layouts", "ring", "segments"},
    "transports.__init__": {"contract", "layouts", "ring", "transports"},
    "transports.messages": set(),
    "transports.pieces": {"layouts"},
    "transports.send_recv": {"contract", "layouts", "ring", "rows", "running", "transports"},
    "transports.gather": {"contract", "layouts", "ring", "rows", "running", "transports"},
    "transports.shelves": {"lanes", "ring", "transports"},
    "transports.swap": {"_triton_moves", "lanes", "ring", "rows", "transports"},
    "transports.symmetric": {
        "contract",
        "lanes",
        "layouts",
        "ring",
        "rows",
        "running",
        "transports",
    },
    "transports.together": {"contract", "layouts", "rows", "running", "transports"},
    "ulysses": {"contract", "layouts", "ring", "rows", "transforms", "transports"},
    "cost": {"layouts", "transports"},
    "measure": {"contract", "cost", "kernels", "layouts", "ring", "running", "transports"},
    "checks": {"layouts", "transports"},
    "plan": {
        "agreement",
        "checks",
        "contract",
        "cost",
        "documents",
        "dropout",
        "graphs",
        "kernels",
        "layouts",
        "masks",
        "measure",
        "proposal",
        "ring",
        "rows",
        "scores",
        "transforms",
        "transports",
        "ulysses",
    },
    "transforms": set(),
    "norm": set(),
    "derivatives": {"contract", "kernels", "lanes", "plan", "rows", "running", "transforms"},
    "explain": {"cost", "layouts", "plan", "transports"},
    "regular_attention": {"checks", "rows"},
    "ring_flash_attention": {
        "agreement",
        "checks",
        "scores",
        "contract",
        "derivatives",
        "documents",
        "kernels",
        "lanes",
        "layouts",
        "masks",
        "plan",
        "ring",
        "running",
        "transforms",
    },
    "rotary": {"layouts", "ring"},
    "sharding": {"agreement", "balance", "documents", "layouts", "plan", "ring", "rows"},
    "loss": {"layouts", "ring", "rows", "sharding"},
    "tree_attn_decoding": {"agreement", "contract", "kernels", "layouts", "ring", "running"},
    "ring_attention": {"*"},
    "ring_transformer": {"*"},
    # conditional routing: its own modules, and of the others what they need
    "routing.__init__": {"routing"},
    "routing.exchange": {"ring"},
    "routing.soft_topk": {"agreement", "ring", "routing", "transforms"},
    "routing.descent_triton": {"routing"},
    "routing._triton_descent": set(),
    "routing.plan": {"checks", "agreement", "layouts", "plan", "ring", "routing", "sharding"},
    "routing.selection": {"ring", "routing"},
    "routing.dispatch": {"layouts", "ring", "routing", "sharding"},
    "routing.router": {"agreement", "ring", "routing", "rows", "sharding", "transforms"},
    "routing.attention": {"*"},
    "routing.autoregressive": {"agreement", "ring", "routing", "sharding"},
    "routing.cross_attention": {"agreement", "ring", "routing", "rows", "sharding"},
    "routing.image_attention": {"agreement", "ring_attention", "routing", "sharding"},
    "routing.feedforward": {"agreement", "ring", "ring_transformer", "routing", "sharding"},
    "routing.block": {"agreement", "ring", "routing", "sharding"},
    "routing.transformer": {"agreement", "loss", "ring", "ring_transformer", "routing", "sharding"},
    # what 0.5 had beside; nobody imports it but the modules of its names, and the package
    "original.__init__": {
        "original",
        "ring",
        "ring_attention",
        "ring_flash_attention",
        "ring_transformer",
    },
    "original.exchange": {"agreement", "ring", "sharding"},
    "original.zig_zag": {"agreement", "layouts", "original", "ring", "sharding"},
    "original.batches": {"original", "ring"},
    "original.flash": {"derivatives", "plan", "ring", "ring_flash_attention", "rows"},
    "original.tensor_types": set(),
    **{name: {"original"} for name in ("distributed", "tensor_typing", "triton_flash_attn")},
    "zig_zag_attention": {"original"},
    "ring_flash_attention_cuda": {"ring_flash_attention"},
    "kernels.__init__": {"contract", "kernels"},
    "kernels._whole": KERNEL | {"lanes"},
    "kernels._packs": KERNEL | {"kernels"},
    "kernels.eager_tangents": KERNEL | {"kernels"},  # of eager, what a score is
    **{f"kernels.{name}": KERNEL | {"kernels"} for name in ("flash_attn_2", "flash_attn_4")},
    **{f"kernels.sdpa_{name}": KERNEL | {"kernels"} for name in ("cudnn", "flash")},
    # its compiled parts, which only it imports, and only when called
    "kernels.triton": KERNEL | {"kernels"},
    "kernels._triton_forward": {"kernels"},
    "kernels._triton_backward": {"kernels"},
}
# point-to-point and collectives are nobody else's business
MAY_COMMUNICATE = {"failures", "launch", "ring", "transports.shelves"}
# public entry points: a long signature and its agreement, in one place
MAY_BE_LONG = {"ring_attn", "RingPlan.make", "RingAttention.__init__", "RingTransformer.__init__"}
MAY_BE_LONG |= {
    f"{name}.__init__"
    for name in (
        "CoordinateDescentRouter",
        "ConditionalRoutedAttention",
        "ConditionalRoutedAutoregressiveAttention",
        "ConditionalRoutedCrossAttention",
        "ConditionalRoutedTransformerBlock",
    )
}


def name_of(file: Path) -> str:
    return ".".join(file.relative_to(PACKAGE).with_suffix("").parts)


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


def of_this_package(file: Path) -> set[str]:
    """The package's own modules that a file imports; of a package, its name."""
    parts = [n.split(".") for n in imported(file) if n.split(".")[0] == PACKAGE.name]
    return {p[1] for p in parts if len(p) > 1}


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_files_import_only_what_they_may_know(file):
    name = name_of(file)
    allowed = ALLOWED.get(name, KERNEL if name.startswith("kernels.") else None)
    assert allowed is not None, f"{name} is new: say in ALLOWED what it may know"
    assert "*" in allowed or of_this_package(file) <= allowed


def test_what_is_allowed_is_there():
    assert set(ALLOWED) <= {name_of(file) for file in FILES}


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_only_few_files_speak_with_other_processes(file):
    talks = {n for n in imported(file) if n.startswith("torch.distributed")}
    types = {n for n in talks if n.rsplit(".", 1)[1] in ("ProcessGroup", "DeviceMesh")}
    assert name_of(file) in MAY_COMMUNICATE or talks == types


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_files_are_short(file):
    assert len(file.read_text().splitlines()) <= 400


def functions(tree: ast.AST, prefix: str = ""):
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield prefix + node.name, node
        inner = f"{prefix}{node.name}." if isinstance(node, ast.ClassDef) else prefix
        yield from functions(node, inner)


def lines(function: ast.FunctionDef) -> int:
    """From def to the end, less the docstring."""
    total, first = function.end_lineno - function.lineno + 1, function.body[0]
    if ast.get_docstring(function, clean=False) is not None:
        total -= first.end_lineno - first.lineno + 1
    return total


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_functions_are_short(file):
    if file.stem.startswith("_triton"):
        return  # Triton kernels: what could be called is inlined by hand where it pays
    for name, function in functions(ast.parse(file.read_text())):
        assert lines(function) <= 60 or name in MAY_BE_LONG, f"{name}: {lines(function)} lines"


def test_there_is_no_drawer_for_odds_and_ends():
    assert not [f for f in FILES if f.stem in ("utils", "util", "helpers", "common", "misc")]


ALONE = f"""
import importlib, pkgutil, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("triton", "flash_attn", "cutlass"):
            raise ModuleNotFoundError(f"refused: {{name}}", name=name)

sys.meta_path.insert(0, Refuse())
import {PACKAGE.name} as package
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    if "._triton" not in module.name:  # only imported by a call of the kernel that they are
        importlib.import_module(module.name)
import torch
import torch.distributed as dist
assert not dist.is_initialized()
q = torch.randn(1, 5, 2, 8)
from {PACKAGE.name}.ring_flash_attention import ring_attn
assert ring_attn(q, q, q, causal=True).shape == q.shape
assert not dist.is_initialized()
print("fine")
"""


def test_the_package_works_without_optional_packages_and_starts_no_group(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:ring_attention_pytorch", "-c", ALONE],
        cwd=PACKAGE.parent, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ran.stdout.strip() == "fine", ran.stderr
