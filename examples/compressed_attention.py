"""DeepSeek-V4's compressed attention (HCA) over a ring, balanced: a window and compressed entries.

    torchrun --nproc-per-node 4 examples/compressed_attention.py

Each query sees the tokens of a window, and for each earlier group of 128 tokens one entry: a
softmax over the group, for each channel. A row is key and value at once, and each head has a sink.
Open trainers gather all rows and lay the sequence out contiguously, so the last rank does most of
the work. Here the window's halo and the entries travel, in a balanced layout:

    near   ring_attn with a window, and the sink             halos travel
    far    ring_attn to entries, causal by positions         entries travel, 1 of 128 rows
    both   merge_attention                                   one softmax

An entry counts from the last token of its group on: t sees group g if g < (t + 1) // ratio.
Rotary embeddings are left to the caller: rows at their positions, entries at `ratio * g`, and the
inverse on outputs.

DeepSeek-V4 (2026), as in miles, miles_plugins/models/deepseek_v4.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attention_pytorch import merge_attention, ring_attn, shard_sequence
from ring_attention_pytorch.launch import torchrun_group


def compress(rows: Tensor, gate: Tensor, places: Tensor) -> Tensor:
    """Return an entry for each group of rows: a softmax over the group, for each channel.

    rows and gate `[b, n, 1, d]`, places `[ratio, d]` -> `[b, n / ratio, 1, d]`.
    """
    ratio = len(places)
    groups, gates = (t.unflatten(1, (-1, ratio)) for t in (rows, gate))
    return (groups * (gates + places[:, None]).softmax(2)).sum(2)


def compressed_attention(
    q: Tensor,
    rows: Tensor,
    entries: Tensor,
    sinks: Tensor,
    at: Tensor,
    window: int = 128,
    **options: Any,
) -> Tensor:
    """Compute attention of this rank's queries `[b, n, h, d]` to rows near and entries far.

    `rows` `[b, n, 1, d]` and `entries` `[b, n / ratio, 1, d]` are keys and values at once, `at`
    `[n]` the positions of this rank's tokens. A window of 128 has the query's own token in it.

    Raises:
        ValueError: a run of this rank's tokens does not begin at a multiple of the ratio.
    """
    ratio = len(at) // entries.shape[1]
    first = at[::ratio, None] + torch.arange(ratio, device=at.device)
    if (first.flatten() != at).any() or (at[::ratio] % ratio).any():
        raise ValueError(
            f"groups of {ratio} tokens must not span ranks; choose a length that is a multiple of "
            f"{ratio} times the layout's chunks"
        )
    given = dict(causal=True, return_lse=True, **options)
    near = ring_attn(q, rows, rows, window=window - 1, sinks=sinks, **given)
    ends = at[ratio - 1 :: ratio]
    far = ring_attn(
        q, entries, entries, cross=True, query_positions=at, key_positions=ends, **given
    )
    return merge_attention(*near, *far)[0]


def main(groups: int = 4, ratio: int = 128, d: int = 64) -> None:
    """Compute a layer forward and backward, with so many groups in each chunk of the layout."""
    draw, layout = torch.Generator().manual_seed(0), "zigzag"
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    length = 2 * ranks * groups * ratio
    drawn = [torch.randn(1, length, h, d, generator=draw) for h in (8, 1, 1)]
    q, rows, gate = (shard_sequence(t, layout=layout).requires_grad_() for t in drawn)
    at = shard_sequence(torch.arange(length)[None], layout=layout)[0]
    entries = compress(rows, gate, torch.zeros(ratio, d))
    sinks = torch.zeros(8, requires_grad=True)
    compressed_attention(q, rows, entries, sinks, at, layout=layout).square().sum().backward()
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"{len(at)} of {length} rows are here, and {length // ratio} entries in all")


if __name__ == "__main__":
    with torchrun_group():
        main()
