"""Measure a kernel on one GPU in bursts with pauses, as NVIDIA does, and under load that lasts.

    python -m benchmarks bursts --n 8192 32768 --save

"bursts" is how NVIDIA's script measures (benchmark/sdpa_benchmark_training of cudnn-frontend): ten
times it draws new tensors, writes 256 MB so that the L2 cache holds nothing of them, and profiles
one call; the figure is the median of the last five. Between calls the GPU is mostly idle. "lasting"
is calls back to back, the mean of the second half of some seconds. "mhz" is the clock and "watts"
the power while a call runs. Causal, bfloat16, 64 query and 8 key heads of 128, as NVIDIA has it.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import product
from statistics import median

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.lib.blocks import Block, Shape
from benchmarks.lib.options import parser
from benchmarks.lib.results import ONE_BY_ONE, Row, Run, Subject, rounded

FLOPS = {"forward": 1.0, "backward": 2.5}  # as many times forward's
CALLS, LAST = 10, 5
Measured = tuple[float, list[int], list[float]]  # seconds of a call, MHz, watts


def bursts(shape: Shape, kernel: str, direction: str) -> Measured:
    """Return seconds of a call among pauses."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    found, mhz, watts = [], [], []
    for _ in range(CALLS):
        run = Block(shape).direct(kernel)[direction]
        flush.zero_()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            run()
            look(mhz, watts)
            torch.cuda.synchronize()
        found.append(sum(each.device_time_total for each in profiler.key_averages()) / 1e6)
    return median(found[-LAST:]), mhz[-LAST:], watts[-LAST:]


def under_load(shape: Shape, kernel: str, direction: str, load: float) -> Measured:
    """Return seconds of a call among others, once they have gone on for half of the load."""
    run = Block(shape).direct(kernel)[direction]
    start, half, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    run()
    start.record()
    run()
    half.record()
    half.synchronize()
    calls = max(2, round(load / (start.elapsed_time(half) / 1e3) / 2))
    mhz, watts = [], []
    for event in (half, end):
        for _ in range(calls):
            run()
        if event is end:
            time.sleep(load / 4)  # in the midst of the second half
            look(mhz, watts)
        event.record()
        event.synchronize()
    return half.elapsed_time(end) / 1e3 / calls, mhz, watts


def look(mhz: list[int], watts: list[float]) -> None:
    """Note the clock and the power of now, if the driver's library is there."""
    with suppress(Exception):
        mhz.append(torch.cuda.clock_rate())
        watts.append(torch.cuda.power_draw() / 1e3)


def rows(shape: Shape, kernel: str, load: float) -> Iterator[Row]:
    """Measure both ways, forward and backward."""
    for direction, factor in FLOPS.items():
        flops = factor * shape.flops()
        for name, found in (
            ("bursts", bursts(shape, kernel, direction)),
            ("lasting", under_load(shape, kernel, direction, load)),
        ):
            seconds, mhz, watts = found
            about = shape.about() | Subject(name, kernel, ONE_BY_ONE).about()
            row = {**about, "pass": direction, "tflops": rounded(flops / seconds / 1e12)}
            if mhz and watts:
                row |= {"mhz": round(median(mhz)), "watts": round(median(watts))}
            yield row


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and with `--save` keep."""
    options = parser(
        "bursts", __doc__, save="bursts", n=[8192, 32768], heads=[64, 8], kernels=["sdpa-cudnn"]
    )
    options.add_argument("--load", type=float, default=3.0, help="seconds of calls back to back")
    asked = options.parse_args(argv)
    if not torch.cuda.is_available():
        raise SystemExit("bursts needs a CUDA device")
    run = Run("bursts", argv, torch.cuda.get_device_name(), asked.save, gpus=1)
    for n, kernel in product(asked.n, asked.kernels):
        heads, key_heads = asked.heads
        run.add(rows(Shape(n, heads=heads, key_heads=key_heads), kernel, asked.load))
    run.finish()
