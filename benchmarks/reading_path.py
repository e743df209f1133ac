"""Count what a reader meets between `ring_attn` and a sent message: functions, files, classes.

    python -m benchmarks.reading_path          # the table
    python -m benchmarks.reading_path --list   # and every function, in the order of first calls

A call of four ranks over gloo, zigzag and causal, is profiled on rank 1. Counted is Python code of
this package alone, once for each function. The wrappers of beartype are left out.
"""

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import click
import torch
import torch.distributed as dist
from torch import Tensor

import ring_attention_pytorch
from ring_attention_pytorch import RingPlan, ring_attn
from ring_attention_pytorch.launch import spawn

PACKAGE = Path(ring_attention_pytorch.__file__).parent
INNER = ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>", "<lambda>")  # parts of a function


class Met(NamedTuple):
    """What was met on the way."""

    functions: list[str]  # "file:name", in the order of first calls
    classes: list[str]  # whose methods ran
    calls: int
    switches: int  # from a file to another

    @property
    def files(self) -> int:
        return len({function.split(":")[0] for function in self.functions})


class Profiler:
    """Notes each call of a function of the package."""

    def __init__(self) -> None:
        self._calls: list[tuple[str, str, str]] = []  # file, function, its class or ""

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and (place := self._place(frame.f_code)) is not None:
            self._calls.append(place)

    @staticmethod
    def _place(code: CodeType) -> tuple[str, str, str] | None:
        file = Path(code.co_filename)
        if PACKAGE not in file.parents or code.co_name in INNER:
            return None
        name = code.co_qualname.split(".<locals>.")[0]
        owner = name.rpartition(".")[0]
        return str(file.relative_to(PACKAGE)), name, owner

    def met(self) -> Met:
        files = [file for file, _, _ in self._calls]
        return Met(
            functions=list(dict.fromkeys(f"{file}:{name}" for file, name, _ in self._calls)),
            classes=sorted({owner for _, _, owner in self._calls if owner}),
            calls=len(self._calls),
            switches=sum(a != b for a, b in pairwise(files)),
        )


def profiled(call: Callable[[], Any]) -> Met:
    """What the call meets, in this thread."""
    profiler = Profiler()
    sys.setprofile(profiler)
    try:
        call()
    finally:
        sys.setprofile(None)
    return profiler.met()


def walks(rank: int, transport: str) -> dict[str, Met]:
    """What a plan, a first forward and a second forward and backward meet on this rank."""
    torch.set_num_threads(1)
    q, k, v = (torch.randn(1, 16, 4, 8, requires_grad=True) for _ in range(3))
    how: dict[str, Any] = dict(group=dist.group.WORLD, causal=True, layout="zigzag")
    how |= dict(transport=transport, kernel="sdpa")
    plans: list[RingPlan] = []

    def make() -> None:
        plans.append(RingPlan.make(q, k, v, **how))

    def forward() -> Tensor:
        return ring_attn(q, k, v, plan=plans[0])

    found = {
        "RingPlan.make": profiled(make),
        "forward": profiled(forward),
        "forward, again": profiled(forward),
    }
    out = forward()
    found["backward"] = profiled(out.sum().backward)
    return found


@click.command()
@click.option("--ranks", default=4)
@click.option("--list", "listed", is_flag=True, help="Name the functions, too.")
def main(ranks: int, listed: bool) -> None:
    """Print the table."""
    print("| | functions | files | classes | calls | changes of file |\n|---|---|---|---|---|---|")
    lists = []
    for transport in ("ring", "gather"):
        for name, met in spawn(walks, ranks, transport)[1].items():
            counts = len(met.functions), met.files, len(met.classes), met.calls, met.switches
            print(f"| {name}, {transport} | {' | '.join(map(str, counts))} |", flush=True)
            lists.append((f"{name}, {transport}", met))
    for title, met in lists if listed else ():
        print(f"\n{title}\n  " + "\n  ".join(met.functions))
        print(f"  classes: {', '.join(met.classes)}")


if __name__ == "__main__":
    main()
