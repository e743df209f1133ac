"""Recipes: ring attention beside data, sharded data and tensor parallelism, over a device mesh.

    torchrun --nproc-per-node 4 examples/meshes.py

Each recipe wraps a model and returns it with the ring's part of the mesh, "cp". The loop is the
same for all of them: `step`. If gradients were not averaged over all ranks of a ring, too, each
would be that of a rank's own tokens.
"""

import copy
import warnings
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import click
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

from ring_attention_pytorch import RingAttention, ring_cross_entropy, shard_batch
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


def tensor_parallel(model: nn.Module) -> Wrapped:
    sizes = (dist.get_world_size() // 4, 2, 2)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "cp", "tp"))
    heads = {f"to_{name}": ColwiseParallel() for name in "qkv"}  # a rank has some of the heads
    for block in model.blocks:
        block.attention.split_projections(mesh["tp"])
        parallelize_module(block.attention, mesh["tp"], heads | {"to_out": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp", "cp"])
    fully_shard(model, mesh=mesh["dp", "cp"])  # averages over replicas and over the ring
    return Wrapped(model, mesh["cp"], mesh["dp"].get_local_rank())


RECIPES = {"DDP": ddp, "FSDP2": fsdp2, "HSDP": hsdp, "tensor parallel": tensor_parallel}


def step(wrapped: Wrapped, whole: Mapping[str, Any]) -> Tensor:
    """Compute the loss of a batch, and gradients."""
    batch = shard_batch(whole, group=wrapped.ring)
    with batch:
        logits = wrapped.model(batch["input_ids"], batch["position_ids"])
        loss = ring_cross_entropy(logits, batch.labels)  # one mean over all ranks
        loss.backward()
    return loss.detach()


class Block(nn.Module):
    """Attention of four heads, two of them with a key head in common, and a residual."""

    def __init__(self, dim: int, spread: bool):
        super().__init__()
        how = {"ring_attn": True} if spread else {"force_regular_attn": True}
        self.attention = RingAttention(
            dim, dim_head=8, heads=4, num_grouped_query_heads=2, causal=True, **how
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x)


class Model(nn.Module):
    """A transformer over bytes, whose blocks are computed again in backward."""

    def __init__(self, dim: int = 32, depth: int = 2, spread: bool = True):
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, dim), nn.Embedding(LENGTH, dim)
        self.blocks = nn.ModuleList(Block(dim, spread) for _ in range(depth))
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


def one_process(weights: Mapping[str, Tensor], replicas: int) -> tuple[Tensor, nn.Module]:
    """Return the loss of all batches, and a model that has its gradients, of whole documents."""
    model = Model(spread=False).double()
    model.load_state_dict(weights)
    losses, tokens = [], []
    for whole in batches()[:replicas]:
        borders = whole["cu_seqlens"]
        for at in (slice(*ends) for ends in pairwise(borders)):
            ids, labels = whole["input_ids"][:, at], whole["labels"][:, at][0, 1:]
            logits = model(ids, torch.arange(ids.shape[1])[None])[0, :-1]
            losses.append(nn.functional.cross_entropy(logits, labels, reduction="sum"))
            tokens.append((labels != -100).sum())
    loss = sum(losses) / sum(tokens)
    loss.backward()
    return loss.detach(), model


def worst_error(wrapped: Wrapped, loss: Tensor, want: tuple[Tensor, nn.Module]) -> float:
    """Return the worst relative error of the loss and of any gradient."""
    grads = {}
    for name, p in wrapped.model.named_parameters():
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        grads[name.removeprefix("module.")] = grad
    found = Model().double()
    found.load_state_dict(grads)  # split or not, by the names of one process
    errors = [(loss - want[0]).abs() / want[0]]
    for got, p in zip(found.parameters(), want[1].parameters()):
        errors.append((got.detach() - p.grad).norm() / p.grad.norm())
    return float(max(errors))


def compare(recipe: Callable[[nn.Module], Wrapped]) -> tuple[float, float]:
    """Return the loss of a recipe, and its worst error beside one process, in float64."""
    torch.manual_seed(0)
    model = Model().double()
    weights = copy.deepcopy(model.state_dict())
    wrapped = recipe(model)
    loss = step(wrapped, batches()[wrapped.replica])
    replicas = dist.get_world_size() // 4 if recipe is tensor_parallel else 2
    return float(loss), worst_error(wrapped, loss, one_process(weights, replicas))


@click.command(help=__doc__)
def main() -> None:
    """Compare each recipe with one process."""
    if not dist.is_torchelastic_launched():
        raise click.UsageError(
            "it needs 4 or 8 processes: torchrun --nproc-per-node 4 examples/meshes.py"
        )
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # logits are a view
    with torchrun_group("gloo"):
        for name, recipe in RECIPES.items():
            loss, error = compare(recipe)
            if dist.get_rank() == 0:
                print(f"{name:26} loss {loss:.6f}, worst relative error {error:.1e}", flush=True)


if __name__ == "__main__":
    main()
