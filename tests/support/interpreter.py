"""Processes in which Triton's interpreter runs kernels on the CPU.

It must be asked for before Triton is imported, and no other test is to see it. So they are forked
from where PyTorch has been imported, and Triton has not.
"""

import importlib.util
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch

from tests.support.forks import light, set_light

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


def _interpret() -> None:
    assert "triton" not in sys.modules
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    _lighten()


def _lighten() -> None:
    """Drop the work that Triton's interpreter repeats without effect, two thirds of its time.

    It patches `triton.language` anew for each call of a device function, looks up dtypes in a table
    that it first builds, and works out whether integers overflow without looking at the answer:
    unless `debug` is set, which it cannot be.
    """
    from triton.language import semantic
    from triton.runtime import interpreter

    patch, scopes = interpreter._patch_lang, dict[str, object]()
    look_up, dtypes = interpreter._get_np_dtype, dict[str, Any]()

    def patch_once(function: Callable[..., Any]) -> object:
        if function.__module__ not in scopes:
            patch(function)  # for good: what it returns would undo it
            scopes[function.__module__] = interpreter._LangPatchScope()
        return scopes[function.__module__]

    def look_up_once(dtype: Any) -> Any:
        if dtype.name not in dtypes:
            dtypes[dtype.name] = look_up(dtype)
        return dtypes[dtype.name]

    interpreter._patch_lang, interpreter._get_np_dtype = patch_once, look_up_once
    assert not interpreter.interpreter_builder.options.debug
    semantic.TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None


def interpreters(processes: int) -> ProcessPoolExecutor:
    set_light()
    return ProcessPoolExecutor(processes, mp_context=light, initializer=_interpret)
