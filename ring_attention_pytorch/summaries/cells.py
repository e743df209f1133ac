"""Cells: which tokens a query sees exactly, which by summaries, and each rank's share; ints only.

Every document is cut into *cells* of `stride` tokens. A cell has one summary, made of the `block`
tokens up to the cell's end. A query sees either the cell's tokens or its summary:

    cells      |  0   |  1   |  2   |  3   |  4   |       stride 6, window 9
    query 25                      ........|.?             9 before it: 16 to 25
    exactly                |******|******|**|             from cell 2's first token, 12
    in summary |  S   |  S   |                            cells before that one

A *row* is the `stride` queries whose windows end in one cell. They all see the same summaries: row
i sees cells 0 to i - 1, which is a causal mask of rows and cells.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_attention_pytorch.geometry.documents import BatchDocuments
from ring_attention_pytorch.geometry.segments import Documents, Run

_APART = 2**32  # more than a document has cells


class Cells(NamedTuple):
    """The rule that decides which tokens are near and which are far, in tokens of a document.

    >>> rule = Cells(window=9, stride=6, block=6)
    >>> rule.row(25) * rule.stride  # the first token that query 25 sees exactly
    12
    >>> rule.count(26)  # summaries that a document of 26 tokens needs
    2
    """

    window: int
    stride: int
    block: int
    distance: int | None = None
    select: int = 0  # cells before the window that a query group also reads exactly

    @property
    def span(self) -> int | None:
        """Most summaries that a query sees; None is no bound."""
        return None if self.distance is None else (self.distance - self.window) // self.stride

    def row(self, t: Any) -> Any:
        """Return the row of query t, which is the cell where its window ends; int or tensor."""
        return (t - self.window) // self.stride

    def count(self, length: int) -> int:
        """Return how many summaries are seen at all in a document of `length` tokens."""
        return max(0, self.row(length - 1)) if length and self.span != 0 else 0

    def check(self) -> None:
        """Raise ValueError if sizes are out of range or don't fit one another."""
        window, stride, block, distance, select = self
        if select < 0:
            raise ValueError(f"select must be at least 0, got {select}")
        if window < 0 or stride < 1:
            raise ValueError(
                f"window must be at least 0 and stride at least 1, got {window} and {stride}"
            )
        if block < stride:
            raise ValueError(
                f"block must be at least stride={stride}, got {block}: tokens between two blocks "
                "would be in no summary"
            )
        if distance is not None and (distance < window or (distance - window) % stride):
            raise ValueError(
                f"distance must be window={window} and a multiple of stride={stride} more, so that "
                f"it ends where a summary does, got {distance}"
            )


class Places(NamedTuple):
    """Place of each token in its document, `tokens` `[batch, tokens, 4]`, and numbers of cells.

    The four numbers: position in the document; the document's first cell, number of cells, index.

    Cells are numbered across all documents of all samples; `borders` are the first cell of each
    document that has any, and the end.
    """

    tokens: Tensor
    borders: list[int]

    @classmethod
    def of(cls, rule: Cells, packing: BatchDocuments | None, batch: int, length: int) -> "Places":
        """Number the cells of these documents.

        >>> Places.of(Cells(0, 2, 2), None, batch=2, length=6).borders
        [0, 2, 4]
        """
        whole = Documents((Run(0, 0, length),))
        borders, samples, number = [0], [], 0
        position = torch.arange(length)
        for documents in packing or (whole,) * batch:
            lengths: dict[int, int] = {}
            for document, start, stop in documents.runs:
                lengths[document] = lengths.get(document, 0) + stop - start
            cells = {}
            for document, tokens in lengths.items():
                cells[document] = borders[-1], rule.count(tokens), number
                number += 1
                if cells[document][1]:
                    borders.append(borders[-1] + cells[document][1])
            sizes = torch.tensor([run.stop - run.start for run in documents.runs], dtype=torch.long)
            of_runs = [
                (o, *cells[run.document]) for run, o in zip(documents.runs, documents.offsets)
            ]
            of_tokens = torch.tensor(of_runs, dtype=torch.long).view(-1, 4)
            of_tokens = of_tokens.repeat_interleave(sizes, dim=0)
            of_tokens[:, 0] = position - of_tokens[:, 0]
            samples.append(of_tokens)
        return cls(torch.stack(samples) if samples else torch.empty(0, length, 4).long(), borders)

    def held(self, positions: Tensor) -> Tensor:
        """Return the rows of `tokens` at these positions: `[batch * n, 4]`."""
        return self.tokens[:, positions].flatten(0, 1)

    def ends(self, stride: int) -> tuple[Tensor, Tensor]:
        """Return the position of each cell's last token, in the sequence and in its document."""
        t, first, cells, _ = self.tokens.unbind(-1)
        at = ((t + 1) % stride == 0) & (t // stride < cells)
        sequence, document = torch.empty(2, self.borders[-1], dtype=torch.long)
        cell = (first + t // stride)[at]
        sequence[cell] = torch.arange(t.shape[1]).expand_as(t)[at]
        document[cell] = t[at]
        return sequence, document


class Grouped(NamedTuple):
    """Items by group: `groups` ascend; item `items[x]` is in row `rows[x]` at `slots[x]`."""

    groups: Tensor
    items: Tensor
    rows: Tensor
    slots: Tensor
    width: int

    @classmethod
    def by(cls, numbers: Tensor) -> "Grouped":
        """Group items by their numbers; within a group they keep their order.

        >>> Grouped.by(torch.tensor([7, 5, 7])).items.tolist()
        [1, 0, 2]
        """
        order = numbers.argsort(stable=True)
        groups, counts = torch.unique_consecutive(numbers[order], return_counts=True)
        rows = torch.arange(len(groups)).repeat_interleave(counts)
        slots = torch.arange(len(order)) - (counts.cumsum(0) - counts)[rows]
        return cls(groups, order, rows, slots, int(counts.max()) if len(counts) else 0)


def shares(rule: Cells, held: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """List the pairs of cell and token that summaries need: cells, tokens, places in blocks."""
    t, first, cells, _ = held.unbind(-1)
    found = []
    for ahead in range(-(-rule.block // rule.stride)):
        cell = t // rule.stride + ahead
        place = t - (cell + 1) * rule.stride + rule.block
        token = ((cell < cells) & (place >= 0)).nonzero().flatten()
        found.append(torch.stack(((first + cell)[token], token, place[token])))
    cell, token, place = torch.cat(found, dim=1).unbind(0)
    return cell, token, place


def rows_of(rule: Cells, held: Tensor) -> tuple[Tensor, Tensor]:
    """List the queries among tokens `[n, 4]` that see summaries: the last cell seen, and token."""
    t, first, cells, _ = held.unbind(-1)
    row = rule.row(t)
    token = ((row > 0) & (cells > 0)).nonzero().flatten()
    return (first + row - 1)[token], token


def edge_queries(rule: Cells, held: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """List queries whose windows end within a cell: cells, tokens, keys of the cell before it.

    Cells are numbered here by document and place; they need not have a summary.
    """
    t, _, _, document = held.unbind(-1)
    cell, before = rule.row(t), (t - rule.window) % rule.stride
    token = ((cell >= 0) & (before > 0)).nonzero().flatten()
    return (document * _APART + cell)[token], token, before[token]


def edge_keys(rule: Cells, held: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """List the keys that can be at the far edge of a window: cells, tokens, places in cells."""
    t, _, _, document = held.unbind(-1)
    place = t % rule.stride
    token = (place < rule.stride - 1).nonzero().flatten()
    return (document * _APART + t // rule.stride)[token], token, place[token]


def without_gaps(groups: Tensor, shortest: int) -> Tensor:
    """Fill gaps of fewer than `shortest` numbers: few long runs are few tiles.

    >>> without_gaps(torch.tensor([1, 3, 9]), shortest=4).tolist()
    [1, 2, 3, 9]
    """
    if len(groups) < 2:
        return groups
    steps = groups.diff(append=groups[-1:] + 1)
    steps = torch.where(steps <= shortest, steps, 1)
    starts = groups.repeat_interleave(steps)
    return starts + torch.arange(len(starts)) - (steps.cumsum(0) - steps).repeat_interleave(steps)


def first_cells(cells: int, ranks: int) -> list[int]:
    """Return the first summary of each rank, and the end: equal shares in rank order."""
    size, longer = divmod(cells, ranks)
    return [rank * size + min(rank, longer) for rank in range(ranks + 1)]


def packed_cells(borders: Sequence[int]) -> BatchDocuments:
    """Return the documents of a sequence that consists of all cells."""
    runs = [Run(i, a, b) for i, (a, b) in enumerate(pairwise(borders))]
    return (Documents(tuple(runs)),)
