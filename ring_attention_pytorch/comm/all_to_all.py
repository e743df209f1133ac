"""The all-to-all of Ulysses: each rank gets some tokens and heads of what each neighbour has.

A `CopyPlan` says who gets what; a fabric carries it out (`Fabric.swap`).
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from ring_attention_pytorch.comm.fused_copies import Move
from ring_attention_pytorch.comm.messages import Form, Part


@dataclass(frozen=True, eq=False)
class CopyPlan:
    """The all-to-all of one tensor: which sizes (tokens, heads) and moves it has."""

    given: tuple[tuple[int, int], ...]  # what each place has
    got: tuple[tuple[int, int], ...]  # what each place gets
    moves: tuple[tuple[Move, ...], ...]  # to each place

    @cached_property
    def key(self) -> Hashable:
        """All numbers of the plan, which say what is the same for another one."""
        moves = (
            tuple((move.place, *((s.start, s.stop, s.step) for s in move[1:])) for move in to_place)
            for to_place in self.moves
        )
        return self.given, self.got, *moves

    def part(self, t: Tensor, place: int) -> Part:
        """Return the shape and dtype of what that place gives, for tensors like this one."""
        return Part((t.shape[0], *self.given[place], *t.shape[3:]), t.dtype)

    def alloc(self, t: Tensor, place: int) -> Tensor:
        """Return empty memory for what that place gets."""
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
    """Return views of what a rank sends to another."""
    return [tensors[i][:, m.rows, m.heads] for i, m in _between(ways, sender, receiver)]


def taken(
    tensors: Sequence[Tensor], ways: Sequence[CopyPlan], sender: int, receiver: int
) -> list[Tensor]:
    """Return views of where that goes at the other rank."""
    return [tensors[i][:, m.to_rows, m.to_heads] for i, m in _between(ways, sender, receiver)]
