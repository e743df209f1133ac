"""Trainers over spread sequences take the steps that they take alone in one process."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState
from transformers import Trainer, TrainingArguments

from ring_attention_pytorch.integrations.accelerate import RingParallelismConfig
from ring_attention_pytorch.integrations.transformers import RingTrainerMixin, register
from tests.integrations.test_transformers import raised
from tests.support import hf
from tests.support.hf import WORDS, model_of
from tests.support.reference import relative_error

EXACT = 1e-10
CONFIG = RingParallelismConfig
Losses = dict[str, list[float]]


class RingTrainer(RingTrainerMixin, Trainer):
    """transformers' Trainer over spread sequences."""


@contextmanager
def as_launched() -> Iterator[None]:
    """Inside it accelerate finds the group of this pool, as torchrun would tell it."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    told |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}  # nobody asks there
    before = dict(os.environ)
    if size > 1:
        os.environ |= {name: str(value) for name, value in told.items()}
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        os.environ.clear()
        os.environ.update(before)


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


def trained(
    kind: str, ring: int = 0, name: str = "Qwen3", change: Callable[[Any], Any] | None = None,
    **more: Any,
) -> tuple[Losses, list[Tensor]]:  # fmt: skip
    """Losses of steps and evaluations, and parameters at the end; 0 is transformers alone."""
    register()
    many = dist.get_world_size() if ring and dist.is_initialized() else 1
    with as_launched(), hf.in_double(), tempfile.TemporaryDirectory() as folder:
        if many > 1:
            more["parallelism_config"] = RingParallelismConfig(
                cp_size=ring, dp_shard_size=many // ring
            )
        data, model = sequences(kind), model_of(name, "ring" if ring else "sdpa")
        if change is not None:
            model = change(model)
        args = arguments(folder, 4 // (many // (ring or 1)), **more)
        trainer = (RingTrainer if ring else Trainer)(
            model, args, train_dataset=data, eval_dataset=data[:4]
        )
        trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(data)
        trainer.train()
    log = trainer.state.log_history
    losses = {
        kind: [entry[kind] for entry in log if kind in entry] for kind in ("loss", "eval_loss")
    }
    return losses, [p.detach() for p in model.parameters()]


def difference(got: tuple[Losses, list[Tensor]], want: tuple[Losses, list[Tensor]]) -> float:
    """The worst of parameters and losses. Trainers add the losses of steps in float32."""
    assert all(want[0].values())
    assert got[0]["loss"] == pytest.approx(want[0]["loss"], rel=1e-6)
    pairs = list(zip(got[1], want[1], strict=True))
    pairs.append((torch.tensor(got[0]["eval_loss"]), torch.tensor(want[0]["eval_loss"])))
    return max(relative_error(a, b) for a, b in pairs)


def test_trainer_alone_and_as_a_ring_of_one():
    assert difference(trained("padded", 1), trained("padded")) < EXACT


@pytest.mark.parametrize(("kind", "ring"), [("padded", 2), ("packed", 4)])
def test_trainer_over_four_processes_takes_the_steps_of_one(kind, ring, pools):
    want = trained(kind)
    for got in pools(4).run(trained, kind, ring):
        assert difference(got, want) < EXACT


def with_checkpoints(model: nn.Module) -> nn.Module:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def with_lora(model: nn.Module) -> nn.Module:
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(3)
    return peft.get_peft_model(model, config).double()


@pytest.mark.thorough
@pytest.mark.parametrize("change", [with_checkpoints, with_lora])
def test_checkpoints_and_adapters_change_nothing(change, pools):
    if change is with_lora:
        pytest.importorskip("peft")
    want = trained("packed", 0, "Llama", change)
    for got in pools(4).run(trained, "packed", 4, "Llama", change):
        assert difference(got, want) < EXACT


def start(model: str = "ring", kind: type = RingTrainer, act: str = "train", **more: Any) -> Any:
    """Let a trainer do something that should not be done."""
    names = ("compute_loss_func", "compute_metrics")
    own = {name: more.pop(name) for name in names if name in more}
    data = sequences("padded")
    with as_launched(), tempfile.TemporaryDirectory() as folder:
        args = arguments(folder, 2, **more)
        args.prediction_loss_only = "compute_metrics" not in own
        made = kind(model_of("Llama", model), args, train_dataset=data, eval_dataset=data, **own)
        return getattr(made, act)()


def nothing(*_: Any, **__: Any) -> Any:
    return {}


def refusals() -> dict[str, str]:
    """For a pool: what a trainer that can't be right says."""
    register()
    ring = dict(parallelism_config=CONFIG(cp_size=dist.get_world_size()))
    return {
        "no ring": raised(start),
        "label smoothing": raised(lambda: start(label_smoothing_factor=0.1, **ring)),
        "a loss of one's own": raised(lambda: start(compute_loss_func=nothing, **ring)),
        "local means": raised(lambda: start(average_tokens_across_devices=False, **ring)),
        "metrics": raised(lambda: start(act="evaluate", compute_metrics=nothing, **ring)),
        "other attention": raised(lambda: start(model="sdpa", **ring)),
        "no mixin": raised(lambda: start(kind=Trainer, **ring)),
        "another mesh": raised(lambda: start(parallelism_config=CONFIG(cp_size=3))),
    }


REFUSED = {
    "no ring": "nothing says which ranks share a sequence",
    "label smoothing": "label_smoothing_factor",
    "a loss of one's own": "compute_loss_func",
    "local means": "average_tokens_across_devices must be True",
    "metrics": "metrics need whole",
    "other attention": 'attn_implementation="ring"',
    "no mixin": "call it in the block",
    "another mesh": "there are 4 processes",
}


def test_a_trainer_that_would_be_wrong_raises(pools):
    for found in pools(4).run(refusals):
        for what, text in REFUSED.items():
            assert text in found[what], (what, found[what])


def test_accelerates_own_context_parallelism_is_refused():
    class Mixed(RingTrainerMixin):
        """A trainer whose mesh is accelerate's own."""

        _ring = "the ring"
        accelerator = SimpleNamespace(
            num_processes=2, parallelism_config=ParallelismConfig(cp_size=2)
        )

    with pytest.raises(ValueError, match="would drop masks"):
        Mixed()._check_trainer()


def test_accelerate_is_told_of_a_mesh_and_of_no_context_parallelism():
    config = RingParallelismConfig(cp_size=4, dp_shard_size=2)
    assert not config.cp_enabled
    assert config.fsdp_dim_names == ["dp_shard_cp"]
    assert (config.cp_size, config.data_parallel_size, config.total_size) == (4, 2, 8)
    assert RingParallelismConfig().total_size == 1
