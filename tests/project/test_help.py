"""`--help` of every benchmark: its docstring, and the default of every option."""

import argparse
from importlib import import_module
from typing import Any
from unittest import mock

import pytest

from benchmarks.__main__ import NAMES, main


def told(default: Any) -> str:
    """A default as help has it."""
    several = default if isinstance(default, list | tuple) else [default]
    return f"({' '.join('default' if each is None else str(each) for each in several)})"


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_says_what_it_is_with_every_default(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        module = import_module(f"benchmarks.{NAMES[name]}")
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    seen, parse = [], argparse.ArgumentParser.parse_args

    def noted(parser: argparse.ArgumentParser, *given: Any) -> argparse.Namespace:
        seen.append(parser)
        return parse(parser, *given)

    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", noted),
        mock.patch("ring_attention_pytorch.progress.show"),
        pytest.raises(SystemExit) as end,
    ):
        main([name, "--help"])
    said = "".join(capsys.readouterr().out.split())
    assert end.value.code == 0
    assert "".join((module.__doc__ or "").split()) in said
    for action in seen[0]._actions:
        if action.default not in (None, argparse.SUPPRESS) and action.default is not False:
            assert "".join(told(action.default).split()) in said, action
