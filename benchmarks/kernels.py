"""Measure TF/s of every kernel on one block, beside the same kernels called by themselves.

    python -m benchmarks kernels
    python -m benchmarks kernels --kernels flash-attn-4 --d 64 128 --n 2048 --save

Needs a CUDA device. Batch 1; FLOPs are those of the visible pairs, backward 2.5 times forward. A
kernel's time is that of one block from nothing to a result in the inputs' dtype, as on one GPU;
with `--block` that of one more block of a ring, merged into running results. A share is of the
direct call's speed; direct calls alternate with ours. The two flash-attn can't both be installed:
run it twice.
"""

from collections.abc import Iterator, Sequence
from itertools import product

import torch

from benchmarks.lib.blocks import MASKS, Block, Shape, seconds
from benchmarks.lib.options import parser
from benchmarks.lib.results import Row, Run, Subject, rounded
from ring_attention_pytorch.kernels import KERNELS, refusal
from ring_attention_pytorch.runtime.interfaces import KernelRequest

FLOPS = {"forward": 1.0, "backward": 2.5}  # as many times forward's
MEANT = [name for name in KERNELS if name not in ("eager", "flex")]  # not slow, nor for this


def rows(block: Block, name: str, more: bool) -> Iterator[Row]:
    """Measure a kernel, and its share of the direct call's speed."""
    ours, theirs = block.kernel(name, more), block.direct(name)
    about = block.shape.about() | Subject("one more block" if more else "kernel", name).about()
    for direction, factor in FLOPS.items():
        runs = [each[direction] for each in (ours, theirs) if each]
        mine, *direct = seconds(runs)
        speed = factor * block.shape.flops() / mine / 1e12
        row = {**about, "pass": direction, "tflops": rounded(speed)}
        yield row | ({"share": round(direct[0] / mine, 3)} if direct else {})


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and with `--save` keep."""
    options = parser(
        "kernels", __doc__, save="kernels", d=[64, 128, 256], n=[2048, 8192, 32768, 65536],
        heads=[32, 8], dtype="bfloat16", kernels=MEANT,
    )  # fmt: skip
    options.add_argument("--mask", nargs="+", default=list(MASKS), choices=MASKS)
    options.add_argument("--block", action="store_true", help="one more block of a ring")
    asked = options.parse_args(argv)
    if not torch.cuda.is_available():
        raise SystemExit("kernels needs a CUDA device")
    run = Run("kernels", argv, torch.cuda.get_device_name(), asked.save, gpus=1)
    for d, mask, n in product(asked.d, asked.mask, asked.n):
        block = Block(Shape(n, d, mask, asked.dtype, *asked.heads))
        case = KernelRequest.of(block.q, block.v, window=block.shape.window)
        for name in asked.kernels:
            if refusal(name, case) is None:
                run.add(rows(block, name, asked.block))
    run.finish()
