"""Zigzag attention of 0.5.20: two chunks of queries per rank, and gathered keys of all ranks."""

from collections import namedtuple
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ring_attention_pytorch.arguments import checked, checks_of
from ring_attention_pytorch.distributed import (
    gather_as,
    get_world_size,
    split_by_rank,
)
from ring_attention_pytorch.geometry.layouts import positions
from ring_attention_pytorch.nn.sharding import shard_sequence, unshard_sequence
from ring_attention_pytorch.plan.checks import autocast_dtype
from ring_attention_pytorch.ranks.agreement import agree, error_of, report_to_group, typed
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime.dropout import check_dropout

ShardOutput = namedtuple(
    "ShardOutput", ["local_sequence", "query_positions", "key_value_positions"]
)


@checked
def zig_zag_pad_seq(t: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Pad t `[..., n, d]` with zeros until n is a multiple of 2 * ranks; also return the inverse.

    `zig_zag_shard` takes any length, so this is not needed.

    >>> padded, remove_padding = zig_zag_pad_seq(torch.ones(1, 3, 2))
    >>> padded.shape, remove_padding(padded).shape
    (torch.Size([1, 4, 2]), torch.Size([1, 3, 2]))
    """
    with checks_of("zig_zag_pad_seq"):
        _check_tokens(t)
    n = t.shape[-2]
    missing = -n % (2 * get_world_size())
    padded = F.pad(t, (0, 0, 0, missing))
    return padded, lambda out: out[..., :n, :]


@typed(report_to_group("all_gather", agreed=("all_gather_batch", True)))
def zig_zag_shard(
    t: Tensor, all_gather_batch: bool = False
) -> tuple[ShardOutput, Callable[[Tensor], Tensor]]:
    """Return this rank's two chunks of each sequence, by `layout="zigzag"`, and the inverse.

    Args:
        t: `[b, n, d]`, whole sequences of any length, the same on every rank.
        all_gather_batch: every rank passes its own sequences, all of one length. Each rank gets its
            chunks of all of them, and `inverse` returns a rank's own sequences.

    Returns:
        (local_sequence, query_positions, key_value_positions) and inverse. query_positions are of
        the local tokens, key_value_positions of all ranks' tokens in the order in which
        `zig_zag_attn` gathers them. `inverse` joins every rank's `[b, local n, d]` to whole
        sequences, on every rank. Without all_gather_batch all ranks have the same result, so each
        rank's loss counts: average gradients over ranks, as DDP does, to get one loss's gradients.

    Raises:
        ValueError: an argument differs between ranks; on every rank.

    >>> shard, inverse = zig_zag_shard(torch.arange(3.0).view(1, 3, 1))
    >>> shard.query_positions.tolist(), inverse(shard.local_sequence).flatten().tolist()
    ([0, 1, 2], [0.0, 1.0, 2.0])
    """
    error = error_of(partial(_check_tokens, t))
    sizes = None
    if all_gather_batch:
        t, sizes = gather_as("all_gather", t, 0, check=error)
    elif error is not None:
        raise ValueError(f"zig_zag_shard: {error}")
    ring, n = Ring(), t.shape[-2]
    by_rank = []
    for rank in range(ring.size):
        held = positions("zigzag", rank=rank, ring_size=ring.size, length=n)
        by_rank.append(held.to(t.device))
    local = shard_sequence(t, dim=-2, layout="zigzag", group=ring)

    def inverse(local: Tensor) -> Tensor:
        whole = unshard_sequence(local, length=n, dim=-2, layout="zigzag", group=ring)
        if sizes is None:
            return whole
        samples = whole.split(sizes.tolist())
        return split_by_rank(samples)[0]

    return ShardOutput(local, by_rank[ring.rank], torch.cat(by_rank)), inverse


@typed(report_to_group("zig_zag_attn"))
def zig_zag_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout: float | int = 0.0,
    attn_mask: Tensor | None = None,
) -> Tensor:
    """Compute attention of this rank's queries to all ranks' keys, gathered, by PyTorch's SDPA.

    Heads come before tokens. `ring_attn(layout="zigzag")` needs no N by N / P masks for it.

    Args:
        q: `[b, h, n, d]`, this rank's queries.
        k, v: `[b, h_kv, m, d]` and `[b, h_kv, m, d_v]` of this rank; query head i uses key head
            i // (h / h_kv).
        dropout: the share of probabilities that is dropped; each rank draws its own.
        attn_mask: `[n, all m]`, keys in rank order: bool, True where a key is seen, or numbers
            that are added to scores; broadcasts to `[b, h, n, all m]`. None shows all.

    Returns:
        `[b, h, n, d_v]`. Gradients of k and v are summed over all ranks.

    Raises:
        ValueError: an argument is invalid, or differs between ranks; on every rank.

    >>> q, k = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
    >>> zig_zag_attn(q, k, k, attn_mask=torch.ones(3, 3).tril().bool()).shape
    torch.Size([1, 4, 3, 8])
    """
    caller = "zig_zag_attn"

    def check_own() -> None:
        _check_shapes(q, k, v)
        check_dropout(dropout, None)

    def check_mask() -> None:
        if attn_mask is not None:
            want, shape = [*q.shape[:3], int(sizes.sum())], list(attn_mask.shape)
            fits = all(n in (1, m) for n, m in zip(shape[::-1], want[::-1]))
            if not 2 <= len(shape) <= 4 or not fits:
                raise ValueError(
                    f"attn_mask must be {want[2:]}, keys of all ranks, or broadcast to {want}, "
                    f"got {shape}"
                )
            if attn_mask.dtype not in (torch.bool, torch.float32, q.dtype):
                raise ValueError(f"attn_mask must be bool or {q.dtype}, got {attn_mask.dtype}")

    error = error_of(check_own)
    both, sizes = gather_as(caller, k if error else torch.cat((k, v), -1), -2, check=error)
    agree(Ring(), caller, {}, check=check_mask)
    queries_per_key = q.shape[1] // k.shape[1]
    both = both.repeat_interleave(queries_per_key, 1)
    k, v = both.split((k.shape[3], v.shape[3]), -1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask, dropout)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError if shapes or dtypes of q, k and v, heads first, don't fit one another."""
    alike = autocast_dtype(q) == autocast_dtype(k) and k.dtype == v.dtype
    alike = alike and k.shape[:3] == v.shape[:3]
    if q.ndim == k.ndim == v.ndim == 4 and alike:
        b, h, _, d = q.shape
        if k.shape[1] > 0 and h % k.shape[1] == 0 and (k.shape[0], k.shape[3]) == (b, d):
            return
    raise ValueError(
        "it needs q [b, h, n, d], k [b, h_kv, m, d], v [b, h_kv, m, d_v] with h a multiple of "
        f"h_kv, of one dtype, got {[(list(t.shape), str(t.dtype)) for t in (q, k, v)]}"
    )


def _check_tokens(t: Tensor) -> None:
    """Raise ValueError unless t is `[..., n, d]`."""
    if t.ndim < 2:
        raise ValueError(f"t must be [..., n, d], got {list(t.shape)}")
