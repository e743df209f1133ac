"""TF/s of every kernel on one block, forward and backward, beside PyTorch's own in the same run.

    python -m benchmarks.bench_kernels                     # a table
    python -m benchmarks.bench_kernels --sweep --d 128     # the best Triton configs of a shape

Batch 1; FLOPs are those of the visible pairs, backward 2.5 times forward. A kernel's time
includes all that the ring asks of it: merging into running results, adding to gradients.
"""

import argparse
import itertools
import multiprocessing as mp
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

import torch
from torch import Tensor

from ring_attention_pytorch.contract import Case, Grads, Keys, Saved, Terms
from ring_attention_pytorch.kernels import KERNELS, problem
from ring_attention_pytorch.kernels import triton as ours
from ring_attention_pytorch.kernels.triton import Config
from ring_attention_pytorch.layouts import Segment, Tile, Visible, tiles, visible_pairs
from ring_attention_pytorch.running import Result, Sum

Runs = dict[str, Callable[[], object]]
REFERENCES = ("(cudnn)", "(flash 2)")  # PyTorch's operators by themselves
DIRECTIONS = ("forward", "keys", "queries")


@dataclass(frozen=True)
class Shape:
    """One block: n queries and keys, and which of them are visible."""

    n: int = 8192
    d: int = 128
    mask: str = "causal"
    dtype: torch.dtype = torch.bfloat16
    heads: int = 32
    key_heads: int = 8

    def tiles(self) -> tuple[Tile, ...]:
        window = min(4096, self.n // 2) if self.mask == "window" else None
        whole = (Segment(0, 1, self.n),)
        return tiles(whole, whole, Visible(self.mask != "full", window))

    def flops(self) -> float:
        return 4.0 * self.heads * self.d * visible_pairs(self.tiles())


class Block:
    """The tensors of a shape, and what to time on them."""

    def __init__(self, shape: Shape) -> None:
        self.shape, n, d = shape, shape.n, shape.d
        kinds = dict(device="cuda", dtype=shape.dtype)
        self.q, self.dout = (torch.randn(1, n, shape.heads, d, **kinds) for _ in range(2))
        self.k, self.v = (torch.randn(1, n, shape.key_heads, d, **kinds) for _ in range(2))
        self.terms = Terms(d**-0.5, None, 1024)

    def kernel(self, name: str) -> Runs:
        impl, found = KERNELS[name], self.shape.tiles()
        keys = Keys(self.k, self.v, None, (Segment(0, 1, self.shape.n),))
        in_place = name == "triton"  # others give whole parts, of which the first is the result

        def result() -> Result:
            return Result(self.q, self.v)

        def grads() -> Grads:
            return Grads(Sum(self.q), Sum(self.k), Sum(self.v))

        first, sums = result(), grads()
        impl.forward(self.q, keys, found, self.terms, first)
        out, lse = first.final()
        delta = (self.dout.float() * out.float()).sum(-1).transpose(1, 2).contiguous()
        saved = Saved(self.q, out, lse.clone(), self.dout, delta, None)
        return {
            "forward": lambda: impl.forward(
                self.q, keys, found, self.terms, first if in_place else result()
            ),
            "backward": lambda: impl.backward(
                saved, keys, found, self.terms, sums if in_place else grads()
            ),
        }

    def cudnn(self) -> Runs:
        """cuDNN through PyTorch; it has no window."""
        aten, causal = torch.ops.aten, self.shape.mask == "causal"
        if self.shape.mask == "window":
            raise NotImplementedError
        q, k, v, dout = (t.transpose(1, 2) for t in (self.q, self.k, self.v, self.dout))

        def forward() -> tuple[Tensor, ...]:
            return aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False)

        out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = forward()

        def backward() -> tuple[Tensor, ...]:
            return aten._scaled_dot_product_cudnn_attention_backward(
                dout, q, k, v, out, lse, seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, causal
            )

        return {"forward": forward, "backward": backward}

    def flash(self) -> Runs:
        """Flash attention 2, as it is inside PyTorch."""
        aten, n, q, k, v = torch.ops.aten, self.shape.n, self.q, self.k, self.v
        (tile,) = self.shape.tiles()
        causal = self.shape.mask != "full"
        window = dict(window_size_left=tile.left, window_size_right=0) if tile.left else {}

        def forward() -> tuple[Tensor, ...]:
            return aten._flash_attention_forward(
                q, k, v, None, None, n, n, 0.0, causal, False, **window
            )

        out, lse, state, unused, _ = forward()

        def backward() -> tuple[Tensor, ...]:
            return aten._flash_attention_backward(
                self.dout, q, k, v, out, lse, None, None, n, n, 0.0, causal, state, unused, **window
            )

        return {"forward": forward, "backward": backward}


def seconds(run: Callable[[], object], budget: float = 0.04) -> float:
    """The median over a few batches of calls, by the device's clock."""

    def batch(times: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(times):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / times

    run()
    times = max(1, int(budget / max(batch(1), 1e-6) / 3))
    return sorted(batch(times) for _ in range(3))[1]


def speeds(make: Callable[[], Runs], shape: Shape) -> dict[str, float]:
    """TF/s by direction; nothing where it can't be done."""
    try:
        runs = make()
        return {
            name: (2.5 if name == "backward" else 1.0) * shape.flops() / seconds(run) / 1e12
            for name, run in runs.items()
        }
    except (RuntimeError, NotImplementedError, ValueError) as error:
        if "out of memory" in str(error):
            torch.cuda.empty_cache()
        return {}
    except Exception as error:  # a Triton compiler's error has no base class of its own
        print(f"{shape}: {type(error).__name__}: {str(error)[:200]}")
        return {}


def measured(shape: Shape) -> dict[str, dict[str, float]]:
    """By kernel or reference, by direction."""
    block = Block(shape)
    case = Case.of(block.q, block.v, window=1 if shape.mask == "window" else None)
    able = [n for n in KERNELS if n != "eager" and problem(n, case) is None]
    makers: dict[str, Callable[[], Runs]] = {n: lambda n=n: block.kernel(n) for n in able}
    makers |= zip(REFERENCES, (block.cudnn, block.flash))
    return {name: speeds(make, shape) for name, make in makers.items()}


def table(shapes: list[Shape]) -> Iterator[str]:
    """Markdown, a line at a time: forward / backward, and triton's share of the best."""
    names = [*(name for name in KERNELS if name not in ("eager", "sdpa")), *REFERENCES]
    yield f"| d | mask | n | {' | '.join(names)} | triton / best |"
    yield "|" + "---|" * (len(names) + 4)
    for shape in shapes:
        found = measured(shape)
        cells = []
        for name in names:
            pair = [found.get(name, {}).get(x) for x in ("forward", "backward")]
            cells.append(" / ".join("-" if x is None else f"{x:.0f}" for x in pair))
        best = {
            x: max((s[x] for s in found.values() if x in s), default=0.0)
            for x in ("forward", "backward")
        }
        mine = found.get("triton", {})
        ratio = " / ".join(f"{mine[x] / best[x]:.2f}" if x in mine else "-" for x in best)
        yield f"| {shape.d} | {shape.mask} | {shape.n} | {' | '.join(cells)} | {ratio} |"


# --- Triton configs ---


def warm(shape: Shape, direction: str, config: Config | None) -> None:
    """Compile one kernel into Triton's cache on disk, in a process of its own."""
    small = Shape(512, shape.d, shape.mask, shape.dtype, 8, 2)
    try:
        run_direction(Block(small), direction, config)()
    except Exception:  # it will be told when it is timed
        return


def warm_all(jobs: list[tuple[Shape, str, Config | None]]) -> None:
    workers = min(14, os.cpu_count() or 1, len(jobs))
    with ProcessPoolExecutor(workers, mp_context=mp.get_context("spawn")) as pool:
        for each in as_completed([pool.submit(warm, *job) for job in jobs]):
            each.result()


def run_direction(block: Block, direction: str, config: Config | None) -> Callable[[], None]:
    """One launch of one kernel with a config."""
    keys = Keys(block.k, block.v, None, ())
    found, terms = block.shape.tiles(), block.terms
    result = Result(block.q, block.v)
    lse = result.running()[1]
    delta = torch.zeros_like(lse)
    saved = Saved(block.q, block.dout, torch.full_like(lse, 9.0), block.dout, delta, None)
    grads = Grads(Sum(block.q), Sum(block.k), Sum(block.v))

    def run() -> None:
        with ours.configured(**({} if config is None else {direction: config})):
            if direction == "forward":
                ours.forward(block.q, keys, found, terms, result)
            elif direction == "queries":
                ours._backward_of_queries(saved, keys, found, terms, grads)
            else:
                ours._backward_of_keys(saved, keys, found, terms, grads)

    return run


def configs(direction: str, d: int) -> list[Config]:
    """What may be worth trying; what does not fit fails and is left out."""
    sizes = {
        "forward": [(128, 64, 8), (128, 128, 8), (64, 64, 4), (64, 128, 4)],
        "queries": [(128, 64, 8), (128, 128, 8), (64, 64, 4), (64, 32, 4)],
        "keys": [(64, 128, 8), (64, 64, 4), (32, 128, 8), (32, 64, 4)],
    }[direction]
    if d <= 64:
        sizes += [(128, 128, 8), (128, 64, 4), (128, 128, 4)] if direction != "forward" else []
        sizes += [(128, 64, 4), (256, 64, 8), (64, 64, 8)] if direction == "forward" else []
    if d > 128 and direction != "forward":
        sizes += [(64, 64, 8), (32, 32, 4), (64, 32, 8)]
    return [
        Config(*size, stages, tma)
        for size, stages, tma in itertools.product(dict.fromkeys(sizes), (1, 2, 3), (True, False))
        if (tma and stages > 1) or (stages == 2 and not tma) or (d > 128 and stages == 1)
    ]


def sweep(shape: Shape, directions: list[str]) -> None:
    """The fastest configs of each direction, for one shape."""
    trials = [(x, config) for x in directions for config in configs(x, shape.d)]
    start = time.perf_counter()
    warm_all([(shape, *trial) for trial in trials])
    print(f"{shape}: {len(trials)} configs compiled in {time.perf_counter() - start:.0f} s")
    share = {"forward": 1.0, "keys": 2.5, "queries": 2.5}
    block = Block(shape)
    for direction in directions:
        found, failed = [], 0
        for config in (c for x, c in trials if x == direction):
            try:
                elapsed = seconds(run_direction(block, direction, config), 0.02)
                found.append((share[direction] * shape.flops() / elapsed / 1e12, config))
            except Exception:  # too large for the GPU: not a candidate
                failed += 1
        found.sort(reverse=True)
        print(f"{direction}, {failed} do not fit:")
        for speed, config in found[:3]:
            print(f"  {speed:5.0f} TF/s  {tuple(config)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--d", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--n", type=int, nargs="+", default=[2048, 8192, 32768, 65536])
    parser.add_argument("--mask", nargs="+", default=["causal", "full", "window"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--heads", type=int, nargs=2, default=[32, 8], metavar=("H", "H_KV"))
    parser.add_argument("--sweep", action="store_true", help="try Triton configs for the shapes")
    parser.add_argument("--directions", nargs="+", default=list(DIRECTIONS), choices=DIRECTIONS)
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_kernels needs a CUDA device")
    dtype = getattr(torch, asked.dtype)
    shapes = [
        Shape(n, d, mask, dtype, *asked.heads)
        for d in asked.d for mask in asked.mask for n in asked.n
    ]  # fmt: skip
    if asked.sweep:
        for shape in shapes:
            sweep(shape, asked.directions)
        return
    classes = [Shape(512, d, "causal", dtype) for d in asked.d]
    warm_all([(shape, direction, None) for shape in classes for direction in DIRECTIONS])
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {asked.dtype}, heads "
          f"{asked.heads}; TF/s forward / backward")  # fmt: skip
    for line in table(shapes):
        print(line, flush=True)


if __name__ == "__main__":
    main()
