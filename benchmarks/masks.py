"""Measure TF/s a GPU where much is hidden: packed documents and sliding windows over a group.

    torchrun --nproc-per-node 4 -m benchmarks masks --save
    torchrun --nproc-per-node 8 -m benchmarks masks --magi --kernels flash-attn-4 triton
    torchrun --nproc-per-node 2 -m benchmarks masks --device cpu --tokens 64 --heads 4 2

FLOPs are those of visible pairs, backward 2.5 times forward; times and errors are as `lib/rings.py`
says. "share_of_full" compares with the same kernel's speed at the whole causal mask over the same
ring; "keys_received" are the most that any rank gets of others, forward. "calls alone" are the same
calls of the kernel where nothing travels.

`--magi` is the grid that MagiAttention publishes for H100 (docs/source/blog/cp_benchmark.md of its
repository): 64 query and 8 key heads of 128, bfloat16, 8k tokens a GPU, causal and packed causal.
Lengths of documents are drawn as its data have them, and what is longer than a quarter of the whole
is cut there. It takes the mean of 20 calls; here it is the median of three such means. It times 20
packs of documents; here it is that of 21 which shows the median number of pairs.
"""

from argparse import Namespace
from collections.abc import Iterator, Sequence

import torch.distributed as dist
from torch import Tensor

from benchmarks.lib.options import parser
from benchmarks.lib.results import Row, Run, Subject, by_pass, failed, rounded, tflops
from benchmarks.lib.rings import (
    Result,
    Shape,
    checker,
    device_name,
    gpus,
    joined,
    make_plan,
    measured,
    planned,
    shapes,
)
from benchmarks.lib.sequences import Mask, packed, whole, window
from benchmarks.lib.still import ALONE, still
from ring_attention_pytorch import RingPlan
from ring_attention_pytorch.schedule.pieces import rounds_of, tokens

MAGI = "as MagiAttention counts them"
DOCUMENTS = {
    "log-normal around 4k": 1,
    "one long, many short": 1,
    "of 1 to 999 tokens": 1,
    MAGI: 21,
}  # packs that are drawn


def masks(length: int, ranks: int, size: int) -> dict[str, Mask]:
    """Make all that is measured at one length, the whole causal mask first."""
    return {
        "causal": whole(length),
        f"window {size}, contiguous": window(length, size, "contiguous"),
        f"window {size}, zigzag": window(length, size, "zigzag"),
        **{
            f"documents {kind}": packed(kind, length, ranks, packs)
            for kind, packs in DOCUMENTS.items()
        },
    }


def received(plan: RingPlan) -> int:
    """Return the most keys that any rank gets of others."""
    groups, ranks = rounds_of(plan.blocks, plan.chosen.at_once), range(plan.ring.size)
    return max(sum(tokens(group.pieces[rank]) for group in groups) for rank in ranks)


def rows(about: Row, shape: Shape, mask: Mask, result: Result | str, **more: object) -> list[Row]:
    """Make the rows of one subject; `more` is said of both passes."""
    if isinstance(result, str):
        return failed(about, result)
    flops = 4.0 * mask.pairs * shape.heads * shape.d / dist.get_world_size()
    speeds = tflops(flops, result.forward, result.both)
    return by_pass(about, "tflops", speeds, **more, **result.memory_and_errors())


def share_of_full(mask: Mask, result: Result | str, full: tuple[Mask, Result | str]) -> Row:
    """Say what part of the speed at the full mask this is, where both are known."""
    all_of_it, whole = full
    if isinstance(result, str) or isinstance(whole, str):
        return {}
    return {"share_of_full": rounded(whole.both * mask.pairs / all_of_it.pairs / result.both)}


def all_rows(shape: Shape, asked: Namespace) -> Iterator[list[Row]]:
    """Measure each mask with each kernel."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tensors = shape.tensors(shape.tokens, seed=rank)
    full: dict[str, tuple[Mask, Result | str]] = {}
    found = masks(shape.tokens * ranks, ranks, asked.window)
    if asked.magi:
        found = {name: found[name] for name in ("causal", f"documents {MAGI}")}
    for name, mask in found.items():
        errors = checker(shape, tensors, mask.layout, mask.hidden)
        for kernel in asked.kernels:
            about = shape.about() | {"mask": name}
            gather, calls = (about | Subject(each, kernel).about() for each in ("gather", ALONE))
            try:
                plan = made(shape, mask, kernel, tensors)
            except ValueError as error:  # the same on all ranks
                yield failed(gather, f"refused: {str(error)[:80]}")
                continue
            result = measured(planned(plan), tensors, asked.repeats, errors)
            share = share_of_full(mask, result, full.setdefault(kernel, (mask, result)))
            yield rows(gather, shape, mask, result, **share, keys_received=received(plan))
            yield rows(calls, shape, mask, measured(still(plan), tensors, asked.repeats, None))


def made(shape: Shape, mask: Mask, kernel: str, tensors: list[Tensor]) -> RingPlan:
    """Make a gather's plan of a mask."""
    options = dict(layout=mask.layout, kernel=kernel, transport="gather", **mask.options)
    return make_plan(shape, tensors, **options)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and with `--save` keep."""
    options = parser(
        "masks", __doc__, save="masks", device="cuda", tokens=[8192, 32768], heads=[64, 8],
        dim_head=128, dtype=None, kernels=["triton"], repeats=5,
    )  # fmt: skip
    options.add_argument("--window", type=int, default=4096)
    options.add_argument("--magi", action="store_true", help="what MagiAttention publishes")
    options.set_defaults(mask=["causal"])
    asked = options.parse_args(argv)
    if asked.magi:  # but for what is given
        options.set_defaults(tokens=[8192], heads=[64, 8], dim_head=128, repeats=20)
        asked = options.parse_args(argv)
    with joined(asked.device) as device:
        run = Run("masks", argv, device_name(device), asked.save, **gpus(device))
        for shape in shapes(asked, device):
            for new in all_rows(shape, asked):
                run.add(new)
        run.finish()
