"""Find the fastest block sizes of the Triton kernels: for the tables in kernels/_configs.py.

    python -m benchmarks sweep --d 128 --n 8192 --mask full
    python -m benchmarks sweep --d 192 --d-v 128 --heads 16 16 --mask causal

Each direction's fastest blocks follow the speed of those that the tables have now. Needs a CUDA
device.
"""

import itertools
import multiprocessing as mp
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch

from benchmarks.lib.blocks import MASKS, Block, Shape, seconds
from benchmarks.lib.options import parser
from ring_attention_pytorch.kernels import triton
from ring_attention_pytorch.kernels._configs import Config, configured
from ring_attention_pytorch.kernels._job import Job, Rows
from ring_attention_pytorch.runtime.accumulate import GradAccumulator, OutputAccumulator
from ring_attention_pytorch.runtime.interfaces import KVBlock, Residuals

DIRECTIONS = ("forward", "keys", "queries")


def warm(shape: Shape, direction: str, config: Config | None) -> None:
    """Compile one kernel into Triton's cache on disk, in a process of its own.

    It is launched at its full size, because numbers of heads and blocks specialize it.
    """
    try:
        run_direction(Block(shape), direction, config)()
    except Exception:  # it will be told when it is timed
        return


def warm_all(jobs: list[tuple[Shape, str, Config | None]]) -> None:
    """Compile all kernels, some at a time."""
    workers = min(14, os.cpu_count() or 1, len(jobs))
    with ProcessPoolExecutor(workers, mp_context=mp.get_context("spawn")) as pool:
        for each in as_completed([pool.submit(warm, *job) for job in jobs]):
            each.result()


def run_direction(block: Block, direction: str, config: Config | None) -> Callable[[], None]:
    """Make what launches one kernel with a config."""
    keys = KVBlock(block.k, block.v, None, ())
    found, terms = block.found, block.terms
    result = OutputAccumulator(block.q, block.v.shape[-1])
    lse = result.begin_update()[1]
    saved = Residuals(block.q, block.dout, torch.full_like(lse, 9.0), block.dout, None)
    dq, dk, dv = GradAccumulator(block.q), GradAccumulator(block.k), GradAccumulator(block.v)
    given = Job(found, terms), *Rows.of(saved), *keys[:3]

    def run() -> None:
        with configured(**({} if config is None else {direction: config})):
            if direction == "forward":
                triton.forward(block.q, keys, found, terms, result)
            elif direction == "queries":
                triton._backward_of_queries(*given, *dq.update_memory())
            else:
                triton._backward_of_keys(*given, *dk.update_memory(), *dv.update_memory())

    return run


def configs(direction: str, shape: Shape) -> list[Config]:
    """List what may be worth trying; what does not fit fails and is left out."""
    d = max(shape.d, shape.of_values)
    sizes = {
        "forward": [(128, 64, 8), (128, 128, 8), (64, 64, 4), (64, 128, 4), (64, 32, 4)],
        "queries": [(128, 64, 8), (128, 128, 8), (64, 64, 4), (64, 32, 4)],
        "keys": [(64, 128, 8), (64, 64, 4), (32, 128, 8), (32, 64, 4)],
    }[direction]
    if d <= 64:
        sizes += [(128, 128, 8), (128, 64, 4), (128, 128, 4)] if direction != "forward" else []
        sizes += [(128, 64, 4), (256, 64, 8), (64, 64, 8)] if direction == "forward" else []
    if d > 128 and direction != "forward":
        sizes += [(64, 64, 8), (32, 32, 4), (64, 32, 8), (64, 32, 4)]
    if d > 128 and direction == "queries":
        sizes += [(128, 32, 8)]
    tried = [
        Config(*size, stages, tma, pack).of_group(shape.heads // shape.key_heads)
        for size, stages, tma, pack in itertools.product(sizes, (1, 2, 3), (True, False), (1, 8))
        if (tma and stages > 1) or (stages == 2 and not tma) or (d > 128 and stages == 1)
    ]
    return list(dict.fromkeys(tried))


def sweep(shape: Shape, directions: list[str]) -> None:
    """Print the fastest configs of each direction, for one shape."""
    trials = [(x, config) for x in directions for config in (None, *configs(x, shape))]
    start = time.perf_counter()
    warm_all([(shape, *trial) for trial in trials])
    print(f"{shape}: {len(trials)} configs compiled in {time.perf_counter() - start:.0f} s")
    share = {"forward": 1.0, "keys": 2.5, "queries": 2.5}
    block = Block(shape)
    for direction in directions:
        found: dict[Config | None, float] = {}
        failed = 0
        for config in (c for x, c in trials if x == direction):
            try:
                elapsed = seconds([run_direction(block, direction, config)])[0]
                found[config] = share[direction] * shape.flops() / elapsed / 1e12
            except Exception:  # too large for the GPU: not a candidate
                failed += 1
        print(f"{direction}, {failed} do not fit:")
        print(f"  {found.pop(None):5.0f} TF/s  as it is")
        for config in sorted(found, key=found.__getitem__, reverse=True)[:3]:
            print(f"  {found[config]:5.0f} TF/s  {tuple(config)}")


def main(argv: Sequence[str] | None = None) -> None:
    """Try all configs of each shape, and print the fastest."""
    options = parser("sweep", __doc__, d=[128], n=[8192], heads=[32, 8], dtype="bfloat16")
    options.add_argument("--d-v", type=int, help="dims of a head of values; unless given, d")
    options.add_argument("--mask", nargs="+", default=["causal", "full"], choices=MASKS)
    options.add_argument("--directions", nargs="+", default=list(DIRECTIONS), choices=DIRECTIONS)
    asked = options.parse_args(argv)
    if not torch.cuda.is_available():
        raise SystemExit("sweep needs a CUDA device")
    for d, mask, n in itertools.product(asked.d, asked.mask, asked.n):
        sweep(Shape(n, d, mask, asked.dtype, *asked.heads, asked.d_v), asked.directions)
