"""Distillation: a student learns a teacher's probabilities; logits of both are of the same shards.

    torchrun --nproc-per-node 4 examples/distill.py
    python examples/distill.py

Both print the same losses.
"""

from argparse import ArgumentParser, RawDescriptionHelpFormatter

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from ring_attention_pytorch import shard_batch
from ring_attention_pytorch.integrations.transformers import register, ring_forward
from ring_attention_pytorch.launch import torchrun_group


def divergence(student: Tensor, teacher: Tensor, real: Tensor, items: Tensor | None) -> Tensor:
    """Return KL divergences of log-probabilities; their mean over ranks is that of all tokens."""
    each = (teacher.exp() * (teacher - student)).sum(-1)
    assert items is not None  # the batch has labels
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return (each * real).sum() / items * ranks


def main(length: int = 60) -> None:
    """Train; DDP averages gradients over all ranks."""
    register()
    torch.manual_seed(0)
    sizes = dict(intermediate_size=48, num_hidden_layers=2, vocab_size=50, num_attention_heads=4)
    configs = [LlamaConfig(hidden_size=d, **sizes, attn_implementation="ring") for d in (32, 64)]
    models: list[nn.Module] = [LlamaForCausalLM(config) for config in configs]
    student, teacher = models
    if dist.is_initialized():
        student = nn.parallel.DistributedDataParallel(student)
    optimizer = torch.optim.SGD(student.parameters(), lr=5.0)
    for step in range(3):
        ids = torch.randint(2, 50, (2, length))  # on all ranks
        mask = (torch.arange(length) < torch.randint(20, length, (2, 1))).long()
        whole = {"input_ids": ids, "attention_mask": mask}
        batch = shard_batch(whole | {"labels": ids.masked_fill(mask == 0, -100)})
        with ring_forward(batch, labels=False) as inputs:
            with torch.no_grad():
                wanted = teacher(**inputs).logits.log_softmax(-1)
            got = student(**inputs).logits.log_softmax(-1)
            loss = divergence(got, wanted, batch.labels != -100, batch.num_items)
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        if dist.is_initialized():  # each rank's is of its own tokens
            dist.all_reduce(loss := loss.detach() / dist.get_world_size())
        if batch.rank == 0:
            print(f"step {step}   loss {loss.item():.6f}", flush=True)


if __name__ == "__main__":
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args()
    with torchrun_group():
        main()
