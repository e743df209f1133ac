"""Make masks that hide much of a sequence: packed documents and sliding windows."""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.lib.rings import Hidden
from ring_attention_pytorch import balanced
from ring_attention_pytorch.geometry.balance import visible_keys
from ring_attention_pytorch.geometry.documents import of_borders
from ring_attention_pytorch.geometry.layouts import Layout

KINDS: dict[str, Callable[[random.Random, int, bool], int]] = {
    "log-normal around 4k": lambda draw, total, first: max(1, int(draw.lognormvariate(8.3, 1))),
    "one long, many short": lambda draw, total, first: (
        total // 2 if first else draw.randint(1, 999)
    ),
    "of 1 to 999 tokens": lambda draw, total, first: draw.randint(1, 999),
    "of 1 to 60 tokens": lambda draw, total, first: draw.randint(1, 60),
}


class Mask(NamedTuple):
    """Say what is shown, how the sequence is laid out, and how a plan is told of it."""

    layout: Layout
    options: dict[str, Any]
    hidden: Hidden
    pairs: int  # visible, of all ranks


def borders(kind: str, total: int, draw: random.Random) -> list[int]:
    """Draw where documents of a kind begin, and the end of the last.

    >>> borders("of 1 to 60 tokens", 100, random.Random(0))
    [0, 55, 80, 100]
    """
    found = [0]
    while found[-1] < total:
        found.append(min(total, found[-1] + KINDS[kind](draw, total, len(found) == 1)))
    return found


def whole(length: int) -> Mask:
    """Make the causal mask."""
    return Mask("zigzag", {}, torch.lt, length * (length + 1) // 2)


def window(length: int, size: int, layout: Layout) -> Mask:
    """Make a causal mask that shows `size` tokens before each."""

    def hidden(rows: Tensor, cols: Tensor) -> Tensor:
        return (cols > rows) | (cols < rows - size)

    pairs = int(visible_keys(of_borders([0, length]), True, size).sum())
    return Mask(layout, dict(window=size), hidden, pairs)


def packed(kind: str, length: int, ranks: int) -> Mask:
    """Make the causal mask of documents of a kind, dealt evenly to the ranks."""
    cut = borders(kind, length, random.Random(0))
    document = torch.bucketize(torch.arange(length), torch.tensor(cut[1:]), right=True)

    def hidden(rows: Tensor, cols: Tensor) -> Tensor:
        return (cols > rows) | (document[cols] != document[rows])

    pairs = int(visible_keys(of_borders(cut), True, None).sum())
    return Mask(balanced(cut, ranks), dict(cu_seqlens=cut), hidden, pairs)
