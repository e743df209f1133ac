"""Recipes: ring attention beside data, sharded data and tensor parallelism, over a device mesh.

    torchrun --nproc-per-node 4 examples/meshes.py

Each recipe wraps a model and returns it with the ring's part of the mesh, "cp". The loop is the
same for all of them: `step`. If gradients were not averaged over all ranks of a ring, too, each
would be that of a rank's own tokens.
"""

import copy
import warnings
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ring_attention_pytorch import default_attention, ring_attn, ring_cross_entropy, shard_batch
from ring_attention_pytorch.launch import torchrun_group

LENGTH = 61


class Wrapped(NamedTuple):
    """A model for many ranks, its ring, and which of the batches this rank works on."""

    model: nn.Module
    ring: DeviceMesh
    replica: int


def ddp(model: nn.Module) -> Wrapped:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    model = DistributedDataParallel(model)  # averages over all ranks, dp and cp
    return Wrapped(model, mesh["cp"], mesh["dp"].get_local_rank())


def fsdp2(model: nn.Module) -> Wrapped:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    every = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_cp",))  # both in one
    for block in model.blocks:
        fully_shard(block, mesh=every)
    fully_shard(model, mesh=every)
    return Wrapped(model, mesh["cp"], mesh["dp"].get_local_rank())


def hsdp(model: nn.Module) -> Wrapped:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)  # sharded over cp, replicated over dp, averaged over both
    fully_shard(model, mesh=mesh)
    return Wrapped(model, mesh["cp"], mesh["dp"].get_local_rank())


def cp_and_tp(model: nn.Module) -> Wrapped:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    heads = {f"to_{name}": ColwiseParallel() for name in "qkv"}  # a rank has some of the heads
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], heads | {"to_out": RowwiseParallel()})
        fully_shard(block, mesh=mesh["cp"])
    fully_shard(model, mesh=mesh["cp"])  # averages over the ring
    return Wrapped(model, mesh["cp"], 0)


RECIPES = {"DDP": ddp, "FSDP2": fsdp2, "HSDP": hsdp, "ring and tensor parallel": cp_and_tp}


def step(wrapped: Wrapped, whole: Mapping[str, Any]) -> Tensor:
    """Compute the loss of a batch, and gradients."""
    batch = shard_batch(whole, group=wrapped.ring)
    with batch:
        logits = wrapped.model(batch["input_ids"], batch["position_ids"])
        loss = ring_cross_entropy(logits, batch.labels)  # one mean over all ranks
        loss.backward()
    return loss.detach()


class Block(nn.Module):
    """Attention whose projections are apart, so that each can be split by heads."""

    def __init__(self, dim: int):
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = (
            nn.Linear(dim, dim, bias=False) for _ in range(4)
        )
        self.attend = ring_attn

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (to(x).unflatten(-1, (-1, 8)) for to in (self.to_q, self.to_k, self.to_v))
        return x + self.to_out(self.attend(q, k, v, causal=True).flatten(2))


class Model(nn.Module):
    """A transformer over bytes, whose blocks are computed again in backward."""

    def __init__(self, dim: int = 32, depth: int = 2):
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, dim), nn.Embedding(LENGTH, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.to_logits = nn.Linear(dim, 256)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.bytes(ids) + self.places(positions)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.to_logits(x)


def batches() -> list[dict[str, Any]]:
    """Return a batch for each of two replicas, one of them with fewer real tokens."""
    draw = torch.Generator().manual_seed(0)
    found: list[dict[str, Any]] = []
    for borders in ([0, 20, LENGTH], [0, 50, LENGTH]):
        ids = torch.randint(256, (1, LENGTH), generator=draw)
        found.append({"input_ids": ids, "labels": ids.clone(), "cu_seqlens": borders})
    found[1]["labels"][:, :45] = -100
    return found


def one_process(model: nn.Module, replicas: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of all batches and its gradients, by name: dense, a document at a time."""
    for block in model.blocks:
        block.attend = default_attention
    losses, tokens = [], []
    for whole in batches()[:replicas]:
        borders = whole["cu_seqlens"]
        for at in (slice(*ends) for ends in pairwise(borders)):
            ids, labels = whole["input_ids"][:, at], whole["labels"][:, at][0, 1:]
            logits = model(ids, torch.arange(ids.shape[1])[None])[0, :-1]
            losses.append(nn.functional.cross_entropy(logits, labels, reduction="sum"))
            tokens.append((labels != -100).sum())
    loss = sum(losses) / sum(tokens)
    grads = torch.autograd.grad(loss, [*model.parameters()])
    return loss.detach(), dict(zip(dict(model.named_parameters()), grads))


def worst_error(wrapped: Wrapped, loss: Tensor, want: tuple[Tensor, dict[str, Tensor]]) -> float:
    """Return the worst relative error of the loss and of any gradient."""
    errors = [abs(loss - want[0]) / want[0]]
    for name, p in wrapped.model.named_parameters():
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        exact = want[1][name.removeprefix("module.")]
        errors.append((grad - exact).norm() / exact.norm())
    return float(max(errors))


def main() -> None:
    """Compare each recipe with one process, in float64."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # logits are a view
    with torchrun_group("gloo"):
        for name, recipe in RECIPES.items():
            torch.manual_seed(0)
            model = Model().double()
            want = one_process(copy.deepcopy(model), 1 if recipe is cp_and_tp else 2)
            wrapped = recipe(model)
            loss = step(wrapped, batches()[wrapped.replica])
            error = worst_error(wrapped, loss, want)
            if dist.get_rank() == 0:
                print(f"{name:26} loss {loss:.6f}, worst relative error {error:.1e}", flush=True)


if __name__ == "__main__":
    main()
