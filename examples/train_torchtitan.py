"""Trains Llama 3.1 8B by torchtitan's trainer: ring attention beside its own context parallel.

    torchrun --nproc-per-node 4 -m examples.train_torchtitan --tokens 32768 --tokens 131072
    torchrun --nproc-per-node 2 -m examples.train_torchtitan --by ring --flavor tiny --tokens 256

Trainer, model, FSDP2, activation checkpointing and AdamW are torchtitan's (`pip install
torchtitan`; 0.2.2 goes with PyTorch 2.11). A user puts in the lines that are marked: attention, the
batches, and the fused loss. Weights are random and in bfloat16, as are gradients and moments; the
text is Python's standard library, a token a byte. --by says which: `ring`; `context_parallel`,
torchtitan's own, with the same fused loss; `torchtitan` as it is, with its loss of all logits.

With `--tokens 65536:8192` documents of 8192 tokens are packed. Rows don't count the first step,
which is slower, unless it is the only one. MFU counts 6 FLOPs for each weight but the embedding's,
and 12 for each dim of each layer for each key that a token sees: half as many as torchtitan, which
counts keys that the causal mask hides. Neither counts what backward computes again. The share of
attention is its time by itself, with all that it sends, over the step's: in each layer twice
forward and once backward.
"""

import datetime
import gc
import re
import shlex
import statistics
import sys
import tempfile
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import click
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

if not torch.cuda.is_available():  # torchtitan takes CUDA for granted, and asks when it is imported
    torch._utils._get_available_device_type = lambda: "cpu"

import torchtitan.models.llama3.infra.parallelize as parallelization
import torchtitan.tools.utils as tools
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.config import JobConfig
from torchtitan.models.llama3 import get_train_spec
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.llama3.model.model import Transformer
from torchtitan.protocols.train_spec import register_train_spec
from torchtitan.train import Trainer

from benchmarks.lib.results import markdown, revision
from benchmarks.lib.results import save as keep
from examples.train_text import text
from ring_attention_pytorch import ring_attn, ring_cross_entropy, shard_batch
from ring_attention_pytorch.launch import torchrun_group
from ring_attention_pytorch.progress import counted, show

WAYS = ("ring", "context_parallel", "torchtitan")
TINY = TransformerModelArgs(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=256)
Peak = namedtuple("Peak", "max_reserved_gib max_reserved_pct")
Row = dict[str, Any]


class RingAttention(nn.Module):
    """Attention over the ring of the current batch, in place of torchtitan's."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        out = ring_attn(*(t.transpose(1, 2) for t in (q, k, v)), causal=True)  # 1: attention
        return out.transpose(1, 2)


class FusedHead(nn.Linear):
    """The last layer with its loss: logits of a few tokens are in memory at once."""

    labels: Tensor  # of this rank's tokens, set before each step

    def forward(self, x: Tensor) -> Tensor:
        loss = ring_cross_entropy(x, self.labels, head=self.weight)  # 2: the mean over all ranks
        return loss / dist.get_world_size()  # torchtitan adds gradients of ranks, and losses


class Fused(Transformer):
    """torchtitan's Llama that returns its loss."""

    def __init__(self, args: TransformerModelArgs) -> None:
        super().__init__(args)
        self.output = FusedHead(args.dim, args.vocab_size, bias=False)


class RingLlama(Fused):
    """The model with ring attention."""

    def __init__(self, args: TransformerModelArgs) -> None:
        super().__init__(args)
        for block in self.layers.values():
            block.attention.inner_attention = RingAttention()


def parallelize(model: nn.Module, *given: Any) -> nn.Module:
    """Wrap a model as torchtitan does, but for its context parallel: our attention sends itself."""
    with mock.patch.object(parallelization, "apply_cp_to_attention_module"):
        model = parallelization.parallelize_llama(model, *given)
    for module in model.modules():
        if isinstance(module, FSDPModule) and not torch.cuda.is_available():
            module.set_force_sum_reduction_for_comms(True)  # gloo multiplies nothing by the way
    return model


class Text(BaseDataLoader):
    """The standard library, a sequence after the other, the same on all ranks of a ring."""

    length, documents = 0, None  # set before training

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        source, at = text(), 0
        while True:
            ids = source[at : at + self.length].long()[None]
            if ids.shape[1] < self.length:
                raise ValueError(f"the text has {len(source)} bytes, a sequence {self.length}")
            labels = torch.cat([ids[:, 1:], ids.new_full((1, 1), -100)], 1)
            yield {"input": ids}, labels
            at = (at + self.length) % (len(source) - self.length)

    def borders(self) -> list[int]:
        """Return where documents begin, and the end."""
        return [*range(0, self.length, self.documents or self.length), self.length]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class Meter:
    """The metrics that torchtitan's trainer asks for; it keeps the loss of the last step."""

    color = tools.NoColor()
    ntokens_since_last_log, num_flops_per_token = 0, 0

    def __init__(self, *_: Any) -> None:
        cuda = torch.cuda.is_available()
        self.device_name = torch.cuda.get_device_name() if cuda else "CPU"
        self.device_memory_monitor, self.data_loading_times = self, []

    def get_peak_stats(self) -> Peak:
        return Peak(peak_gib(), 0.0)

    def should_log(self, step: int) -> bool:
        return True

    def log(self, step: int, loss: float, *_: Any, **__: Any) -> None:
        self.loss = loss

    def close(self) -> None:
        pass


class MeteredTrainer(Trainer):
    """torchtitan's trainer, of a model that returns its loss."""

    outside = 0.0  # memory outside PyTorch's allocator before there was a trainer

    def forward_backward_step(
        self, *, input_dict: dict[str, Tensor], labels: Tensor, **given: Any
    ) -> Tensor:
        model = self.model_parts[0]
        if not isinstance(model, Fused):
            return super().forward_backward_step(input_dict=input_dict, labels=labels, **given)
        if not isinstance(model, RingLlama):
            ids, labels, _, more = self.post_dataloading_process(input_dict, labels)
            return backward_of(model, ids, labels, **more)
        batch = self.shard(input_dict["input"])  # 3: this rank's tokens, positions and labels
        with batch:  # 4: attention knows their layout and documents
            return backward_of(
                model, batch["input_ids"], batch.labels, positions=batch["position_ids"]
            )

    def shard(self, ids: Tensor) -> Any:
        """Return this rank's part of a sequence of packed documents, or of a single one."""
        whole = {"input_ids": ids, "labels": ids, "cu_seqlens": self.dataloader.borders()}
        return shard_batch(whole)


def backward_of(model: nn.Module, ids: Tensor, labels: Tensor, **more: Any) -> Tensor:
    """Compute a model's loss, and gradients."""
    model.output.labels = labels
    loss = model(ids, **more)
    loss.backward()
    return loss


def peak_gib() -> float:
    """Return the most memory that PyTorch has held on this GPU."""
    return torch.cuda.max_memory_reserved() / 2**30 if torch.cuda.is_available() else 0.0


def allocated_gib() -> float:
    """Return the most memory that tensors on this GPU have taken."""
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


def largest(*figures: float) -> list[float]:
    """Return the figures of the rank whose last two have the largest sum."""
    every: list[tuple[float, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(every, figures)
    return [round(figure, 2) for figure in max(every, key=lambda each: sum(each[-2:]))]


def free() -> None:
    """Give back all memory that is not needed, and forget the peak."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def outside_gib() -> float:
    """Return the memory of this GPU that is not PyTorch's allocator's: NCCL's, or shared."""
    if not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free - torch.cuda.memory_reserved()) / 2**30


def trainer_of(by: str, flavor: str, longest: int) -> MeteredTrainer:
    """Make a trainer; `longest` is the most tokens of a sequence."""
    spec = get_train_spec()
    spec = replace(
        spec,
        model_cls={"ring": RingLlama, "context_parallel": Fused}.get(by, Transformer),
        model_args=dict(spec.model_args, tiny=replace(TINY)),
        parallelize_fn=parallelize if by == "ring" else spec.parallelize_fn,
        build_tokenizer_fn=None, build_dataloader_fn=lambda **_: Text(),
        build_metrics_processor_fn=Meter,
    )  # fmt: skip
    register_train_spec(f"llama3, {by}", spec)
    job = JobConfig()
    job.job.dump_folder = tempfile.gettempdir()
    job.model.name, job.model.flavor = f"llama3, {by}", flavor
    job.training.local_batch_size, job.training.seq_len = 1, longest
    job.training.dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    if not torch.cuda.is_available():
        job.training.mixed_precision_param = "float32"
    job.activation_checkpoint.mode = "full"
    job.parallelism.context_parallel_degree = dist.get_world_size()
    job.optimizer.lr, job.lr_scheduler.warmup_steps = 3e-4, 2
    job.debug.seed = 0
    outside, trainer = outside_gib(), MeteredTrainer(job)
    trainer.outside = outside
    return trainer


def repeat_heads(trainer: MeteredTrainer) -> None:
    """Repeat key heads for each query head, before what torchtitan sends."""
    for block in trainer.model_parts[0].layers.values():
        inner = block.attention.inner_attention
        inner.register_forward_pre_hook(_repeated, prepend=True)


def _repeated(_: nn.Module, qkv: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    q, *kv = qkv
    return q, *(t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in kv)


def synchronized() -> float:
    """Return the time when all ranks have done all that was asked of them."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()
    return time.perf_counter()


def steps(trainer: MeteredTrainer, count: int) -> tuple[list[float], list[float]]:
    """Train; return the loss and the seconds of each step."""
    data, losses, seconds = trainer.batch_generator(trainer.dataloader), [], []
    for _ in counted(range(count), "training", count, "steps"):
        begin = synchronized()
        trainer.step += 1
        trainer.train_step(data)
        seconds.append(synchronized() - begin)
        losses.append(float(trainer.metrics_processor.loss))
    return losses, seconds


def attention_seconds(trainer: MeteredTrainer, tokens: int) -> float:
    """Return the seconds of one layer's attention by itself, twice forward and once backward."""
    args, part = trainer.model_args, tokens // dist.get_world_size()
    attention = next(iter(trainer.model_parts[0].layers.values())).attention.inner_attention
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    make = dict(device=trainer.device, dtype=dtype, requires_grad=True)
    size = args.dim // args.n_heads
    q = torch.randn(1, args.n_heads, part, size, **make)
    k, v = (torch.randn(1, args.n_kv_heads, part, size, **make) for _ in range(2))
    block: AbstractContextManager[Any] = nullcontext()
    if isinstance(trainer.model_parts[0], RingLlama):
        block = trainer.shard(torch.zeros(1, tokens, dtype=torch.long, device=trainer.device))

    def once() -> float:
        begin = synchronized()
        with torch.no_grad():
            attention(q, k, v, enable_gqa=True)
        out = attention(q, k, v, enable_gqa=True)
        out.backward(out.detach())
        return synchronized() - begin

    with block:
        once()
        return statistics.median(once() for _ in range(2 if tokens > 1 << 17 else 5))


def flops_per_token(trainer: MeteredTrainer, seen: float) -> float:
    """Return the FLOPs that count, of a token that sees so many keys."""
    args, model = trainer.model_args, trainer.model_parts[0]
    weights = sum(p.numel() for p in model.parameters()) - model.tok_embeddings.weight.numel()
    return 6 * weights + 12 * args.n_layers * args.dim * seen


def measured(
    trainer: MeteredTrainer, by: str, tokens: int, documents: int | None = None, *, count: int
) -> Row:
    """Train at one length, and return its row; with a single step that one counts."""
    ranks = dist.get_world_size()
    trainer.dataloader.length, trainer.dataloader.documents = tokens, documents
    free()
    losses, seconds = steps(trainer, count)
    step = statistics.median(seconds[1:] or seconds)
    memory = largest(allocated_gib(), peak_gib(), outside_gib() - trainer.outside)
    attention = attention_seconds(trainer, tokens) * trainer.model_args.n_layers
    a_gpu = tokens / step / ranks
    peak = tools.get_peak_flops(trainer.metrics_processor.device_name)
    seen = (documents or tokens) / 2
    return {
        "device": trainer.metrics_processor.device_name, "date": str(datetime.date.today()),
        "torch": torch.__version__, "revision": revision(), "command": command(),
        "subject": by, "gpus": ranks, "length": tokens, "tokens": tokens // ranks,
        "mask": f"documents of {documents}" if documents else "causal",
        "tokens_per_second": round(a_gpu), "seconds": round(step, 3), "steps": count,
        "mfu": round(a_gpu * flops_per_token(trainer, seen) / peak, 4),
        "attention": round(attention / step, 3),
        "peak_gib": memory[1] + memory[2], "allocated_gib": memory[0], "outside_gib": memory[2],
        "losses": [round(loss, 6) for loss in losses],
    }  # fmt: skip


def command() -> str:
    """Return the command that runs this again, without `--save`."""
    options = re.sub(r"--save \S+", "", shlex.join(sys.argv[1:])).split()
    start = f"torchrun --nproc-per-node {dist.get_world_size()} -m examples.train_torchtitan"
    return " ".join([start, *options])


COLUMNS: dict[str, Callable[[Row], str]] = {
    "attention by": lambda row: row["subject"].replace("_", " "),
    "GPUs": lambda row: str(row["gpus"]),
    "tokens": lambda row: f"{row['length'] / 1024:g}k",
    "mask": lambda row: row["mask"],
    "tokens/s a GPU": lambda row: f"{row['tokens_per_second']:,}",
    "MFU": lambda row: f"{row['mfu']:.1%}",
    "attention's share": lambda row: f"{row['attention']:.0%}",
    "peak GiB": lambda row: f"{row['peak_gib']:.1f}",
    "losses": lambda row: ", ".join(f"{loss:.3f}" for loss in row["losses"]),
}


@click.command(help=__doc__)
@click.option("--by", type=click.Choice(WAYS), multiple=True, default=WAYS[:2], show_default=True)
@click.option("--flavor", default="8B", show_default=True, help="torchtitan's, or tiny")
@click.option(
    "--tokens", multiple=True, default=("32768",), show_default=True,
    help="of a sequence[:documents]",
)  # fmt: skip
@click.option(
    "--steps",
    "count",
    type=int,
    multiple=True,
    default=(3,),
    show_default=True,
    help="at each length; the first is not timed, unless it is the only one",
)
@click.option("--save", type=click.Path(dir_okay=False, path_type=Path), help="rows as JSON")
def main(
    by: tuple[str, ...], flavor: str, tokens: tuple[str, ...], count: tuple[int, ...],
    save: Path | None,
) -> None:  # fmt: skip
    """Train, and print a table."""
    asked = [tuple(map(int, each.split(":"))) for each in tokens]
    if {*by} != {"ring"} and any(len(each) > 1 for each in asked):
        raise click.UsageError(f"documents are for --by ring alone, got {by}")
    show()
    counts, rows = (*count, *count[-1:] * len(tokens)), []
    with torchrun_group("nccl" if torch.cuda.is_available() else "gloo", timeout=300):
        first = dist.get_rank() == 0
        if first:
            print(markdown([*COLUMNS], []), flush=True)
        for way in by:
            trainer = trainer_of(way, flavor, max(asked)[0])
            if way != "ring":
                try:
                    attention_seconds(trainer, 256 * dist.get_world_size())
                except (RuntimeError, ValueError, NotImplementedError) as error:
                    if first:
                        print(f"{way}: key heads are repeated: {error}"[:200], flush=True)
                    repeat_heads(trainer)
                    way += ", heads repeated"
            for (length, *documents), often in zip(asked, counts):
                rows.append(measured(trainer, way, length, *documents, count=often))
                if first:
                    cells = [write(rows[-1]) for write in COLUMNS.values()]
                    print(markdown(cells, []).splitlines()[0], flush=True)
                    if save is not None:
                        keep(rows, save)
            trainer.close()
            del trainer
            free()


if __name__ == "__main__":
    main()
