"""Facts of an installation: packages that are missing or broken are seen."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest

from ring_attention_pytorch import kernels
from ring_attention_pytorch.doctor.facts import Facts, gather_facts
from ring_attention_pytorch.doctor.findings import Finding, findings_of


def told(facts: Facts, subject: str, backend: str = "nccl", nproc: int = 2) -> Finding:
    (found,) = [f for f in findings_of(facts, backend, nproc) if f.subject == subject]
    return found


# a package, its files, how bad that is, words of the diagnosis
PACKAGES: list[tuple[str, dict[str, str], str, str]] = [
    ("triton", {}, "note", "needs triton 3.4 or later (pip install"),
    ("triton", {"triton/__init__.py": "__version__ = '2.0.0'"}, "note", "got 2.0.0"),
    ("flash-attn", {}, "note", "which is not installed"),
    ("flash-attn-4", {"flash_attn/__init__.py": ""}, "note", "which is not installed"),
    (
        "flash-attn-4",
        {
            "flash_attn/__init__.py": "",
            "flash_attn/cute/__init__.py": "",
            "flash_attn/cute/interface.py": "import nvidia_cutlass_of_nobody",
        },
        "bad",
        "can't be imported: No module named 'nvidia_cutlass_of_nobody'",
    ),
    (
        "flash-attn",
        {
            "flash_attn/__init__.py": "",
            "flash_attn/flash_attn_interface.py": "raise ImportError('undefined symbol: _ZN3c10')",
        },
        "bad",
        "undefined symbol: _ZN3c10",
    ),
]


@contextmanager
def site_of(folder: str) -> Iterator[None]:
    """Provide the kernels' packages out of a folder, whatever this machine has."""
    names = ("triton", "flash_attn")
    kept = {n: m for n, m in sys.modules.items() if n.split(".")[0] in names}
    kernels.forget()
    with mock.patch.dict(sys.modules), mock.patch.object(sys, "path", [folder, *sys.path]):
        for name in kept:
            del sys.modules[name]
        with mock.patch.object(sys, "meta_path", [Hidden(names), *sys.meta_path]):
            yield
    kernels.forget()


class Hidden:
    """A finder that finds some packages in the first folder of sys.path, or nowhere."""

    def __init__(self, names: tuple[str, ...]):
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        del target
        wanted = name in self.names and path is None
        if wanted and not (Path(sys.path[0]) / name).is_dir():
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.mark.parametrize(("package", "files", "status", "words"), PACKAGES)
def test_broken_packages_get_their_diagnosis(
    package: str, files: dict[str, str], status: str, words: str
) -> None:
    with TemporaryDirectory() as folder, site_of(folder):
        for name, text in files.items():
            place = Path(folder) / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
        finding = told(gather_facts("cpu"), package, "gloo")
    assert finding.status == status, finding
    assert words in finding.text
