"""Balanced layouts: equally many tokens on every rank, and nearly equally many visible pairs.

With packed documents a token's work depends on its document, so no fixed pattern is even. Equal
chunks are weighed by the pairs that their queries see, and dealt out in rounds. In each round the
heaviest chunk goes to the rank with the least work so far. Under a causal mask over one document
the result is zigzag.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ring_attention_pytorch.arguments import check_least, checked, checks_of
from ring_attention_pytorch.geometry.documents import (
    Borders,
    check_cu_seqlens,
    of_borders,
)
from ring_attention_pytorch.geometry.layouts import AssignedLayout
from ring_attention_pytorch.geometry.segments import Documents, Segment, Segments

_UNEVEN = 0.02  # the slowest rank's work above the mean, as a share, that makes chunks smaller
_MOST = 32  # chunks per rank


@checked
def balanced(
    cu_seqlens: Borders, ring_size: int, *, causal: bool = True, window: int | None = None
) -> AssignedLayout:
    """Make a layout for packed documents, accepted by every `layout=` argument.

    Args:
        cu_seqlens: borders of the documents, as for `ring_attn`; with one list for each sample
            one layout balances all of them together.
        ring_size: how many ranks share the sequence.
        causal, window: the mask of the attention.

    Returns:
        The layout with the fewest chunks per rank (at most 32) whose slowest rank is at most 2 %
        above the mean in visible pairs; if there is none, the most even one found.

    Raises:
        ValueError: borders that don't ascend from 0, or a ring size below 1.

    >>> from ring_attention_pytorch import positions
    >>> layout = balanced([0, 6, 8], ring_size=2)
    >>> [positions(layout, rank=rank, ring_size=2, length=8).tolist() for rank in range(2)]
    [[0, 1, 2, 5], [3, 4, 6, 7]]
    """
    with checks_of("balanced"):
        if window is not None and window < 0:
            raise ValueError(f"window must be None or at least 0, got {window}")
        check_least(1, ring_size=ring_size)
        borders = check_cu_seqlens(cu_seqlens)
    samples = [of_borders(each) for each in borders]
    if not samples:
        raise ValueError("balanced: cu_seqlens must be one list, or one for each sample; got none")
    return deal(samples, ring_size, causal, window)


def deal(
    samples: Sequence[Documents], ring_size: int, causal: bool, window: int | None
) -> AssignedLayout:
    """Return one balanced layout for samples of equal length."""
    work = torch.stack([visible_keys(d, causal, window) for d in set(samples)]).sum(0)
    before = torch.cat((work.new_zeros(1), work.cumsum(0)))  # the work of all earlier positions
    length = len(work)
    total = int(before[-1])
    owners, least = _dealt(before, ring_size, 1)
    chunks = 2
    while least * ring_size > (1 + _UNEVEN) * total:
        if chunks > _MOST or chunks * ring_size > length:
            break
        dealt, load = _dealt(before, ring_size, chunks)
        if load < least:
            owners, least = dealt, load
        chunks *= 2
    borders = _borders(length, len(owners)).tolist()
    return AssignedLayout(tuple(_segments(owners, borders, rank) for rank in range(ring_size)))


def visible_keys(documents: Documents, causal: bool, window: int | None) -> Tensor:
    """Count the keys that each token sees, int64 `[n]`.

    >>> visible_keys(of_borders([0, 3, 5]), causal=True, window=None).tolist()
    [1, 2, 3, 1, 2]
    """
    runs = torch.tensor(documents.runs, dtype=torch.long).view(-1, 3)
    numbers, starts, stops = runs.unbind(1)
    lengths = stops - starts
    sizes = lengths.new_zeros(len(runs)).index_add(0, numbers, lengths)  # of documents
    offsets = torch.tensor(documents.offsets, dtype=torch.long)
    before = torch.arange(int(lengths.sum())) - offsets.repeat_interleave(lengths)
    after = sizes[numbers].repeat_interleave(lengths) - 1 - before
    if window is not None:
        before = before.clamp(max=window)
        after = after.clamp(max=window)
    if causal:
        return before + 1
    return before + 1 + after


def _borders(length: int, chunks: int) -> Tensor:
    """Return the borders of chunks as `torch.tensor_split` cuts: the first ones longer by one."""
    size, longer = divmod(length, chunks)
    numbers = torch.arange(chunks + 1)
    return numbers * size + numbers.clamp(max=longer)


def _dealt(before: Tensor, ring_size: int, chunks: int) -> tuple[list[int], int]:
    """Deal `chunks` chunks to each rank; return each chunk's owner and the largest work of a rank.

    In every round the heaviest chunk goes to the rank with the least work so far.
    """
    borders = _borders(len(before) - 1, chunks * ring_size)
    weights = before[borders].diff().tolist()
    if chunks == 1:  # in order, so that documents cross to neighbours only
        return list(range(ring_size)), max(weights)
    owners = [0] * len(weights)
    loads = [0] * ring_size
    heaviest_first = sorted(range(len(weights)), key=lambda chunk: -weights[chunk])
    for first in range(0, len(weights), ring_size):
        ranks = sorted(range(ring_size), key=loads.__getitem__)
        for chunk, rank in zip(heaviest_first[first : first + ring_size], ranks):
            owners[chunk] = rank
            loads[rank] += weights[chunk]
    return owners, max(loads)


def _segments(owners: list[int], borders: list[int], rank: int) -> Segments:
    """Return a rank's chunks as segments; adjacent chunks are joined."""
    segments: list[Segment] = []
    for owner, (start, stop) in zip(owners, pairwise(borders)):
        if owner != rank or start == stop:
            continue
        if segments and segments[-1].start + segments[-1].length == start:
            start = segments.pop().start
        segments.append(Segment(start, 1, stop - start))
    return tuple(segments)
