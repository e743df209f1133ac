"""Writes docs/kernels.md from the kernels' capabilities: `python docs/write_kernels.py`."""

from collections.abc import Sequence
from pathlib import Path

import torch

from ring_attention_pytorch.kernels import KERNELS
from ring_attention_pytorch.runtime.interfaces import FEATURES, Capabilities

WHAT = {
    "flash-attn-4": "flash-attn 4, CuTe DSL",
    "sdpa-cudnn": "cuDNN, inside PyTorch",
    "triton": "ours; merges inside, backward repeats to the bit",
    "flash-attn-2": "flash-attn 2",
    "sdpa-flash": "flash attention 2, inside PyTorch",
    "flex": "FlexAttention, inside PyTorch; compiles each shape and predicate on first use",
    "sdpa": "PyTorch's flash on the CPU",
    "eager": "plain PyTorch, the reference for the others",
}
SHORT = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}
COLUMNS = {
    "window": "window",
    "key_mask": "key mask",
    "softclamp": "softclamp",
    "unusual_scale": "scale <= 0",
    "deterministic": "deterministic",
    "alibi": "ALiBi",
    "mask_mod": "mask_mod",
    "dropout": "dropout",
}
PAGE = """# Kernels

A kernel computes the attention of one block: this rank's queries and some rank's keys. This page
says which kernel runs, and which features, dtypes and devices each kernel supports.

With `kernel=None`, the first kernel of the table that supports the case runs, the same on every
rank. There are three exceptions: [few tokens](#few-tokens), [short documents](#short-documents)
and [a few long ones](#a-few-long-documents).
A kernel that you name never falls back: if it does not support the case, every rank raises the
same `ValueError` before anything is sent. A name may be a prefix of several: `"flash-attn"` of
two, `"sdpa"` of three. `"triton+flash-attn"` uses the first forward and the second backward;
`ring_flash_attn_cuda` runs that.

```python
import torch
from ring_attention_pytorch import explain_kernel

q = torch.randn(1, 1024, 8, 64)
print(explain_kernel(q, q, q, softclamp=50.0))  # which one runs, and why the faster ones can't
```

The logger `ring_attention_pytorch` reports the choice once for each case, at level INFO.

{table}

The order is by speed on an H200 (`benchmarks/results`). Before Hopper, flash attention 2 comes
before `triton`. With packed documents, the kernels that compute a block of them in few calls come
first: `flash-attn-4`, which takes runs of documents in one call, and `triton`, with one launch.
The others need a call for each document. No kernel was run on Blackwell. *deterministic* means
`torch.use_deterministic_algorithms(True)`: a backward that repeats to the bit. All kernels have
gradients through lse.

float32 runs in IEEE precision. After `torch.set_float32_matmul_precision("high")` the Triton
kernel and `flex` use TF32.

## Few tokens

If launching the calls takes the host longer than a GPU needs to compute them, a causal plan
without a named kernel uses `triton`, which needs one call for all keys. Conditions: several GPUs
that share memory, of Hopper or later; `transport="gather"`; no documents. On two H100 with 32
heads of size 128, this applies up to 2k or 3k tokens a GPU ([host time](host-time.md)). In a
graph of a whole training step the host launches nothing: there, 2k tokens reach 355 TF/s with
`triton`, 342 with `sdpa-cudnn`, 372 with `flash-attn-4`.

## Short documents

On Hopper, short documents use `triton`, too, if a query sees at most 500 keys of its document on
average, two or more query heads share a key head, and no kernel is named. `flash-attn-4` is
slower there (see the table at the end).

`explain_plan` says which of the two runs; this choice is not logged. Each plan decides for its
own batch: name the kernel if batches differ and all of them should use the same one.

## A few long documents

A faster kernel with a call for each document can beat one call of a slower one for all. On H200s,
if no kernel is named and the slower one is first for documents, as `triton` is without
`flash-attn-4`, a plan predicts the time of both by the cost model; the faster one must save 5 %.
`explain_plan` has both estimates; heads of more than 128 have speeds of their own. If samples
differ in their documents, nothing is compared. On one H100, with heads of 128, `triton` was as fast
in one document of 8k tokens and faster in more, so it stays there.

One H200, 16k tokens, TF/s of visible pairs, both passes, launched one by one, by turns: `triton` /
`sdpa-cudnn`, a call for each. A plan takes the bold one, the faster one in every cell
(2026-11-28, 33f34cf, a script of that day; `python -m benchmarks documents` does the same).

| documents | 32/8 heads of 128 | 64/8 heads of 128 | 16 heads of 192, values of 128 |
| --- | ---: | ---: | ---: |
| 13.8k and 2.6k | 464 / **475** | 462 / **488** | 248 / **458** |
| one of 8k, 17 short | **469** / 289 | **436** / 348 | **223** / 155 |
| four, log-normal | **466** / 390 | **427** / 418 | 228 / **364** |
| four of 4k | **464** / 380 | | |
| eight of 2k | **435** / 213 | **413** / 268 | **208** / 133 |
| 33 of 1 to 999 | **291** / 22 | **293** / 53 | **124** / 13 |

With `flash-attn-4` installed nothing is compared: it takes these documents in a few calls. In a
later run with it the first three rows have, for 32/8 heads, 618, 543 and 538 TF/s, where Triton has
478, 450 and 452 (372c6f0, `documents --kernels flash-attn-4 triton sdpa-cudnn`).

Of the last row's first cell, 1.07 ms, the three attention kernels take 94 %, row sums of dout * out
7 %, and gaps nothing; two kernels overlap at their ends. Forward computes 7 % more pairs than are
visible, at the borders of blocks, backward 12 %. The rest is the length of loops: a query sees 330
keys on average, 10 steps of a block.

## Predicates

On CUDA a `mask_mod` is compiled into `flex`. It may compare, compute and index tensors, token by
token, but not use values in Python (`if`, `.item()`); `kernel="eager"` takes any function. An int
that it captures is compiled in, a tensor is not. Backward computes each call of forward once
more. A predicate that depends on samples or heads needs a separate mask for each.

## Installation

```sh
{commands}
```

flash-attn 2 is compiled with the installed torch. The two flash-attn packages share a folder:
install them in separate environments.

Speeds by lengths of documents and by head size, and a kernel that was tried, are on a page of
[measurements](kernels-measured.md).
"""


def table() -> str:
    head = ["kernel", "code", "device", "dtypes", "head sizes", *COLUMNS.values(), "needs"]
    lines = [head, ["---"] * len(head), *(row(name, k.CAN) for name, k in KERNELS.items())]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def row(name: str, can: Capabilities) -> list[str]:
    assert set(COLUMNS) == FEATURES
    where = {None: "anywhere"}.get(can.devices) or can.devices[0].upper()
    if can.min_capability is not None:
        where += f" >= {'.'.join(map(str, can.min_capability))}"
    sizes = "any" if can.max_head_dim is None else f"<= {can.max_head_dim}"
    if can.head_dim_multiple > 1:
        sizes = f"multiples of {can.head_dim_multiple} {sizes}"
    if can.head_dims is not None:
        sizes = ", ".join(map(str, can.head_dims))
    dtypes = "any" if can.dtypes is None else ", ".join(SHORT[d] for d in can.dtypes)
    package = "-" if can.package is None else f"{can.package.name} >= {can.package.min_version}"
    return [
        f"`{name}`", WHAT[name], where, dtypes, sizes + unequal(can.unequal_head_dims),
        *("yes" if feature in can.features else "-" for feature in COLUMNS), package,
    ]  # fmt: skip


def unequal(pairs: Sequence[tuple[int, int]] | None) -> str:
    """Say which head sizes of values may differ from the queries'."""
    if pairs is None:
        return ""
    return ", d = d_v" + "".join(f" or {d}/{d_v}" for d, d_v in pairs)


def commands() -> str:
    """The commands that install the kernels' packages."""
    packages = dict.fromkeys(k.CAN.package for k in KERNELS.values() if k.CAN.package)
    return "\n".join(package.command for package in packages)


def page() -> str:
    return PAGE.format(table=table(), commands=commands())


if __name__ == "__main__":
    (Path(__file__).parent / "kernels.md").write_text(page())
