"""Count what a reader meets between `ring_attn` and a sent message.

    python -m benchmarks reading-path          # the table
    python -m benchmarks reading-path --list   # and every function, in the order of first calls

A call of four ranks over gloo, zigzag and causal, is profiled on rank 1. So are a step of decoding,
a loss, a batch, a layer and a model of transformers. Counted is Python code of this package alone,
once for each function. The wrappers of beartype are left out.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
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
from ring_attention_pytorch import (
    RingAttention,
    RingCache,
    RingPlan,
    ring_attn,
    ring_attn_with_cache,
    ring_cross_entropy,
    shard_batch,
)
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
    for name in ("backward", "backward, again"):
        out = forward()
        found[name] = profiled(out.sum().backward)
    return found


def walks_around(rank: int) -> dict[str, Met]:
    """Return what is met around attention: each at first, and again."""
    torch.set_num_threads(1)
    torch.manual_seed(0)  # all ranks decode the same tokens, and have the same layer
    cache = RingCache(1, key_heads=2, head_dim=8, group=dist.group.WORLD)
    q, k, x = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 2, 8), torch.randn(1, 32, 32)
    logits, ids = torch.randn(1, 8, 16, requires_grad=True), torch.arange(32)[None] % 16
    layer = RingAttention(dim=32, heads=4, dim_head=8, causal=True)
    found = {}
    for name, walk in {
        "decode step": lambda: ring_attn_with_cache(q, k, k, cache),
        "ring_cross_entropy": lambda: ring_cross_entropy(logits, ids[:, :8]),
        "shard_batch": lambda: shard_batch({"input_ids": ids, "labels": ids}),
        "RingAttention": lambda: layer(x),
    }.items():
        found[name] = profiled(walk)
        found[f"{name}, again"] = profiled(walk)
    return found


def walks_of_transformers(rank: int) -> dict[str, Met]:
    """Return what a small Llama and its loss meet, at first and again."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from ring_attention_pytorch.integrations.transformers import register, ring_forward

    torch.set_num_threads(1)
    torch.manual_seed(0)
    register()
    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2, vocab_size=16)
    heads = dict(num_attention_heads=4, num_key_value_heads=2)
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, attn_implementation="ring"))
    ids = torch.arange(32)[None] % 16
    batch = shard_batch({"input_ids": ids, "labels": ids})

    def forward() -> None:
        with ring_forward(batch) as inputs:
            model(**inputs)

    return {"Hugging Face": profiled(forward), "Hugging Face, again": profiled(forward)}


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
    met |= spawn(walks_around, 2)[1]
    if find_spec("transformers") is not None:
        met |= spawn(walks_of_transformers, 2)[1]
    lines = []
    for name, each in met.items():
        counts = len(each.functions), each.files, len(each.classes), each.calls, each.switches
        lines.append([name, *map(str, counts)])
    print(markdown(["", "functions", "files", "classes", "calls", "changes of file"], lines))
    for name, each in met.items() if asked.list else ():
        print(f"\n{name}\n  " + "\n  ".join(each.functions))
        print(f"  classes: {', '.join(each.classes)}")
