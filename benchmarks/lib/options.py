"""The options that benchmarks share; each names those that it takes, with its defaults."""

import argparse
from pathlib import Path
from typing import Any

from benchmarks.lib.results import RESULTS
from ring_attention_pytorch.kernels import KERNELS

OPTIONS: dict[str, dict[str, Any]] = {
    "device": dict(choices=("cuda", "cpu")),
    "tokens": dict(type=int, nargs="+", help="of one rank"),
    "n": dict(type=int, nargs="+", help="queries and keys of a block"),
    "d": dict(type=int, nargs="+", help="dims of a head"),
    "mask": dict(nargs="+", choices=("causal", "full")),
    "heads": dict(type=int, nargs=2, metavar=("H", "H_KV"), help="of queries, and of keys"),
    "dim-head": dict(type=int),
    "dtype": dict(help="unless given bfloat16 on CUDA, float32 on the CPU"),
    "kernels": dict(nargs="+", choices=list(KERNELS)),
    "graphs": dict(action="store_true", help="in CUDA graphs, too"),
    "rounds": dict(type=int, help="in which subjects take turns"),
    "repeats": dict(type=int, help="calls of a round"),
}


class Parser(argparse.ArgumentParser):
    """A parser whose `--help` has the benchmark's docstring as it is, and every default.

    >>> options = Parser("Time one rank.")
    >>> _ = options.add_argument("--tokens", nargs="+", default=[2048, 4096], help="of one rank")
    >>> options.format_help().splitlines()[-1]
    '  --tokens TOKENS [TOKENS ...]  of one rank (2048 4096)'
    """

    def __init__(self, about: str | None, name: str | None = None) -> None:
        of_text = argparse.RawDescriptionHelpFormatter
        prog = None if name is None else f"python -m benchmarks {name}"
        super().__init__(prog, description=about, formatter_class=of_text)

    def format_help(self) -> str:
        """Return the help, with defaults in parentheses."""
        plain = {action: action.help for action in self._actions}
        for action in self._actions:
            if action.default not in (None, argparse.SUPPRESS) and action.default is not False:
                action.help = f"{action.help or ''} ({_written(action.default)})".strip()
        try:
            return super().format_help()
        finally:
            for action, text in plain.items():
                action.help = text


def _written(default: Any) -> str:
    """Write a default as on the command line; None among several is a default of its own."""
    several = default if isinstance(default, list | tuple) else [default]
    written = " ".join("default" if each is None else str(each) for each in several)
    return written.replace("%", "%%")  # argparse fills in the rest


def parser(
    name: str, about: str, *, save: str | None = None, **defaults: Any
) -> argparse.ArgumentParser:
    """Make a benchmark's parser, with the shared options that have a default here.

    Args:
        name: what the benchmark is called by.
        about: its module's docstring, which `--help` prints.
        save: the file in benchmarks/results that `--save` writes, without ".json".
        defaults: by the names of `OPTIONS`, with _ for -.
    """
    found = Parser(about, name)
    for option, default in defaults.items():
        flag = option.replace("_", "-")
        found.add_argument(f"--{flag}", default=default, **OPTIONS[flag])
    if save is not None:
        found.add_argument(
            "--save", type=Path, nargs="?", const=RESULTS / f"{save}.json", metavar="FILE.json",
            help=f"keep the rows, in benchmarks/results/{save}.json unless named",
        )  # fmt: skip
    return found
