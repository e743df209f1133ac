"""TF/s a GPU where much is hidden: packed documents and sliding windows over a group.

    torchrun --nproc-per-node 4 -m benchmarks.bench_masks --save benchmarks/results
    torchrun --nproc-per-node 2 -m benchmarks.bench_masks --device cpu --tokens 64 --heads 4 2

FLOPs are those of visible pairs, backward 2.5 times forward; times and errors are as `rings.py`
says. "of a full mask's" compares with the same kernel's speed at the whole causal mask over the
same ring; "keys received" are the most that any rank gets of others, forward. "calls alone" are the
same calls of the kernel where nothing travels.
"""

import argparse
import datetime
import random
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.bench_balance import borders
from benchmarks.rings import (
    Attend,
    Hidden,
    Result,
    Shape,
    begun,
    checker,
    device_name,
    markdown,
    measured,
    speeds,
)
from benchmarks.still import ALONE, still
from ring_attention_pytorch import RingPlan, balanced, ring_attn
from ring_attention_pytorch.comm.ring import Ring
from ring_attention_pytorch.geometry.balance import visible_keys
from ring_attention_pytorch.geometry.documents import of_borders
from ring_attention_pytorch.geometry.layouts import Layout
from ring_attention_pytorch.schedule.pieces import schedule, tokens


class Mask(NamedTuple):
    """What is shown, how the sequence is laid out, and how the plan is told of it."""

    layout: Layout
    options: dict[str, Any]
    hidden: Hidden
    pairs: int  # visible, of all ranks


def whole(length: int, ranks: int) -> Mask:
    """Causal, and no more."""
    return Mask("zigzag", {}, torch.lt, length * (length + 1) // 2)


def window(length: int, size: int, layout: Layout) -> Mask:
    def hidden(rows: Tensor, cols: Tensor) -> Tensor:
        return (cols > rows) | (cols < rows - size)

    pairs = int(visible_keys(of_borders([0, length]), True, size).sum())
    return Mask(layout, dict(window=size), hidden, pairs)


def packed(kind: str, length: int, ranks: int) -> Mask:
    """Documents of a kind of `bench_balance`, dealt evenly."""
    cut = borders(kind, length, random.Random(0))
    document = torch.bucketize(torch.arange(length), torch.tensor(cut[1:]), right=True)

    def hidden(rows: Tensor, cols: Tensor) -> Tensor:
        return (cols > rows) | (document[cols] != document[rows])

    pairs = int(visible_keys(of_borders(cut), True, None).sum())
    return Mask(balanced(cut, ranks), dict(cu_seqlens=cut), hidden, pairs)


def masks(length: int, ranks: int, size: int) -> dict[str, Mask]:
    """All that is measured at one length."""
    return {
        "causal": whole(length, ranks),
        f"window {size}, contiguous": window(length, size, "contiguous"),
        f"window {size}, zigzag": window(length, size, "zigzag"),
        **{
            f"documents {kind}": packed(kind, length, ranks)
            for kind in ("log-normal around 4k", "one long, many short", "of 1 to 999 tokens")
        },
    }


def made(shape: Shape, mask: Mask, kernel: str, like: list[Tensor]) -> tuple[Attend, RingPlan]:
    q, k, v = (t.detach().requires_grad_() for t in like[:3])
    plan = RingPlan.make(
        q, k, v, causal=True, layout=mask.layout, kernel=kernel, transport="gather", **mask.options
    )
    return lambda q, k, v: ring_attn(q, k, v, plan=plan), plan


def row(
    shape: Shape, mask: Mask, result: Result | str, plan: RingPlan, of: Result | None
) -> list[str]:
    """Speeds, the share of a full mask's speed, what comes from others, peak, errors."""
    if isinstance(result, str):
        return [f"failed: {result}", *[""] * 6]
    ranks = plan.ring.size
    flops = 4.0 * mask.pairs * shape.heads * shape.d / ranks
    share = ""
    if of is not None:
        all_pairs = whole(shape.tokens * ranks, ranks).pairs
        share = f"{of.both * mask.pairs / all_pairs / result.both:.0%}"
    groups = schedule(plan.blocks, plan.at_once)
    came = max(sum(tokens(group.pieces[rank]) for group in groups) for rank in range(ranks))
    return [
        *speeds(flops, result.forward, result.both), share, f"{came:,.0f}", f"{result.peak:.1f}",
        ", ".join(f"{e:.0e}" for e in result.errors or ()),
    ]  # fmt: skip


HEAD = (
    "tokens a rank", "mask", "kernel", "forward", "backward", "both, TF/s", "of a full mask's",
    "keys received", "peak GiB", "errors of out, dq",
)  # fmt: skip


def table(shape: Shape, kernels: list[str], size: int, repeats: int) -> list[list[str]]:
    ring, lines = Ring(), []
    length = shape.tokens * ring.size
    tensors = shape.tensors(shape.tokens, seed=ring.rank)
    full: dict[str, Result] = {}
    for name, mask in masks(length, ring.size, size).items():
        errors = checker(shape, tensors, mask.layout, mask.hidden)
        for kernel in kernels:
            start = [str(shape.tokens), name]
            try:
                attend, plan = made(shape, mask, kernel, tensors)
            except ValueError as error:  # the same on all ranks
                lines.append([*start, kernel, f"refused: {str(error)[:80]}", *[""] * 6])
                continue
            ours, alone = (kernel, attend, errors), (ALONE + kernel, still(plan), None)
            for subject, run, check in (ours, alone):
                result = measured(run, tensors, repeats, check)
                if (name, subject) == ("causal", kernel) and isinstance(result, Result):
                    full[kernel] = result
                of = None if check is None else full.get(kernel)
                cells = row(shape, mask, result, plan, of)
                if check is None:
                    cells[4] = ""  # nothing came
                lines.append([*start, subject, *cells])
                if ring.rank == 0:
                    print(" | ".join(lines[-1]), flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768], help="of one rank")
    parser.add_argument("--window", type=int, default=4096)
    parser.add_argument("--heads", type=int, nargs=2, default=[64, 8], metavar=("H", "H_KV"))
    parser.add_argument("--kernels", nargs="+", default=["triton"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--save", type=Path, metavar="DIR", help="write DIR/DATE-masks.md")
    asked = parser.parse_args()
    device, dtype = begun(asked.device)
    lines = []
    for n in asked.tokens:
        shape = Shape(n, True, *asked.heads, 128, device, dtype)
        lines += table(shape, asked.kernels, asked.window, asked.repeats)
    if dist.get_rank() == 0:
        today = datetime.date.today()
        report = (
            f"# Masks over {dist.get_world_size()} x {device_name(device)}, {today}\n\n"
            f"torch {torch.__version__}, {dtype}, heads {asked.heads}, d 128, batch 1, gather; "
            f"`benchmarks/bench_masks.py` says what is counted.\n\n{markdown(HEAD, lines)}\n"
        )
        print(report)
        if asked.save is not None:
            asked.save.mkdir(parents=True, exist_ok=True)
            (asked.save / f"{today}-masks.md").write_text(report)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
