"""Make masks that hide much of a sequence: packed documents and sliding windows."""

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.lib.rings import Hidden
from ring_attention_pytorch import balanced
from ring_attention_pytorch.geometry.balance import visible_keys
from ring_attention_pytorch.geometry.documents import of_borders
from ring_attention_pytorch.geometry.layouts import Layout

# of 10,000 documents in the data of MagiAttention's benchmark, how many have these lengths: the
# middles of what its repository counts (exps/dist_attn/benchmark/datasets/default, at 2c64135)
COUNTED = {
    5: 22, 30: 291, 75: 520, 150: 1023, 350: 2819, 762: 2464, 1536: 1565, 3072: 734, 6144: 305,
    12288: 129, 24576: 85, 49152: 14, 98304: 17, 163840: 14,
}  # fmt: skip


def piece(counted: dict[int, int], draw: random.Random, longest: int) -> int:
    """Draw a length among documents of which longer ones are cut; each of their pieces counts.

    >>> [piece({10: 1, 25: 1}, random.Random(seed), 20) for seed in range(8)]
    [5, 20, 5, 20, 20, 10, 5, 20]
    """
    pieces = [(longest, times * (length // longest)) for length, times in counted.items()]
    pieces += [(length % longest, times) for length, times in counted.items() if length % longest]
    lengths, weights = zip(*pieces)
    return draw.choices(lengths, weights)[0]


KINDS: dict[str, Callable[[random.Random, int, bool], int]] = {
    "log-normal around 4k": lambda draw, total, first: max(1, int(draw.lognormvariate(8.3, 1))),
    "one long, many short": lambda draw, total, first: (
        total // 2 if first else draw.randint(1, 999)
    ),
    "of 1 to 999 tokens": lambda draw, total, first: draw.randint(1, 999),
    "as MagiAttention counts them": lambda draw, total, first: piece(
        COUNTED, draw, max(1, total // 4)
    ),
    "of 1 to 60 tokens": lambda draw, total, first: draw.randint(1, 60),
    "two, one of 84 %": lambda draw, total, first: 27 * total // 32 if first else total,
}


class Mask(NamedTuple):
    """Say what is shown, how the sequence is laid out, and how a plan is told of it."""

    layout: Layout
    options: dict[str, Any]
    hidden: Hidden | None
    pairs: int  # visible, of all ranks


def borders(kind: str, total: int, draw: random.Random, multiple: int = 1) -> list[int]:
    """Draw where documents of a kind begin, and the end of the last.

    Lengths are rounded down to a multiple, or up to the first; `total` must be one.

    >>> borders("of 1 to 60 tokens", 100, random.Random(0))
    [0, 55, 80, 100]
    >>> borders("of 1 to 60 tokens", 96, random.Random(0), multiple=8)
    [0, 48, 72, 96]
    """
    found = [0]
    while found[-1] < total:
        length = KINDS[kind](draw, total, len(found) == 1) // multiple * multiple
        found.append(min(total, found[-1] + max(multiple, length)))
    return found


def whole(length: int) -> Mask:
    """Make the causal mask."""
    return Mask("zigzag", {}, torch.lt, length * (length + 1) // 2)


def open_everywhere(length: int) -> Mask:
    """Make a mask that hides nothing."""
    return Mask("contiguous", {}, None, length * length)


def of_all(length: int, causal: bool) -> Mask:
    """Make the mask of one sequence."""
    return whole(length) if causal else open_everywhere(length)


def window(length: int, size: int, layout: Layout) -> Mask:
    """Make a causal mask that shows `size` tokens before each."""

    def hidden(rows: Tensor, cols: Tensor) -> Tensor:
        return (cols > rows) | (cols < rows - size)

    pairs = int(visible_keys(of_borders([0, length]), True, size).sum())
    return Mask(layout, dict(window=size), hidden, pairs)


def squares(cut: Sequence[int]) -> int:
    """Sum the squares of the lengths of documents.

    >>> squares([0, 2, 5])
    13
    """
    return sum((stop - start) ** 2 for start, stop in pairwise(cut))


def packed(kind: str, length: int, ranks: int, packs: int = 1, multiple: int = 1) -> Mask:
    """Make the causal mask of documents of a kind, dealt evenly to the ranks.

    So many packs are drawn. The one that shows the median number of pairs is taken.
    """
    drawn = (borders(kind, length, random.Random(seed), multiple) for seed in range(packs))
    return of_documents(sorted(drawn, key=squares)[packs // 2], ranks)


def of_documents(cut: Sequence[int], ranks: int) -> Mask:
    """Make the causal mask of documents with these borders, dealt evenly to the ranks."""
    length = cut[-1]
    document = torch.bucketize(torch.arange(length), torch.tensor(cut[1:]), right=True)

    def hidden(rows: Tensor, cols: Tensor) -> Tensor:
        return (cols > rows) | (document[cols] != document[rows])

    pairs = int(visible_keys(of_borders(cut), True, None).sum())
    return Mask(balanced(cut, ranks), dict(cu_seqlens=[*cut]), hidden, pairs)
