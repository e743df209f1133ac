"""Trainers of axolotl and verl train over a ring as transformers or plain PyTorch do alone.

Where a package is not installed, stubs stand for the classes that an example derives from.
torchtitan and Lightning are in tests/project/test_training_runs.py and test_hf_examples.py.
"""

import sys
import tempfile
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tests.support.trainers import as_launched, causal, in_double, texts

STEPS = 10


def example(name: str, **stubs: dict[str, Any]) -> ModuleType:
    """Import an example; modules of a package that is not installed have these members only."""
    made: dict[str, ModuleType] = {}
    for module, members in stubs.items():
        path = module.replace("__", ".")
        try:
            import_module(path)
        except ModuleNotFoundError:
            parts = path.split(".")
            for end in range(1, len(parts)):
                made.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
            made[path] = ModuleType(path)
            vars(made[path]).update(members)
    with mock.patch.dict(sys.modules, made):
        sys.modules.pop(f"examples.{name}", None)
        return import_module(f"examples.{name}")


# --- axolotl ---


def stubs_of_axolotl() -> dict[str, dict[str, Any]]:
    """Its modules, with what its classes do to transformers' Trainer."""
    from transformers import Trainer

    class AxolotlTrainer(Trainer):
        __module__, __qualname__ = "axolotl.core.trainers.base", "AxolotlTrainer"

        def __init__(self, *given: Any, **more: Any) -> None:
            super().__init__(*given, **more)
            self.model_accepts_loss_kwargs = False  # it looks at the model inside a Llama

        def compute_loss(self, *given: Any, **more: Any) -> Any:
            return super().compute_loss(*given, **more)

    return dict(
        axolotl__integrations__base={"BasePlugin": object},
        axolotl__core__trainers__base={"AxolotlTrainer": AxolotlTrainer},
    )


def losses_of(ring: bool) -> list[float]:
    """For a pool: the losses of ten steps, by axolotl's hooks or by transformers' Trainer alone."""
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments

    more: dict[str, Any] = {}
    with as_launched(), in_double(), tempfile.TemporaryDirectory() as folder:
        model, kind = causal("sdpa"), Trainer
        if ring:
            plugin = example("axolotl_plugin", **stubs_of_axolotl()).RingPlugin()
            plugin.pre_model_load({})
            plugin.post_model_load({}, model)
            kind, more = plugin.get_trainer_cls({}), plugin.get_training_args({})
        args = TrainingArguments(
            output_dir=folder, use_cpu=True, max_steps=STEPS, optim="sgd", learning_rate=0.5,
            per_device_train_batch_size=2, save_strategy="no", logging_steps=1, disable_tqdm=True,
            report_to=[], dataloader_pin_memory=False, **more,
        )  # fmt: skip
        samples = Dataset.from_list(texts(2 * STEPS)).with_format("torch")
        trainer = kind(model=model, args=args, train_dataset=samples)
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.thorough
def test_axolotl_trains_over_a_ring_as_transformers_alone(pools: Any) -> None:
    pytest.importorskip("datasets")
    want = losses_of(ring=False)
    assert len({*want}) == STEPS
    for found in pools(2).run(losses_of, True):
        assert found == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("name", ["sample_packing", "rl", "orpo_alpha"])
def test_the_plugin_of_axolotl_refuses_what_is_not_spread(name: str) -> None:
    plugin = example("axolotl_plugin", **stubs_of_axolotl()).RingPlugin()
    with pytest.raises(ValueError, match=f"{name} must be off"):
        plugin.pre_model_load({name: True})


# --- verl ---

LENGTHS = (7, 12, 5)


class Batch(dict):
    """A stand-in for a TensorDict, with all that the engine asks of it."""

    def to(self, device: torch.device) -> "Batch":
        return self


def batches() -> list[Batch]:
    """Sequences of several lengths, and an advantage of each token."""
    draw, found = torch.Generator().manual_seed(2), []
    for _ in range(STEPS):
        ids = [torch.randint(3, 31, (n,), generator=draw) for n in LENGTHS]
        gains = torch.randn(sum(LENGTHS), generator=draw, dtype=torch.float64)
        nested = torch.nested.as_nested_tensor(ids, layout=torch.jagged)
        found.append(Batch(input_ids=nested, temperature=0.7, gains=gains))
    return found


def gain(model_output: dict[str, Tensor], data: Batch, dp_group: Any) -> tuple[Tensor, dict]:
    """A policy's loss, as verl calls it."""
    return -(model_output["log_probs"].values() * data["gains"]).mean(), {}


def alone() -> list[float]:
    """The losses of plain PyTorch, a sequence after the other."""
    model, losses = causal("sdpa"), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for batch in batches():
        each = []
        for ids in batch["input_ids"].unbind():
            logits = model(ids[None]).logits[0, :-1] / batch["temperature"]
            each += [logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0], logits.new_zeros(1)]
        loss = -(torch.cat(each) * batch["gains"]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def by_verl() -> list[float]:
    """For a pool: the losses of ten steps of the engine."""

    def register(**_: Any) -> Any:
        return lambda kind: kind

    of = example(
        "verl_engine",
        verl__workers__engine__base={"EngineRegistry": SimpleNamespace(register=register)},
        verl__workers__engine__fsdp__transformer_impl={"FSDPEngineWithLMHead": object},
    )
    engine, losses = object.__new__(of.RingEngine), []
    engine.ulysses_device_mesh, engine.get_data_parallel_group = None, lambda: None
    engine.module = DistributedDataParallel(causal("ring"))
    optimizer = torch.optim.SGD(engine.module.parameters(), lr=0.5)
    for batch in batches():
        loss, told = engine.forward_step(batch, gain, forward_only=False)
        assert len(told["model_output"]["log_probs"].values()) == sum(LENGTHS)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(told["loss"])
    return losses


def in_double_by_verl() -> list[float]:
    """For a pool: the same, with what the model computes in float32 in float64."""
    assert dist.get_world_size() == 2
    with in_double():
        return by_verl()


@pytest.mark.thorough
def test_verl_trains_over_a_ring_as_plain_pytorch(pools: Any) -> None:
    with in_double():
        want = alone()
    assert abs(want[-1] - want[0]) > 0.01
    for found in pools(2).run(in_double_by_verl):
        assert found == pytest.approx(want, rel=1e-9)
