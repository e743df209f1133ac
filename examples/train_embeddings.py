"""Embeddings: vectors of spread sequences, pooled; all rings' other passages are negatives.

    torchrun --nproc-per-node 4 examples/train_embeddings.py
    python examples/train_embeddings.py

Both print the same losses; the first one has two rings of two ranks.
"""

from argparse import ArgumentParser, RawDescriptionHelpFormatter

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

from ring_attention_pytorch import shard_batch, unshard_sequence
from ring_attention_pytorch.integrations.transformers import register, ring_forward
from ring_attention_pytorch.launch import torchrun_group
from ring_attention_pytorch.ranks.ring import Group


def embed(model: nn.Module, ids: Tensor, mask: Tensor, pool: str, ring: Group) -> Tensor:
    """Return unit vectors `[b, d]` of whole texts, the same on all ranks of a ring."""
    batch = shard_batch({"input_ids": ids, "attention_mask": mask}, group=ring)
    with ring_forward(batch, labels=False) as inputs:
        whole = batch.unshard(model(**inputs).last_hidden_state)
    weights = mask if pool == "mean" else mask.cumsum(1) * mask == mask.sum(1, keepdim=True)
    return nn.functional.normalize((whole * weights[..., None]).sum(1), dim=-1)


def main(pool: str, pairs: int = 8, length: int = 60) -> None:
    """Train; DDP averages gradients over all ranks."""
    register()
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, vocab_size=50)
    model: nn.Module = LlamaModel(
        LlamaConfig(num_hidden_layers=2, **sizes, attn_implementation="ring")
    )
    ring, rings, place = None, None, slice(None)
    if dist.is_initialized():
        ranks = dist.get_world_size()
        sides = (2, ranks // 2) if ranks > 1 else (1, 1)
        mesh = dist.init_device_mesh("cpu", sides, mesh_dim_names=("dp", "cp"))
        ring, rings = mesh["cp"], mesh["dp"]
        place = slice(mesh.get_local_rank("dp"), None, sides[0])  # this ring's pairs
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for step in range(3):
        ids = torch.randint(2, 50, (pairs, 2, length))  # a query and its passage, on all ranks
        mask = (torch.arange(length) < torch.randint(20, length, (pairs, 2, 1))).long()
        mine = embed(model, ids[place].flatten(0, 1), mask[place].flatten(0, 1), pool, ring)
        every = unshard_sequence(mine[None], length=2 * pairs, group=rings)[0]
        scores = every[::2] @ every[1::2].T / 0.1
        loss = nn.functional.cross_entropy(scores, torch.arange(pairs))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"step {step}   loss {loss.item():.6f}", flush=True)


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--pool", choices=["mean", "last"], default="mean")
    with torchrun_group():
        main(parser.parse_args().pool)
