"""A trainer of transformers over spread sequences, small enough to be started by every test."""

import importlib.util
import os
import tempfile
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments

from ring_attention_pytorch.integrations.transformers import RingTrainerMixin
from tests.support.hf import WORDS, model_of
from tests.support.trainers import as_launched

EXACT = 1e-10
HAS_TRL = importlib.util.find_spec("trl") is not None


class RingTrainer(RingTrainerMixin, Trainer):
    """transformers' Trainer over spread sequences."""


def sequences(kind: str) -> list[dict[str, Tensor]]:
    """16 sequences: padded at the right, unequally, or of packed documents."""
    draw, found = torch.Generator().manual_seed(1), []
    for i in range(16):
        ids = torch.randint(WORDS, (29,), generator=draw)
        sample, at = dict(input_ids=ids, labels=ids.clone()), torch.arange(29)
        if kind == "padded":
            sample["attention_mask"] = (at < 29 - i).long()
            sample["labels"][at >= 29 - i] = -100
        else:
            starts = torch.zeros(29, dtype=torch.long)
            starts[[5 + i % 3, 17]] = torch.tensor([5 + i % 3, 17])
            sample["position_ids"] = at - starts.cummax(0).values
            sample["labels"][sample["position_ids"] == 0] = -100
        found.append(sample)
    return found


def arguments(folder: str, batch: int, **more: Any) -> TrainingArguments:
    return TrainingArguments(
        output_dir=folder, use_cpu=True, num_train_epochs=1, per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch, gradient_accumulation_steps=2, optim="sgd", report_to=[],
        learning_rate=0.5, lr_scheduler_type="constant", max_grad_norm=0.0, save_strategy="no",
        logging_steps=1, eval_strategy="steps", eval_steps=1, disable_tqdm=True,
        dataloader_pin_memory=False, prediction_loss_only=True, **more,
    )  # fmt: skip


class Halved(RingTrainer):
    """A trainer whose loss is not that of the batch."""

    def compute_loss(self, *given: Any, **more: Any) -> Any:
        found = super().compute_loss(*given, **more)
        return (found[0] / 2, *found[1:]) if isinstance(found, tuple) else found / 2


class Stream(torch.utils.data.IterableDataset):
    """Sequences whose number nobody knows."""

    def __iter__(self) -> Any:
        return iter(sequences("padded"))


def start(model: str = "ring", kind: type = RingTrainer, act: str = "train", **more: Any) -> Any:
    """Let a trainer do something that should not be done."""
    names = ("compute_loss_func", "compute_metrics")
    own = {name: more.pop(name) for name in names if name in more}
    data: Any = sequences("padded")
    if more.pop("stream", False):
        data = Stream()
    os.environ.update(more.pop("told", {}))
    with as_launched(), tempfile.TemporaryDirectory() as folder:
        args = arguments(folder, 2, **more)
        args.prediction_loss_only = "compute_metrics" not in own
        made = kind(model_of("Llama", model), args, train_dataset=data, eval_dataset=data, **own)
        return getattr(made, act)()


def of_trl(name: str) -> Any:
    """A parameter of tests that need TRL."""
    return pytest.param(name, marks=pytest.mark.skipif(not HAS_TRL, reason="needs TRL"))


def check(worst: dict[str, float]) -> None:
    """Trainers add the losses of steps in float32."""
    assert worst["parameters"] < EXACT, worst
    assert max(worst.values()) < 1e-6, worst
