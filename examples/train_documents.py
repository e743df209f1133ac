"""Trains a small transformer on packed documents that are spread over processes. Plain PyTorch.

    torchrun --nproc-per-node 4 examples/train_documents.py --losses four.json
    python examples/train_documents.py --losses one.json
    python examples/train_documents.py --draw four.json one.json curves.svg

The documents are functions and classes of Python's own standard library. The lines that know of
ranks are marked; without torchrun they do nothing, and the losses are the same.
"""

import ast
import json
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ring_attention_pytorch import ring_attn, ring_cross_entropy, shard_batch
from ring_attention_pytorch.launch import torchrun_group
from ring_attention_pytorch.progress import counted, show
from ring_attention_pytorch.svg import COLOURS, line, page, text


class Block(nn.Module):
    """Attention with some heads, and a feed-forward."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.to_qkv, self.to_out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.to_qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.to_out(ring_attn(q, k, v, causal=True).flatten(2))  # 1: attention
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    """A transformer over bytes."""

    block = Block

    def __init__(self, length: int, dim: int = 64, depth: int = 2, heads: int = 4):
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, dim), nn.Embedding(length, dim)
        self.blocks = nn.Sequential(*[self.block(dim, heads) for _ in range(depth)])
        self.to_logits = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 256))

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.to_logits(self.blocks(self.bytes(ids) + self.places(positions)))


def train(steps: int, length: int, dtype: torch.dtype = torch.float32) -> Iterator[float]:
    """Train, and yield the loss of each step."""
    torch.manual_seed(0)
    model = Model(length).to(dtype)
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for whole in counted(packed(steps, length), "training", steps, "steps"):
        batch = shard_batch(whole)  # 2: this rank's tokens, their positions and labels
        with batch:  # 3: attention knows their layout and documents
            logits = model(batch["input_ids"], batch["position_ids"])
            loss = ring_cross_entropy(logits, batch.labels)  # 4: the mean over all ranks
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def packed(
    steps: int, length: int, every: Sequence[bytes] = ()
) -> Iterator[dict[str, Tensor | list[int]]]:
    """Yield sequences of whole documents, the same on all ranks; the last document is cut."""
    every, draw = every or documents(), torch.Generator().manual_seed(1)
    for _ in range(steps):
        text, borders = b"", [0]
        while len(text) < length:
            text += every[int(torch.randint(len(every), (), generator=draw))]
            borders.append(min(len(text), length))
        ids = torch.frombuffer(bytearray(text[:length]), dtype=torch.uint8).long()[None]
        yield {"input_ids": ids, "labels": ids, "cu_seqlens": borders}


def documents() -> list[bytes]:
    """Return the functions and classes of some modules of the standard library."""
    folder, found = Path(sysconfig.get_paths()["stdlib"]), []
    for file in sorted(folder.glob("[a-f]*.py")):
        source = file.read_text(encoding="utf-8", errors="ignore")
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.append((ast.get_source_segment(source, node) or "").encode())
    return found


def drawing(many: list[float], one: list[float]) -> str:
    """Draw two curves of losses as SVG: one wide, the other on it."""
    wide, high, most = 640, 300, max(*many, *one)

    def curve(losses: list[float]) -> list[tuple[float, float]]:
        step = (wide - 70) / max(1, len(losses) - 1)
        return [
            (50 + i * step, 20 + (high - 60) * (1 - loss / most)) for i, loss in enumerate(losses)
        ]

    words = f"step 1 to {len(one)}, loss from 0 to {most:.2f}: one process (wide) and a ring (thin)"
    curves = line(curve(one), COLOURS[1], width=7), line(curve(many), COLOURS[0], width=1.5)
    return page(wide, high, *curves, text(50, high - 12, words))


@click.command(help=__doc__)
@click.option("--steps", default=60, show_default=True)
@click.option("--length", default=1024, show_default=True, help="bytes of a sequence")
@click.option("--double", is_flag=True, help="compute in float64")
@click.option("--losses", type=click.Path(dir_okay=False, path_type=Path), help="keep them here")
@click.option("--draw", nargs=3, type=click.Path(path_type=Path), help="curves of two runs")
def main(
    steps: int, length: int, double: bool, losses: Path | None, draw: tuple[Path, ...] | None
) -> None:
    """Train, or draw."""
    if draw:
        many, one = (json.loads(file.read_text()) for file in draw[:2])
        draw[2].write_text(drawing(many, one))
        worst = max(abs(a - b) for a, b in zip(many, one))
        print(f"{draw[2]}: {len(one)} steps, losses differ by {worst:.1e} at most")
        return
    dtype = torch.float64 if double else torch.float32
    show()
    with torchrun_group("gloo"):
        first = not dist.is_initialized() or dist.get_rank() == 0
        found = []
        for step, loss in enumerate(train(steps, length, dtype), 1):
            found.append(loss)
            if first and step % 10 == 0:
                print(f"step {step:4}  loss {loss:.3f}", flush=True)
        if first and losses is not None:
            losses.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
