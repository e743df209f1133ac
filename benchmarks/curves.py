"""Train one model of bytes over any number of ranks, and keep its losses, to be compared.

    torchrun --nproc-per-node 4 -m benchmarks curves --mask documents causal --save
    torchrun --nproc-per-node 2 -m benchmarks curves --by context_parallel --mask causal --save
    torchrun --nproc-per-node 1 -m benchmarks curves --save

The model is that of examples/train_documents.py with 98 million weights, unless told otherwise; on
GPUs in bfloat16 under autocast, its weights in float32, on the CPU all in float32. The text is what
is on every machine: Python's standard library, whose functions and classes are the documents, and
license texts. Weights, documents and their order are the same on any number of ranks: "documents"
packs them in sequences and attention stays within each; "causal" sees all before. PyTorch's
`context_parallel` has no documents, and no causal attention on the CPU.
"""

import re
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.parallel import DistributedDataParallel

from benchmarks.lib.options import parser
from benchmarks.lib.results import Row, Run
from benchmarks.lib.rings import device_name, joined
from examples.train_documents import Block, Model, packed
from ring_attention_pytorch import ring_cross_entropy, shard_batch
from ring_attention_pytorch.progress import counted

BYS = ("ring", "context_parallel")
MASKS = ("documents", "causal")
RATE, WARM_UP = 3e-4, 50  # of learning, and steps until it is reached
BORDER = re.compile(rb"\n(?=(?:def|async def|class|@)\b)")
LICENSES = Path("/usr/share/common-licenses")
Whole = dict[str, Any]


class PyTorchBlock(Block):
    """A block with PyTorch's attention."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.to_qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        qkv = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(*qkv, is_causal=True).transpose(1, 2)
        x = x + self.to_out(out.flatten(2))
        return x + self.mlp(self.norms[1](x))


class PyTorchModel(Model):
    """A model of blocks with PyTorch's attention."""

    block = PyTorchBlock


@cache
def documents() -> tuple[bytes, ...]:
    """Return the documents: what begins with a function or class at the top of a module."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [f for f in sorted(folder.rglob("*.py")) if "site-packages" not in f.parts]
    files += sorted(f for f in LICENSES.glob("*") if f.is_file()) if LICENSES.exists() else []
    found = (part for file in files for part in BORDER.split(file.read_bytes()))
    return tuple(part for part in found if len(part) >= 64)


def by_ring(model: nn.Module, whole: Whole) -> Tensor:
    """Compute the loss of a sequence, spread over all ranks, and gradients."""
    batch = shard_batch(whole)
    with batch:
        logits = model(batch["input_ids"], batch["position_ids"])
        loss = ring_cross_entropy(logits, batch.labels)
        loss.backward()
    return loss.detach()


def by_context_parallel(model: nn.Module, whole: Whole) -> Tensor:
    """Compute the same by PyTorch's, for a sequence that is one document."""
    ids, size = whole["input_ids"].clone(), dist.get_world_size()
    n = ids.shape[1]
    labels, at = F.pad(ids[:, 1:], (0, 1), value=-100), torch.arange(n, device=ids.device)[None]
    with context_parallel(every_gpu(), buffers=[ids, labels, at], buffer_seq_dims=[1, 1, 1]):
        logits = model(ids, at).float()
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (n - 1)
        (loss * size).backward()
    loss = loss.detach()
    dist.all_reduce(loss)
    return loss


@cache
def every_gpu() -> DeviceMesh:
    """Return the mesh of all ranks."""
    return init_device_mesh("cuda", (dist.get_world_size(),))


Step = Callable[[nn.Module, Whole], Tensor]
STEPS: dict[str, tuple[type[Model], Step]] = {
    "ring": (Model, by_ring),
    "context_parallel": (PyTorchModel, by_context_parallel),
}


def wholes(steps: int, length: int, mask: str, device: torch.device) -> Iterator[Whole]:
    """Yield sequences, the same on all ranks; under "causal" each is one document."""
    for whole in packed(steps, length, documents()):
        ids = whole["input_ids"].to(device)
        yield {
            "input_ids": ids, "labels": ids,
            "cu_seqlens": whole["cu_seqlens"] if mask == "documents" else [0, length],
        }  # fmt: skip


def train(
    by: str, mask: str, device: torch.device, sizes: dict[str, int], steps: int
) -> tuple[list[float], float]:
    """Train; return the losses, and seconds of a step (their median is not asked of the GPU)."""
    torch.manual_seed(0)
    kind, step = STEPS[by]
    model: nn.Module = kind(**sizes).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=device.type == "cuda")
    warming = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / WARM_UP, total_iters=WARM_UP)
    if dist.get_world_size() > 1:
        model = DistributedDataParallel(model)
    losses, begin = [], time.perf_counter()
    each = counted(wholes(steps, sizes["length"], mask, device), "training", steps, "steps")
    for number, whole in enumerate(each):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            losses.append(step(model, whole))
        optimizer.step()
        optimizer.zero_grad()
        warming.step()
        if number == steps // 10:  # from here on all is warm
            begin = float(losses[-1]) * 0 + time.perf_counter()
    found = torch.stack(losses).tolist()
    return found, (time.perf_counter() - begin) / max(1, steps - steps // 10 - 1)


def main(argv: Sequence[str] | None = None) -> None:
    """Train in each way, print first and last losses, and with `--save` keep all."""
    options = parser("curves", __doc__, save="curves", device="cuda")
    options.add_argument("--by", nargs="+", choices=BYS, default=["ring"])
    options.add_argument("--mask", nargs="+", choices=MASKS, default=["documents"])
    for name, default in dict(steps=500, length=16384, dim=768, depth=12, heads=12).items():
        options.add_argument(f"--{name}", type=int, default=default)
    asked = options.parse_args(argv)
    sizes = {name: getattr(asked, name) for name in ("length", "dim", "depth", "heads")}
    weights = sum(p.numel() for p in Model(**sizes).parameters())
    with joined(asked.device) as device:
        run = Run("curves", argv, device_name(device), asked.save)
        for by, mask in ((by, mask) for by in asked.by for mask in asked.mask):
            if by == "context_parallel" and mask == "documents":
                continue  # it has none
            losses, seconds = train(by, mask, device, sizes, asked.steps)
            run.add(row(by, mask, sizes | {"weights": weights}, losses, seconds))
        run.finish()


def row(
    by: str, mask: str, sizes: dict[str, int], losses: list[float], seconds: float
) -> list[Row]:
    """Make the row of a way to train."""
    ranks = dist.get_world_size()
    return [
        {"subject": by, "ranks": ranks, "mask": mask, "tokens": sizes["length"] // ranks}
        | {"weights": sizes["weights"], "dim": sizes["dim"], "depth": sizes["depth"]}
        | {"first": round(losses[0], 4), "last": round(sum(losses[-20:]) / len(losses[-20:]), 4)}
        | {"tokens_per_second": round(sizes["length"] / seconds)}
        | {"losses": [round(loss, 6) for loss in losses]}
    ]


if __name__ == "__main__":
    main()
