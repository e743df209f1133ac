"""Examples in docstrings are true."""

import doctest
import importlib
import pkgutil

import pytest
import torch

import ring_attention_pytorch


def modules() -> list[str]:
    package = ring_attention_pytorch
    return [
        m.name
        for m in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        if not m.name.endswith("__main__") and ".compat." not in m.name  # there by old paths
    ]


@pytest.mark.parametrize("name", modules())
def test_the_examples_in_docstrings_are_true(name):
    if ".integrations." in name:
        pytest.importorskip("transformers")
        pytest.importorskip("accelerate")
    module = importlib.import_module(name)
    assert doctest.testmod(module, extraglobs={"torch": torch}).failed == 0


def test_examples_are_found_behind_decorators():
    module = importlib.import_module("ring_attention_pytorch.geometry.layouts")
    found = {t.name.rpartition(".")[2] for t in doctest.DocTestFinder().find(module) if t.examples}
    assert "positions" in found
