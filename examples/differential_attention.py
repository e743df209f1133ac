"""Differential attention over a ring, by two calls: what both softmaxes attend to cancels.

    torchrun --nproc-per-node 4 examples/differential_attention.py

    out = (softmax(q1 k1) - lambda softmax(q2 k2)) v

The two are softmaxes by themselves, so nothing is merged. Ye et al. 2024, "Differential
Transformer", https://arxiv.org/abs/2410.05258, equation 1; normalisation of heads and how lambda is
learned are the caller's.
"""

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attention_pytorch import ring_attn, shard_sequence
from ring_attention_pytorch.launch import torchrun_group

Pair = tuple[Tensor, Tensor]


def differential_attention(
    q: Pair, k: Pair, v: Tensor, weight: Tensor | float, **options: Any
) -> Tensor:
    """Compute it of this rank's shards: two q `[b, n, h, d]`, two k, one v `[b, n, h_kv, 2 d]`.

    `weight` is lambda; `options` are those of `ring_attn`.
    """
    first, second = (ring_attn(q[i], k[i], v, **options) for i in range(2))
    return first - weight * second


def main(length: int = 4096) -> None:
    """Compute a layer forward and backward."""
    draw = torch.Generator().manual_seed(0)
    drawn = [torch.randn(1, length, 4, d, generator=draw) for d in (32, 32, 32, 32, 64)]
    a, b, c, d, v = (shard_sequence(t, layout="zigzag").requires_grad_() for t in drawn)
    out = differential_attention((a, b), (c, d), v, 0.8, causal=True, layout="zigzag")
    out.square().sum().backward()
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"{out.shape[1]} of {length} tokens: {[*out.shape]}")


if __name__ == "__main__":
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args()
    with torchrun_group():
        main()
