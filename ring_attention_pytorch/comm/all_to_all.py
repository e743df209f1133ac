"""The all-to-all of Ulysses: each rank gets some tokens and heads of each neighbour's tensors.

A `CopyPlan` lists the moves; a fabric carries them out (`Fabric.swap`).
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from ring_attention_pytorch.comm.fused_copies import Move
from ring_attention_pytorch.comm.messages import Form, Part


@dataclass(frozen=True, eq=False)
class CopyPlan:
    """The all-to-all of one tensor: its sizes (tokens, heads) and its moves."""

    given: tuple[tuple[int, int], ...]  # sizes that each place has
    got: tuple[tuple[int, int], ...]  # sizes that each place gets
    moves: tuple[tuple[Move, ...], ...]  # to each place

    @cached_property
    def key(self) -> Hashable:
        """All numbers of the plan; equal keys mean equal plans."""
        return self.given, self.got, repr(self.moves)  # slices have no hash before Python 3.12

    def part(self, t: Tensor, place: int) -> Part:
        """Return the shape and dtype of that place's tensor, like `t`, before the exchange."""
        return Part((t.shape[0], *self.given[place], *t.shape[3:]), t.dtype)

    def alloc(self, t: Tensor, place: int) -> Tensor:
        """Allocate memory for that place's tensor after the exchange."""
        return t.new_empty((t.shape[0], *self.got[place], *t.shape[3:]))


def _between(ways: Sequence[CopyPlan], sender: int, receiver: int) -> Iterator[tuple[int, Move]]:
    """Yield the moves from one rank to another, each with the index of its tensor."""
    for i, way in enumerate(ways):
        for move in way.moves[receiver]:
            if move.place == sender:
                yield i, move


def form_between(
    tensors: Sequence[Tensor], ways: Sequence[CopyPlan], sender: int, receiver: int
) -> Form:
    """Return the form of the message from one rank to another."""
    parts = []
    for i, move in _between(ways, sender, receiver):
        t, heads = tensors[i], move.heads.stop - move.heads.start
        parts.append(Part((t.shape[0], move.length, heads, *t.shape[3:]), t.dtype))
    return Form.of_parts(tuple(parts))


def given(
    tensors: Sequence[Tensor], ways: Sequence[CopyPlan], sender: int, receiver: int
) -> list[Tensor]:
    """Return views of the data that a rank sends to another."""
    return [tensors[i][:, m.rows, m.heads] for i, m in _between(ways, sender, receiver)]


def taken(
    tensors: Sequence[Tensor], ways: Sequence[CopyPlan], sender: int, receiver: int
) -> list[Tensor]:
    """Return views of the memory where the receiver stores that data."""
    return [tensors[i][:, m.to_rows, m.to_heads] for i, m in _between(ways, sender, receiver)]
