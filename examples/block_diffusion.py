"""Block diffusion over a ring: noisy blocks, clean keys, and only clean keys travel.

    torchrun --nproc-per-node 4 examples/block_diffusion.py

A sequence is cut into blocks. A noisy block sees itself and the clean blocks before it; a clean
block sees itself and those before it. Trainers compute this as one sequence of twice the length,
with a mask, and send noisy keys as well. Here it is two calls and a merge:

    noisy queries to noisy keys     a block is a document: nothing travels unless it spans ranks
    both queries to clean keys      causal by positions: a noisy query stands before its block, a
                                    clean one at its end; clean keys travel once

Arriola et al. 2025, "Block Diffusion", https://arxiv.org/abs/2503.09573, section 3.1 and the masks
of its appendix; "Block Parallelism" (2026), arXiv 2609.19242, sends clean keys only.
"""

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attention_pytorch import (
    RingPlan,
    explain_plan,
    merge_attention,
    ring_attn,
    shard_sequence,
)
from ring_attention_pytorch.launch import torchrun_group

QKV = tuple[Tensor, Tensor, Tensor]


def block_diffusion(
    noisy: QKV, clean: QKV, block: int, length: int, **options: Any
) -> tuple[Tensor, Tensor]:
    """Compute attention of this rank's noisy and of its clean tokens.

    `noisy` and `clean` are q, k, v of the same tokens, `[b, n, h, d]`; `length` is the sequence's.
    `options` are those of `ring_attn`, such as group and layout.
    """
    at, n = held(length, **options), noisy[0].shape[1]
    borders = [*range(0, length, block), length]
    own = ring_attn(*noisy, cu_seqlens=borders, return_lse=True, **options)
    first = at // block * block
    how: dict[str, Any] = dict(causal=True, cross=True, return_lse=True, **options)
    how |= dict(query_positions=torch.cat((first - 1, first + block - 1)), key_positions=at)
    out, lse = ring_attn(torch.cat((noisy[0], clean[0]), 1), *clean[1:], **how)
    return merge_attention(*own, out[:, :n], lse[..., :n])[0], out[:, n:]


def block_causal(
    q: Tensor, k: Tensor, v: Tensor, block: int, length: int, prefix: int = 0, **options: Any
) -> Tensor:
    """Compute attention in which a token sees its own block, earlier ones, and all of the prefix.

    Also the mask of video in chunks (MAGI-1), and of a prefix-LM over blocks.
    """
    at = held(length, **options)
    last = (at // block * block + block - 1).clamp(min=prefix - 1)
    how: dict[str, Any] = dict(causal=True, cross=True, query_positions=last, key_positions=at)
    return ring_attn(q, k, v, **how, **options)


def held(length: int, layout: Any = "contiguous", group: Any = None, **_: Any) -> Tensor:
    """Return the positions of this rank's tokens."""
    return shard_sequence(torch.arange(length)[None], layout=layout, group=group)[0]


def main(length: int = 8192, block: int = 32) -> None:
    """Compute a layer forward and backward, and print what travels."""
    draw = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, length, 4, 32, generator=draw) for _ in range(6)]
    q, k, v, *clean = (shard_sequence(t, layout="zigzag").requires_grad_() for t in whole)
    outs = block_diffusion(
        (q, k, v), (clean[0], clean[1], clean[2]), block, length, layout="zigzag"
    )
    torch.cat(outs).square().sum().backward()
    at = held(length, layout="zigzag")
    first = at // block * block
    stand = torch.cat((first - 1, first + block - 1))
    how: dict[str, Any] = dict(causal=True, cross=True, key_positions=at, query_positions=stand)
    clean_keys = RingPlan.make(torch.cat((q, clean[0]), 1), *clean[1:], **how)
    both = [torch.cat((t, t), 1) for t in (q, k, v)]
    naive = RingPlan.make(*both, cross=True)  # of both sequences, by a mask
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"{len(at)} of {length} tokens, in blocks of {block}; to this rank travel")
        for name, plan in {"clean keys": clean_keys, "all keys, masked": naive}.items():
            received = [line for line in explain_plan(plan).splitlines() if "received" in line]
            print(f"  {name}: {received[0] if received else 'nothing, of one rank'}")


if __name__ == "__main__":
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args()
    with torchrun_group():
        main()
