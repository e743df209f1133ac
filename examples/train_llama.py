"""Trains a small Llama of transformers on packed documents that are spread over processes.

    torchrun --nproc-per-node 4 -m examples.train_llama --by trainer --losses four.json
    python -m examples.train_llama --by plain --losses one.json
    python examples/train_documents.py --draw four.json one.json curves.svg

--by is what trains: transformers' `trainer`, `accelerate`, `lightning`, TRL's `sft`, or `plain`:
transformers' own Trainer and attention in one process, without a line of this library.

The documents are functions and classes of Python's own standard library; a token is a byte.
"""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, SequentialSampler
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from examples.train_documents import packed
from ring_attention_pytorch import shard_batch
from ring_attention_pytorch.integrations.accelerate import RingParallelismConfig
from ring_attention_pytorch.integrations.transformers import (
    RingTrainerMixin,
    register,
    ring_forward,
)

BATCH, RATE = 2, 3e-3
Sample = dict[str, Tensor]


def llama(attention: str) -> nn.Module:
    """A Llama with random weights, the same in all processes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048,
        attn_implementation=attention,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def samples(steps: int, length: int) -> list[Sample]:
    """Sequences of packed documents: position ids begin anew with each, whose start is no label."""
    found = []
    for whole in packed(steps * BATCH, length):
        ids, borders = whole["input_ids"][0], torch.tensor(whole["cu_seqlens"])
        sizes = borders.diff()
        positions = torch.arange(length) - borders[:-1].repeat_interleave(sizes)
        labels = ids.masked_fill(positions == 0, -100)
        found.append(dict(input_ids=ids, labels=labels, position_ids=positions))
    return found


class InOrder:
    """Trainers take samples in the order in which they are."""

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        return SequentialSampler(self.train_dataset if dataset is None else dataset)


class PlainTrainer(InOrder, Trainer):
    """transformers' Trainer."""


class RingTrainer(InOrder, RingTrainerMixin, Trainer):
    """transformers' Trainer over spread sequences."""


def by_trainer(steps: int, length: int, ring: bool = True) -> list[float]:
    """Train by transformers' Trainer, and return the loss of each step."""
    kind, model = (RingTrainer, llama("ring")) if ring else (PlainTrainer, llama("sdpa"))
    with tempfile.TemporaryDirectory() as folder:
        args = arguments(TrainingArguments, folder)
        trainer = kind(model, args, train_dataset=samples(steps, length))
        trainer.train()
    return losses_of(trainer)


def by_plain(steps: int, length: int) -> list[float]:
    """Train by transformers alone, in one process; return the losses."""
    return by_trainer(steps, length, ring=False)


def arguments(kind: Callable[..., Any], folder: str, **more: Any) -> Any:
    """Arguments of a trainer, whose ring is all processes."""
    if processes() > 1:
        more["parallelism_config"] = RingParallelismConfig(cp_size=processes())
    return kind(
        output_dir=folder, use_cpu=True, num_train_epochs=1, per_device_train_batch_size=BATCH,
        learning_rate=RATE, lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=0.0,
        logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
        dataloader_pin_memory=False, **more,
    )  # fmt: skip


def losses_of(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def by_sft(steps: int, length: int) -> list[float]:
    """Train by TRL's SFTTrainer, which packs documents itself, and return the loss of each step."""
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    class RingSFTTrainer(InOrder, RingTrainerMixin, SFTTrainer):
        """TRL's SFTTrainer over spread sequences."""

    from tokenizers import Tokenizer, models

    bytes_ = Tokenizer(models.WordLevel({chr(i): i for i in range(256)}, unk_token="\0"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_, pad_token="\0", eos_token="\0"
    )  # fmt: skip
    documents = []
    for sample in samples(steps, length):
        starts = (sample["position_ids"] == 0).nonzero().flatten().tolist()
        parts = sample["input_ids"].tensor_split(starts[1:])
        documents += [{"input_ids": part.tolist()} for part in parts]
    with tempfile.TemporaryDirectory() as folder:
        more = dict(packing=True, max_length=length, gradient_checkpointing=False, bf16=False)
        trainer = RingSFTTrainer(
            llama("ring"), arguments(SFTConfig, folder, **more),
            train_dataset=Dataset.from_list(documents), processing_class=tokenizer,
        )  # fmt: skip
        trainer.train()
    return losses_of(trainer)


def by_accelerate(steps: int, length: int) -> list[float]:
    """Train by accelerate, and return the loss of each step."""
    config = RingParallelismConfig(cp_size=processes()) if processes() > 1 else None
    accelerator = Accelerator(cpu=True, parallelism_config=config)
    ring = accelerator.torch_device_mesh["cp"] if config else None
    model = llama("ring")
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    loader = DataLoader(samples(steps, length), batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    found = []
    for whole in loader:  # the same on all ranks of "cp"
        with ring_forward(shard_batch(whole, group=ring)) as inputs:
            loss = model(**inputs).loss
            accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def by_lightning(steps: int, length: int) -> list[float]:
    """Train by Lightning, and return the loss of each step."""
    import lightning

    class Llama(lightning.LightningModule):
        """A Llama whose batches are spread over all processes."""

        def __init__(self) -> None:
            super().__init__()
            self.model, self.found = llama("ring"), []

        def training_step(self, whole: Sample, _: int) -> Tensor:
            with ring_forward(shard_batch(whole)) as inputs:
                loss = self.model(**inputs).loss
            self.found.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=RATE, weight_decay=0.0)

    many = dict(strategy="ddp", devices=processes()) if processes() > 1 else dict(devices=1)
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=1, use_distributed_sampler=False, **quiet, **many
    )
    model = Llama()
    trainer.fit(model, DataLoader(samples(steps, length), batch_size=BATCH))
    return model.found


def processes() -> int:
    """The number of processes that torchrun has started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


BY = {
    "trainer": by_trainer, "plain": by_plain, "sft": by_sft,
    "accelerate": by_accelerate, "lightning": by_lightning,
}  # fmt: skip


@click.command(help=__doc__)
@click.option("--by", type=click.Choice([*BY]), default="trainer", show_default=True)
@click.option("--steps", default=60, show_default=True)
@click.option("--length", default=512, show_default=True, help="bytes of a sequence")
@click.option("--losses", type=click.Path(dir_okay=False, path_type=Path), help="keep them here")
def main(by: str, steps: int, length: int, losses: Path | None) -> None:
    """Train, and tell the losses."""
    register()
    found = BY[by](steps, length)
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"{by}, {processes()} processes: loss {found[0]:.4f} -> {found[-1]:.4f}", flush=True)
        if losses is not None:
            losses.write_text(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
