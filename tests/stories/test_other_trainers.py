"""verl's engine trains over a ring as plain PyTorch does alone.

Where verl is not installed, a stub stands for the class that the example derives from. torchtitan
and Lightning are in tests/project/test_training_runs.py and test_hf_examples.py.
"""

import sys
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

from tests.support.trainers import causal, in_double

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


LENGTHS = (7, 12, 5)


class Batch(dict):
    """What the engine asks of a TensorDict."""

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
