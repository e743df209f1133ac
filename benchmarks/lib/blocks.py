"""Time a kernel on one block of queries and keys, on a CUDA device."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from benchmarks.lib.direct import DIRECT, Runs
from benchmarks.lib.results import Row
from ring_attention_pytorch.geometry.layouts import Segment
from ring_attention_pytorch.geometry.tiles import Mask, Tile, tiles, visible_pairs
from ring_attention_pytorch.kernels import KERNELS
from ring_attention_pytorch.progress import counted
from ring_attention_pytorch.runtime.accumulate import GradAccumulator, OutputAccumulator
from ring_attention_pytorch.runtime.interfaces import (
    Grads,
    KVBlock,
    Residuals,
    ScoreMods,
    Tiles,
)

WINDOW = 4096
MASKS = ("causal", "full", "window")


@dataclass(frozen=True)
class Shape:
    """Hold the sizes of one block: n queries and keys, and which of them are visible.

    Values have heads of `d` unless `d_v` is given.
    """

    n: int = 8192
    d: int = 128
    mask: str = "causal"
    dtype: str = "bfloat16"
    heads: int = 32
    key_heads: int = 8
    d_v: int | None = None

    @property
    def of_values(self) -> int:
        return self.d if self.d_v is None else self.d_v

    @property
    def window(self) -> int | None:
        return min(WINDOW, self.n // 2) if self.mask == "window" else None

    def about(self) -> Row:
        """Return what rows say of it."""
        return {
            "tokens": self.n,
            "mask": self.mask if self.window is None else f"window {self.window}",
            "heads": [self.heads, self.key_heads],
            "head_dim": self.d if self.d_v is None else [self.d, self.d_v],
            "dtype": self.dtype,
        }

    def tiles(self) -> tuple[Tile, ...]:
        """Return the tiles that the mask shows."""
        whole = (Segment(0, 1, self.n),)
        return tiles(whole, whole, Mask(self.mask != "full", self.window))

    def flops(self) -> float:
        """Return FLOPs forward."""
        return 2.0 * self.heads * (self.d + self.of_values) * visible_pairs(self.tiles())


class Block:
    """Hold the tensors of a shape, and make what is timed on them."""

    def __init__(self, shape: Shape) -> None:
        self.shape, n, d = shape, shape.n, shape.d
        kinds = dict(device="cuda", dtype=getattr(torch, shape.dtype))
        widths = d, shape.of_values
        self.q, self.dout = (torch.randn(1, n, shape.heads, width, **kinds) for width in widths)
        self.k, self.v = (torch.randn(1, n, shape.key_heads, width, **kinds) for width in widths)
        self.found, self.terms = Tiles(shape.tiles()), ScoreMods(d**-0.5, None, 1024)

    def kernel(self, name: str, more: bool) -> Runs:
        """Make the calls of a kernel; with `more` of one more block, not of the only one."""
        impl, keys = KERNELS[name], KVBlock(self.k, self.v, None, (Segment(0, 1, self.shape.n),))
        calls = None if more else 1

        def result() -> OutputAccumulator:
            return OutputAccumulator(self.q, self.v.shape[-1], calls=calls)

        def grads() -> Grads:
            return Grads(*(GradAccumulator(t, calls=calls) for t in (self.q, self.k, self.v)))

        first, sums = result(), grads()
        impl.forward(self.q, keys, self.found, self.terms, first)
        out, lse = (t.clone() for t in first.finalize())

        def forward() -> None:
            whole = first if more else result()
            impl.forward(self.q, keys, self.found, self.terms, whole)
            (whole.begin_update if more else whole.finalize)()

        def backward() -> None:
            saved = Residuals(self.q, out, lse, self.dout, None)  # its delta is made anew
            whole = sums if more else grads()
            impl.backward(saved, keys, self.found, self.terms, whole)
            for total in whole:
                (total.begin_update if more else total.finalize)()

        return {"forward": forward, "backward": backward}

    def direct(self, name: str) -> Runs:
        """Make the calls of the same code without this library, where there is one."""
        if name not in DIRECT:
            return {}
        (tile,) = self.found
        return DIRECT[name]((self.q, self.k, self.v, self.dout, tile))


def seconds(runs: list[Callable[[], object]], budget: float = 0.02, rounds: int = 5) -> list[float]:
    """Return the median batch of each, taken in turn, by the device's clock."""

    def batch(run: Callable[[], object], times: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(times):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / times

    for run in runs:
        run()
    times = [max(1, int(budget / max(batch(run, 1), 1e-6))) for run in runs]
    turns = counted(range(rounds), "by turns", rounds, "rounds")
    found = [[batch(run, n) for run, n in zip(runs, times)] for _ in turns]
    return [median(each) for each in zip(*found)]
