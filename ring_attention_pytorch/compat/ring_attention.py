"""The layer and the model at their path of 0.5.20, and its functions that shard a batch."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ring_attention_pytorch.comm.ring import Ring
from ring_attention_pytorch.distributed import (
    all_gather,
    all_gather_same_dim,
    get_world_size,
    split_by_rank,
)
from ring_attention_pytorch.nn.attention import RingAttention
from ring_attention_pytorch.nn.norm import RMSNorm
from ring_attention_pytorch.nn.reference import default_attention
from ring_attention_pytorch.nn.rotary import RingRotaryEmbedding, apply_rotary_pos_emb
from ring_attention_pytorch.nn.transformer import RingTransformer, feed_forward

__all__ = [
    "FeedForward",
    "RMSNorm",
    "RingAttention",
    "RingRotaryEmbedding",
    "RingTransformer",
    "apply_rotary_pos_emb",
    "default_attention",
    "maybe_pad_seq_and_mask",
    "sharded_batch_to_sharded_seq",
    "sharded_seq_to_sharded_batch",
]

FeedForward = partial(feed_forward, mult=4)


def maybe_pad_seq_and_mask(
    x: Tensor, mask: Tensor | None, seq_size: int
) -> tuple[Tensor, Tensor | None]:
    """Fill x `[b, n, ...]` with zeros to a multiple of seq_size, its mask `[b, n]` with False.

    If there is nothing to fill, the mask is returned as it is; else a mask None becomes True for
    all tokens of x.
    """
    more = -x.shape[1] % seq_size
    if more == 0:
        return x, mask
    if mask is None:
        mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    none_after = (0, 0) * (x.ndim - 2)
    return F.pad(x, (*none_after, 0, more)), F.pad(mask, (0, more))


def sharded_batch_to_sharded_seq(
    x: Tensor, mask: Tensor | None, seq_size: int
) -> tuple[tuple[Tensor, Tensor | None], Tensor, int]:
    """Gather all ranks' samples, and keep seq_size tokens of each sample of this rank's ring.

    `auto_shard_seq=True` sends ranks only what they need.

    Args:
        x: `[b, n, ...]`, where n is seq_size times the number of ranks of a ring.
        mask: `[b, n]`.

    Returns:
        (x, mask) of this rank, every rank's b, and the number of rings. Sample i of all goes to
        ring i modulo this number.

    Raises:
        ValueError: tokens, ranks or samples don't divide; on every rank.
    """
    (whole, sizes), world = all_gather(x), get_world_size()
    size, rest = divmod(x.shape[1], seq_size)
    rings = world // max(1, size)
    if rest or rings * size != world or len(whole) % rings:
        raise ValueError(
            f"tokens must be seq_size times a divisor of {world} ranks, and the number of rings "
            f"divide all samples, got {x.shape[1]} tokens, {seq_size=}, {len(whole)} samples"
        )
    ring = Ring(None, size)
    here = slice(ring.rank * seq_size, (ring.rank + 1) * seq_size)
    samples = slice(ring.first // size, None, rings)
    if mask is not None:
        mask = all_gather(mask)[0][samples, here]
    return (whole[samples, here], mask), sizes, rings


def sharded_seq_to_sharded_batch(
    logits: Tensor, sizes: Tensor, num_sharded_batches: int = 1
) -> Tensor:
    """Undo `sharded_batch_to_sharded_seq`: gather `[b, n, c]`, keep this rank's samples, whole."""
    parts = all_gather_same_dim(logits)
    size = len(parts) // num_sharded_batches
    rings = [torch.cat(parts[first : first + size], 1) for first in range(0, len(parts), size)]
    whole = torch.stack(rings, 1).flatten(0, 1)
    samples = whole.split(sizes.tolist())
    return split_by_rank(samples)[0]
