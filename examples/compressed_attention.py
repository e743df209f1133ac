"""DeepSeek-V4's compressed attention over a ring, balanced: a window and compressed entries.

    torchrun --nproc-per-node 4 examples/compressed_attention.py

Each query sees the tokens of a window, and entries of the groups of tokens before it. A row is key
and value at once, and each head has a sink. There are two kinds of layers:

    HCA    an entry for 128 tokens: a softmax over the group, for each channel
    CSA    an entry for 4 tokens: a softmax over the group and the one before it. At first each
           query sees all earlier entries (the dense phase), later the best by an indexer

Open trainers gather all rows and lay the sequence out contiguously, so the last rank does most of
the work. Here the window's halo and the entries travel, in a balanced layout:

    near   ring_attn with a window, and the sink             halos travel
    far    ring_attn to entries, causal by positions         entries travel
    both   merge_attention                                   one softmax

An entry counts from the last token of its group on: t sees group g if g < (t + 1) // ratio. Entries
that overlap need the group before a run of tokens, which travels, too. The indexer's choice is
`top_keys`: scores stay where their entries are, and only candidates travel.

Norms and rotary embeddings are left to the caller: rows at their positions, entries at
`ratio * g`, and the inverse on outputs.

DeepSeek-V4 (2026), as in miles, miles_plugins/models/deepseek_v4.
"""

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attention_pytorch import (
    merge_attention,
    ring_attn,
    shard_sequence,
    top_keys,
    unshard_sequence,
)
from ring_attention_pytorch.launch import torchrun_group


def check_groups(at: Tensor, ratio: int) -> None:
    """Raise ValueError unless tokens at these positions are whole groups."""
    whole = at[::ratio, None] + torch.arange(ratio, device=at.device)
    if not torch.equal(whole.flatten(), at) or (at[::ratio] % ratio).any():
        raise ValueError(
            f"groups of {ratio} tokens must not span ranks; choose a length that is a multiple of "
            f"{ratio} times the layout's chunks"
        )


def compress(rows: Tensor, gate: Tensor, places: Tensor) -> Tensor:
    """Return an entry for each group of rows: a softmax over the group, for each channel.

    rows and gate `[b, n, 1, d]`, places `[ratio, d]` -> `[b, n / ratio, 1, d]`.
    """
    ratio = len(places)
    groups, gates = (t.unflatten(1, (-1, ratio)) for t in (rows, gate))
    return (groups * (gates + places[:, None]).softmax(2)).sum(2)


def compress_overlapping(
    rows: Tensor,
    gate: Tensor,
    places: Tensor,
    at: Tensor,
    length: int,
    layout: str = "contiguous",
    group: Any = None,
) -> Tensor:
    """Return an entry for each group of rows: a softmax over it and the group before it.

    rows and gate `[b, n, 1, 2 d]`, places `[ratio, 2 d]` -> `[b, n / ratio, 1, d]`. The first half
    of the channels is for the next group's entry, the second for the group's own. `at` are the
    positions of this rank's tokens, of a sequence of `length`.

    Raises:
        ValueError: groups span ranks, or chunks of the layout are of different lengths.
    """
    ratio, d = len(places), rows.shape[-1] // 2
    check_groups(at, ratio)
    chunk = len(at) // (2 if layout == "zigzag" else 1)
    if (at[::chunk] % chunk).any():
        raise ValueError(f"chunks must be of one length, got positions {at[::chunk].tolist()}")
    gates = gate.unflatten(1, (-1, ratio)) + places[:, None]
    groups = torch.cat((rows.unflatten(1, (-1, ratio)), gates), -1).unflatten(
        1, (-1, chunk // ratio)
    )
    # [b, chunk, group, token, 1, 4 d]; the last group of each chunk travels
    ends = unshard_sequence(groups[:, :, -1], length=length // chunk, layout=layout, group=group)
    nothing = torch.zeros_like(ends[:, :1]).index_fill(
        -1, torch.arange(2 * d, 4 * d, device=rows.device), -torch.inf
    )
    first = torch.cat((nothing, ends), 1)[:, at[::chunk] // chunk]
    before = torch.cat((first[:, :, None], groups[:, :, :-1]), 2)
    values = torch.cat((before[..., :d], groups[..., d : 2 * d]), 3)
    logits = torch.cat((before[..., 2 * d : 3 * d], groups[..., 3 * d :]), 3)
    return (values * logits.softmax(3)).sum(3).flatten(1, 2)


def best_entries(
    index_q: Tensor,
    weights: Tensor,
    index_keys: Tensor,
    at: Tensor,
    length: int,
    k: int,
    layout: str = "contiguous",
    group: Any = None,
) -> Tensor:
    """Return which entries each token of the sequence sees, the k best: bool `[b, length, groups]`.

    index_q `[b, n, h, d]`, weights `[b, n, h]` and index_keys `[b, n / ratio, d]`, this rank's. A
    score is the sum over heads of weight * relu(q . key); the choice has no gradient. All ranks get
    all tokens' choices, of which each uses its own.
    """
    ratio = len(at) // index_keys.shape[1]
    where: dict[str, Any] = dict(length=length, layout=layout, group=group)
    with torch.no_grad():
        q, w = unshard_sequence(index_q, **where), unshard_sequence(weights, **where)
        scores = torch.einsum("bthd,bgd->bthg", q, index_keys).relu()
        scores = torch.einsum("bthg,bth->btg", scores, w)
        ends = at[ratio - 1 :: ratio]
        unseen = torch.arange(length, device=at.device)[:, None] < ends
        _, best = top_keys(scores.masked_fill(unseen, -torch.inf), ends // ratio, k, group=group)
    number = length // ratio
    seen = torch.zeros(*best.shape[:2], number + 1, dtype=torch.bool, device=at.device)
    return seen.scatter_(-1, best % (number + 1), True)[..., :-1]  # none is -1: the last one


def compressed_attention(
    q: Tensor,
    rows: Tensor,
    entries: Tensor,
    sinks: Tensor,
    at: Tensor,
    window: int = 128,
    seen: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Compute attention of this rank's queries `[b, n, h, d]` to rows near and entries far.

    `rows` `[b, n, 1, d]` and `entries` `[b, n / ratio, 1, d]` are keys and values at once, `at`
    `[n]` the positions of this rank's tokens. A window of 128 has the query's own token in it.
    `seen`, from `best_entries`, leaves each query its best entries.

    Raises:
        ValueError: a run of this rank's tokens does not begin at a multiple of the ratio.
    """
    ratio = len(at) // entries.shape[1]
    check_groups(at, ratio)
    given = dict(causal=True, return_lse=True, **options)
    near = ring_attn(q, rows, rows, window=window - 1, sinks=sinks, **given)
    ends = at[ratio - 1 :: ratio]
    if seen is not None:
        given["mask_mod"] = lambda sample, head, i, j: seen[sample, i, j // ratio]
    far = ring_attn(
        q, entries, entries, cross=True, query_positions=at, key_positions=ends, **given
    )
    return merge_attention(*near, *far)[0]


def main(groups: int = 4, ratio: int = 128, d: int = 64, overlapping: int = 4, k: int = 16) -> None:
    """Compute a layer of each kind forward and backward, with so many groups in each chunk."""
    draw, layout = torch.Generator().manual_seed(0), "zigzag"
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    length = 2 * ranks * groups * ratio
    shapes = [(8, d), (1, d), (1, d), (1, 2 * d), (1, 2 * d), (4, 16), (1, 16), (1, 4)]
    drawn = [torch.randn(1, length, *shape, generator=draw) for shape in shapes]
    q, rows, gate, wide, wide_gate, *index = (
        shard_sequence(t, layout=layout).requires_grad_() for t in drawn
    )
    at = shard_sequence(torch.arange(length)[None], layout=layout)[0]
    sinks = torch.zeros(8, requires_grad=True)
    entries = compress(rows, gate, torch.zeros(ratio, d))
    compressed_attention(q, rows, entries, sinks, at, layout=layout).square().sum().backward()
    places = torch.zeros(overlapping, 2 * d)
    small = compress_overlapping(wide, wide_gate, places, at, length, layout)
    keys = index[1][:, ::overlapping, 0]  # of an indexer, which compresses by itself
    seen = best_entries(index[0], index[2][:, :, 0], keys, at, length, k, layout)
    for chosen in (None, seen):  # the dense phase, and the later one
        out = compressed_attention(q, rows, small, sinks, at, seen=chosen, layout=layout)
        out.square().sum().backward(retain_graph=chosen is None)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"{len(at)} of {length} rows are here, and {length // ratio} entries in all")
        print(f"{length // overlapping} overlapping ones, of which a query reads at most {k}")


if __name__ == "__main__":
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args()
    with torchrun_group():
        main()
