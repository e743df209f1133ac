"""The all-to-all of Ulysses: each rank gets some tokens and heads of what each neighbour has.

A `CopyPlan` says who gets what. It is carried out by messages (`MessageSwap`), or through symmetric
memory (`SharedSwap`): there a rank writes all that it has, and the others read what is theirs and
put it in place, at once.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ring_attention_pytorch.comm import visits
from ring_attention_pytorch.comm.messages import Form, Part
from ring_attention_pytorch.comm.symmetric_memory import (
    PeerGroup,
    SymmetricWorkspace,
    shared_by,
)
from ring_attention_pytorch.comm.visits import Move
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime.replay import NEVER, Replay


@dataclass(frozen=True, eq=False)
class CopyPlan:
    """The all-to-all of one tensor: which sizes (tokens, heads) and moves it has."""

    given: tuple[tuple[int, int], ...]  # what each place has
    got: tuple[tuple[int, int], ...]  # what each place gets
    moves: tuple[tuple[Move, ...], ...]  # to each place

    @cached_property
    def kind(self) -> Hashable:
        """All numbers of the plan, which say what is the same for another one."""
        moves = (
            tuple((move.place, *((s.start, s.stop, s.step) for s in move[1:])) for move in to_place)
            for to_place in self.moves
        )
        return self.given, self.got, *moves

    def part(self, t: Tensor, place: int) -> Part:
        """Return the shape and dtype of what that place gives, for tensors like this one."""
        return Part((t.shape[0], *self.given[place], *t.shape[3:]), t.dtype)

    def room(self, t: Tensor, place: int) -> Tensor:
        """Return empty memory for what that place gets."""
        return t.new_empty((t.shape[0], *self.got[place], *t.shape[3:]))


# --- messages ---


class Swap(Protocol):
    """A way to carry out copy plans among neighbours."""

    @property
    def name(self) -> str:
        """The name of what things go through; "" is plain messages."""
        ...

    @property
    def replay(self) -> Replay:
        """What may replay the exchanges."""
        ...

    def swap(
        self,
        me: int,
        tensors: Sequence[Tensor],
        ways: Sequence[CopyPlan],
        rooms: Sequence[Tensor],
    ) -> None:
        """Exchange tensors by their plans; write to rooms what arrives at place `me`."""
        ...


def swap_among(neighbours: Ring, most: int, device: torch.device) -> Swap:
    """Make the swap of neighbours, for tensors of at most `most` bytes together on any rank.

    It is through shared memory where ranks have any. All ranks of the group call this together.
    """
    shared = shared_by(neighbours, device)
    return MessageSwap(neighbours) if shared is None else SharedSwap.over(shared, most)


class MessageSwap(NamedTuple):
    """An all-to-all in one message to each neighbour."""

    ring: Ring
    name: str = ""
    replay: Replay = NEVER

    def swap(
        self,
        me: int,
        tensors: Sequence[Tensor],
        ways: Sequence[CopyPlan],
        rooms: Sequence[Tensor],
    ) -> None:
        device = tensors[0].device
        sends, receives, forms = [], [], {}
        for rank in range(self.ring.size):
            if rank != me:
                form = _form(tensors, ways, me, rank)
                sends.append((rank, form.pack(_given(tensors, ways, me, rank), form.empty(device))))
                forms[rank] = _form(tensors, ways, rank, me)
                receives.append((rank, forms[rank].empty(device)))
        messages = self.ring.exchange(sends, receives).wait()
        parts = {me: _given(tensors, ways, me, me)}
        for message, (rank, form) in zip(messages, forms.items()):
            parts[rank] = form.open(message)
        for rank, theirs in parts.items():
            for place, part in zip(_taken(rooms, ways, rank, me), theirs):
                place.copy_(part)


def _between(ways: Sequence[CopyPlan], sender: int, receiver: int) -> Iterator[tuple[int, Move]]:
    """Yield the moves from one rank to another, each with the index of its tensor."""
    for i, way in enumerate(ways):
        for move in way.moves[receiver]:
            if move.place == sender:
                yield i, move


def _form(tensors: Sequence[Tensor], ways: Sequence[CopyPlan], sender: int, receiver: int) -> Form:
    """Return the form of the message from one rank to another."""
    parts = []
    for i, move in _between(ways, sender, receiver):
        t, heads = tensors[i], move.heads.stop - move.heads.start
        parts.append(Part((t.shape[0], move.length, heads, *t.shape[3:]), t.dtype))
    return Form.of_parts(tuple(parts))


def _given(
    tensors: Sequence[Tensor], ways: Sequence[CopyPlan], sender: int, receiver: int
) -> list[Tensor]:
    return [tensors[i][:, m.rows, m.heads] for i, m in _between(ways, sender, receiver)]


def _taken(
    tensors: Sequence[Tensor], ways: Sequence[CopyPlan], sender: int, receiver: int
) -> list[Tensor]:
    return [tensors[i][:, m.to_rows, m.to_heads] for i, m in _between(ways, sender, receiver)]


# --- shared memory ---


@dataclass(frozen=True, eq=False)
class SharedSwap:
    """An all-to-all through symmetric memory: each rank reads where the others wrote."""

    space: SymmetricWorkspace
    ranks: tuple[int, ...]  # of the neighbours, in the workspace's group
    name: str = "shared memory"

    @classmethod
    def over(cls, shared: PeerGroup, most: int) -> "SharedSwap":
        """Make one in this workspace, with room for `most` bytes."""
        space, group, ranks = shared
        space.make_room(group, swaps=most)
        return cls(space, ranks)

    @property
    def replay(self) -> Replay:
        """What may replay the exchanges: a CUDA graph or a tape."""
        return Replay(graph=True, tape=True, follow=self.follow_stream)

    def follow_stream(self) -> Hashable:
        """Wait for earlier calls on other streams; return the buffer in use now."""
        self.space.follow_stream()
        return self.space.swaps

    def swap(
        self,
        me: int,
        tensors: Sequence[Tensor],
        ways: Sequence[CopyPlan],
        rooms: Sequence[Tensor],
    ) -> None:
        shelf = self.space.swaps
        forms = [
            Form.of_parts(tuple(way.part(t, place) for t, way in zip(tensors, ways)))
            for place in range(len(self.ranks))
        ]
        shelf.meet()
        torch._foreach_copy_(shelf.mine(forms[me]), [*tensors])
        theirs = [shelf.of(rank, form) for rank, form in zip(self.ranks, forms)]
        sources, moves = [*zip(*theirs)], [way.moves[me] for way in ways]
        kind = me, self.ranks, tuple(way.kind for way in ways), forms[me]
        table = visits.table_of_pieces(shelf, kind, rooms, sources, moves)
        if table is not None:
            visits.take(visits.Visit(shelf.to_read(), table), *rooms)
            return
        shelf.publish()
        for room, parts, some in zip(rooms, sources, moves):
            for m in some:
                room[:, m.to_rows, m.to_heads] = parts[m.place][:, m.rows, m.heads]
        self.space.board.spoil(*rooms)
