"""Writes docs/kernels.md from what kernels say of themselves: `python docs/write_kernels.py`."""

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
    "eager": "plain PyTorch, the reference of the others",
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

A kernel does the attention of one block: this rank's queries and some rank's keys. With
`kernel=None` the first of this table that can do the case runs, the same on every rank (few tokens
and short documents: see below). A kernel asked for by name never falls back: where it can't do the
case, every rank raises the same `ValueError` before anything is sent. A name may be the beginning
of several, `"flash-attn"` of two, `"sdpa"` of three; `"triton+flash-attn"` is forward by one
and backward by another, which is what `ring_flash_attn_cuda` runs.

```python
import torch
from ring_attention_pytorch import explain_kernel

q = torch.randn(1, 1024, 8, 64)
print(explain_kernel(q, q, q, softclamp=50.0))  # which one runs, and why the faster ones can't
```

The choice is logged once for each case, by the logger `ring_attention_pytorch` at level INFO.

{table}

Order and speeds are those of an H200 (`benchmarks/results`); before Hopper, flash attention 2
comes before `triton`. With packed documents those come first that do a block of them in few calls,
where others take a call for each: `flash-attn-4`, to which runs of them are one call, and `triton`,
one launch. No kernel was run on Blackwell. *deterministic* is what
`torch.use_deterministic_algorithms(True)` asks for: a backward that repeats to the bit. A gradient
through lse works with all of them.

float32 runs in IEEE precision; after `torch.set_float32_matmul_precision("high")` the Triton
kernel and `flex` take TF32.

**Few tokens over several GPUs** are an exception: where the host takes longer to launch calls than
a GPU to compute them, a causal plan that names no kernel takes `triton`, which needs one call for
all keys. GPUs share memory then, are of Hopper or later, gather keys, and there are no documents.
That is up to 2k or 3k tokens a GPU on two H100, with 32 heads of size 128
([host time](host-time.md)). In a graph of a whole training step nothing is launched: there 2k
tokens are 355 TF/s with `triton`, 342 with `sdpa-cudnn`, 372 with `flash-attn-4`.

**Short documents** take `triton` on Hopper, too, where a query sees at most 500 keys of its
document on average, two or more query heads share a key head, and no kernel is named. There
`flash-attn-4` is slower. Two H100, 8k tokens a GPU, one sample, 32 query and 8 key heads, in a
graph, forward and backward, by turns (2026-11-26, 79d2b72, a script of that day):

| lengths of documents | `flash-attn-4`, us | `triton`, us |
| --- | ---: | ---: |
| 128 to 384 | 906 | 614 |
| 256 to 768 | 934 | 729 |
| 512 to 1536 | 1097 | 965 |
| 1024 to 3072 | 1502 | 1577 |

`explain_plan` says which kernel it is of the two; such a choice is not logged. A plan decides for
its own batch: name the kernel if batches differ and should all be computed by one.

A `mask_mod` on CUDA is compiled into `flex`: it may compare, compute and look up in tensors, token
by token, and not go by values in Python (`if`, `.item()`); `kernel="eager"` takes any. An int that
it captures is compiled in, a tensor is not. Each of a forward's calls is computed once more in
backward. A predicate that looks at samples or heads takes a mask of its own for each.

What kernels need is installed by

```sh
{commands}
```

where flash-attn 2 compiles, with the torch that is there. The two flash-attn share a package
folder: keep them in environments of their own.
"""


def table() -> str:
    head = ["kernel", "what", "where", "dtypes", "head sizes", *COLUMNS.values(), "needs"]
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
    dtypes = "any" if can.dtypes is None else ", ".join(SHORT[d] for d in can.dtypes)
    package = "-" if can.package is None else f"{can.package.name} >= {can.package.min_version}"
    return [
        f"`{name}`", WHAT[name], where, dtypes, sizes + (", d = d_v" if can.one_head_dim else ""),
        *("yes" if feature in can.features else "-" for feature in COLUMNS), package,
    ]  # fmt: skip


def commands() -> str:
    """What installs each package that a kernel needs."""
    packages = dict.fromkeys(k.CAN.package for k in KERNELS.values() if k.CAN.package)
    return "\n".join(package.command for package in packages)


def page() -> str:
    return PAGE.format(table=table(), commands=commands())


if __name__ == "__main__":
    (Path(__file__).parent / "kernels.md").write_text(page())
