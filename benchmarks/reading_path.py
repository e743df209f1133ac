"""Count what a reader meets between `ring_attn` and a sent message.

    python -m benchmarks reading-path          # the table
    python -m benchmarks reading-path --list   # and every function, in the order of first calls

A call of four ranks over gloo, zigzag and causal, is profiled on rank 1. Counted is Python code of
this package alone, once for each function. The wrappers of beartype are left out.
"""

import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import ring_attention_pytorch
from benchmarks.lib.options import parser
from benchmarks.lib.results import markdown
from ring_attention_pytorch import RingPlan, ring_attn
from ring_attention_pytorch.launch import spawn

PACKAGE = Path(ring_attention_pytorch.__file__).parent
INNER = ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>", "<lambda>")  # parts of a function


class Met(NamedTuple):
    """Say what was met on the way."""

    functions: list[str]  # "file:name", in the order of first calls
    classes: list[str]  # whose methods ran
    calls: int
    switches: int  # from a file to another

    @property
    def files(self) -> int:
        return len({function.split(":")[0] for function in self.functions})


class Profiler:
    """Note each call of a function of the package."""

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
        """Sum up the calls so far."""
        files = [file for file, _, _ in self._calls]
        return Met(
            functions=list(dict.fromkeys(f"{file}:{name}" for file, name, _ in self._calls)),
            classes=sorted({owner for _, _, owner in self._calls if owner}),
            calls=len(self._calls),
            switches=sum(a != b for a, b in pairwise(files)),
        )


def profiled(call: Callable[[], Any]) -> Met:
    """Return what a call meets, in this thread."""
    profiler = Profiler()
    sys.setprofile(profiler)
    try:
        call()
    finally:
        sys.setprofile(None)
    return profiler.met()


def walks(rank: int, transport: str) -> dict[str, Met]:
    """Return what a plan, a first forward, a second one and a backward meet on this rank."""
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


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    options = parser("reading-path", __doc__)
    options.add_argument("--ranks", type=int, default=4)
    options.add_argument("--list", action="store_true", help="name the functions, too")
    asked = options.parse_args(argv)
    met = {
        f"{name}, {transport}": each
        for transport in ("ring", "gather")
        for name, each in spawn(walks, asked.ranks, transport)[1].items()
    }
    lines = []
    for name, each in met.items():
        counts = len(each.functions), each.files, len(each.classes), each.calls, each.switches
        lines.append([name, *map(str, counts)])
    print(markdown(["", "functions", "files", "classes", "calls", "changes of file"], lines))
    for name, each in met.items() if asked.list else ():
        print(f"\n{name}\n  " + "\n  ".join(each.functions))
        print(f"  classes: {', '.join(each.classes)}")
