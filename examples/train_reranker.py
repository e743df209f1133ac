"""A reranker: scores of a query with each passage, at the last token of a spread sequence.

    torchrun --nproc-per-node 4 examples/train_reranker.py
    python examples/train_reranker.py

Both print the same losses.
"""

from argparse import ArgumentParser, RawDescriptionHelpFormatter

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForSequenceClassification

from ring_attention_pytorch import shard_batch
from ring_attention_pytorch.integrations.transformers import register, ring_forward
from ring_attention_pytorch.launch import torchrun_group

SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, vocab_size=50)


def main(steps: int = 3, queries: int = 2, passages: int = 4, length: int = 60) -> None:
    """Train; all ranks compute the same loss of the same scores, and DDP averages gradients."""
    register()
    torch.manual_seed(0)
    config = LlamaConfig(
        **SIZES, num_attention_heads=4, num_labels=1, pad_token_id=0, attn_implementation="ring"
    )
    model: nn.Module = LlamaForSequenceClassification(config)
    if dist.is_initialized():
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        ids = torch.randint(2, 50, (queries * passages, length))  # query and passage, on all ranks
        mask = torch.arange(length) < torch.randint(20, length, (len(ids), 1))
        batch = shard_batch({"input_ids": ids * mask, "attention_mask": mask.long()})
        with ring_forward(batch, labels=False) as inputs:
            scores = model(**inputs).logits.view(queries, passages)
            loss = F.cross_entropy(scores, torch.zeros(queries, dtype=torch.long))  # the first
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"step {step}   loss {loss.item():.6f}", flush=True)


if __name__ == "__main__":
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args()
    with torchrun_group():
        main()
