"""The layer and the model at their 0.5.20 path, and the functions of 0.5.20 that shard a batch."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ring_attention_pytorch.arguments import check_least, checked, checks_of
from ring_attention_pytorch.distributed import (
    all_gather,
    gather_as,
    get_world_size,
    split_by_rank,
)
from ring_attention_pytorch.nn.attention import RingAttention
from ring_attention_pytorch.nn.feedforward import feed_forward
from ring_attention_pytorch.nn.norm import RMSNorm
from ring_attention_pytorch.nn.reference import default_attention
from ring_attention_pytorch.nn.rotary import RingRotaryEmbedding, apply_rotary_pos_emb
from ring_attention_pytorch.nn.sharding import check_mask
from ring_attention_pytorch.nn.transformer import RingTransformer
from ring_attention_pytorch.ranks.agreement import report_to_group, typed
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.ring_flash_attention import softclamp

__all__ = [
    "FeedForward",
    "RMSNorm",
    "RingAttention",
    "RingRotaryEmbedding",
    "RingTransformer",
    "apply_rotary_pos_emb",
    "default_attention",
    "maybe_pad_seq_and_mask",
    "pad_at_dim",
    "pad_to_multiple",
    "rotate_half",
    "sharded_batch_to_sharded_seq",
    "sharded_seq_to_sharded_batch",
    "softclamp",
]

FeedForward = partial(feed_forward, mult=4)


@checked
def rotate_half(x: Tensor) -> Tensor:
    """Return x `[..., d]` with the halves (a, b) of d replaced by (-b, a); d is even.

    >>> rotate_half(torch.arange(4))
    tensor([-2, -3,  0,  1])
    """
    if x.ndim < 1 or x.shape[-1] % 2:
        raise ValueError(f"rotate_half: x must be [..., d] with an even d, got {list(x.shape)}")
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


@checked
def pad_at_dim(
    t: Tensor, pad: tuple[int, int], *, dim: int = -1, value: float | int | bool = 0.0
) -> Tensor:
    """Pad t with `value` before and after, along dim; negative numbers cut off.

    >>> pad_at_dim(torch.ones(2), (1, 2), value=5.0)
    tensor([5., 1., 1., 5., 5.])
    """
    if not -t.ndim <= dim < t.ndim:
        raise ValueError(f"pad_at_dim: t {list(t.shape)} has no dimension {dim}")
    if t.shape[dim] + sum(pad) < 0:
        raise ValueError(f"pad_at_dim: pad must leave at least 0 of {t.shape[dim]}, got {pad}")
    behind = t.ndim - 1 - dim % t.ndim
    return F.pad(t, (*(0, 0) * behind, *pad), value=value)


@checked
def pad_to_multiple(
    x: Tensor, length: int, pad_value: float | int | bool = 0
) -> tuple[Tensor, int]:
    """Pad x `[b, n, ...]` to a multiple of length; also return the number of added tokens.

    >>> pad_to_multiple(torch.ones(1, 5), 4)[1]
    3
    """
    with checks_of("pad_to_multiple"):
        if x.ndim < 2:
            raise ValueError(f"x must be [b, n, ...], got {list(x.shape)}")
        check_least(1, length=length)
    more = -x.shape[1] % length
    return pad_at_dim(x, (0, more), dim=1, value=pad_value), more


@checked
def maybe_pad_seq_and_mask(
    x: Tensor, mask: Tensor | None, seq_size: int
) -> tuple[Tensor, Tensor | None]:
    """Pad x `[b, n, ...]` with zeros to a multiple of seq_size, its mask `[b, n]` with False.

    A mask of None stays None if nothing is added, and otherwise becomes True for all tokens of x.
    """
    with checks_of("maybe_pad_seq_and_mask"):
        if x.ndim < 2 or (mask is not None and mask.shape != x.shape[:2]):
            shown = None if mask is None else list(mask.shape)
            raise ValueError(
                f"x and mask must be [b, n, ...] and [b, n], got {list(x.shape)} and {shown}"
            )
        check_least(1, seq_size=seq_size)
    x, more = pad_to_multiple(x, seq_size)
    if more == 0:
        return x, mask
    if mask is None:
        mask = torch.ones(x.shape[0], x.shape[1] - more, dtype=torch.bool, device=x.device)
    return x, pad_to_multiple(mask, seq_size, False)[0]


@typed(report_to_group("all_gather"))
def sharded_batch_to_sharded_seq(
    x: Tensor, mask: Tensor | None, seq_size: int
) -> tuple[tuple[Tensor, Tensor | None], Tensor, int]:
    """Gather all ranks' samples, and keep seq_size tokens of each sample of this rank's ring.

    `auto_shard_seq=True` instead sends each rank only the tokens that it needs.

    Args:
        x: `[b, n, ...]`, where n is seq_size times the number of ranks of a ring.
        mask: `[b, n]`.

    Returns:
        (x, mask) of this rank, every rank's b, and the number of rings. Sample i of all samples
        goes to ring i modulo that number.

    Raises:
        ValueError: tokens, ranks or samples don't divide; on every rank.
    """

    def check() -> None:
        check_least(1, seq_size=seq_size)
        if x.ndim < 2:
            raise ValueError(f"x must be [b, n, ...], got {list(x.shape)}")
        check_mask("mask", mask, x)

    (whole, sizes), world = gather_as("all_gather", x, 0, check=check), get_world_size()
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


@typed(report_to_group("all_gather"))
def sharded_seq_to_sharded_batch(
    logits: Tensor, sizes: Tensor, num_sharded_batches: int = 1
) -> Tensor:
    """Undo `sharded_batch_to_sharded_seq`: gather `[b, n, c]`; return this rank's whole samples."""
    world = get_world_size()

    def check() -> None:
        if num_sharded_batches < 1 or world % num_sharded_batches:
            raise ValueError(
                f"num_sharded_batches must divide {world} ranks, got {num_sharded_batches}"
            )
        if logits.ndim < 2 or sizes.shape != (world,) or sizes.is_floating_point():
            raise ValueError(
                f"it needs logits [b, n, ...] and sizes, an int for each of {world} ranks, got "
                f"{list(logits.shape)} and {sizes.dtype} {list(sizes.shape)}"
            )
        if int(sizes.sum()) != len(logits) * num_sharded_batches:
            raise ValueError(
                f"sizes must be of {len(logits)} samples in each of {num_sharded_batches} rings, "
                f"got {sizes.tolist()}"
            )

    parts = list(gather_as("all_gather", logits.unsqueeze(0), 0, check=check)[0])
    size = len(parts) // num_sharded_batches
    rings = [torch.cat(parts[first : first + size], 1) for first in range(0, len(parts), size)]
    whole = torch.stack(rings, 1).flatten(0, 1)
    samples = whole.split(sizes.tolist())
    return split_by_rank(samples)[0]
