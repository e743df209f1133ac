"""Models wrapped twice, in each order: the outermost call counts, as in one process."""

from itertools import permutations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

pytest.importorskip("transformers")
pytest.importorskip("peft")

from peft import LoraConfig, get_peft_model

from ring_attention_pytorch import shard_batch
from ring_attention_pytorch.integrations.transformers import register, ring_forward
from tests.support import hf
from tests.support.reference import relative_error
from tests.support.sampling import grid

Step = tuple[float, dict[str, Tensor]]  # loss, and gradients of what learns


def with_lora(model: nn.Module) -> Any:
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(5)
    return get_peft_model(model, config).double()


def sharded(model: nn.Module) -> nn.Module:
    fully_shard(model)
    return model


WRAPPERS: dict[str, Any] = {
    "PEFT": with_lora,
    "DDP": DistributedDataParallel,
    "FSDP2": sharded,
    "compile": lambda model: torch.compile(model, backend="eager"),
}
# PyTorch's DDP takes no DTensors
ORDERS = [order for order in permutations(WRAPPERS, 2) if order != ("FSDP2", "DDP")]


def batch() -> dict[str, Any]:
    whole = hf.batch_of("padded left")
    return whole | {"labels": whole["labels"].masked_fill(whole["attention_mask"] == 0, -100)}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, p in model.named_parameters():
        for wrapper in ("_orig_mod.", "module.", "base_model.model."):
            name = name.replace(wrapper, "")
        if p.grad is not None:
            found[name] = p.grad
    return found


def alone(order: tuple[str, str]) -> Step:
    model = hf.model_of("Llama", "sdpa")
    model = with_lora(model) if "PEFT" in order else model
    with hf.in_double():
        loss = model(**batch()).loss
        loss.backward()
    return float(loss.detach()), gradients(model)


def over_ranks(order: tuple[str, str]) -> Step:
    """A step of a wrapped model, whose gradients are averaged here where no wrapper has done so."""
    register()
    torch.compiler.reset()
    model: Any = hf.model_of("Llama", "ring")
    for wrapper in order:
        model = WRAPPERS[wrapper](model)
    with hf.in_double(), ring_forward(shard_batch(batch())) as inputs:
        loss = model(**inputs).loss
        loss.backward()
    found = gradients(model)
    by_ddp = "DDP" in order and order != ("DDP", "PEFT")  # it knows parameters that it began with
    for name, grad in found.items():
        if isinstance(grad, DTensor):
            found[name] = grad.full_tensor()
        elif not by_ddp:
            dist.all_reduce(grad)
            grad /= dist.get_world_size()
    return float(loss.detach()), found


@grid("order", [(order,) for order in ORDERS], always=1, drawn=2, ids="-".join)
def test_a_model_wrapped_twice_takes_the_step_of_one_process(order, pools) -> None:
    loss, want = alone(order)
    for got, found in pools(2).run(over_ranks, order):
        assert got == pytest.approx(loss, rel=1e-12)
        assert found.keys() == want.keys()
        assert max(relative_error(found[name], want[name]) for name in want) < 1e-10
