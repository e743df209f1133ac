"""The common part of fabrics that use symmetric memory: its contents, and their owners.

A rank writes its keys, or gradients of peers' keys, to its own buffer. Peers read the parts that
they need, and an owner sums the gradients of its keys in a fixed order.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_attention_pytorch.comm import fused_copies
from ring_attention_pytorch.comm.all_to_all import CopyPlan
from ring_attention_pytorch.comm.fabric import KVGrads
from ring_attention_pytorch.comm.messages import Form
from ring_attention_pytorch.comm.symmetric_memory import SymmetricWorkspace
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime.accumulate import GradAccumulator, disjoint_spans
from ring_attention_pytorch.runtime.interfaces import KVBlock
from ring_attention_pytorch.runtime.rowwise import wire_dtype
from ring_attention_pytorch.schedule.pieces import joined_places, places, tokens
from ring_attention_pytorch.schedule.steps import Program, Transfer

Stretch = tuple[slice, list[tuple[int, int, slice]]]  # own tokens; ranks with gradients for them


class Source(NamedTuple):
    """The parts of a peer's `length` tokens that this rank copies, and their targets."""

    rank: int  # in the workspace's group
    length: int
    moves: tuple[tuple[slice, slice], ...]  # from there to here

    def joined(self) -> "Source":
        """Join adjacent moves: each copy has a fixed cost.

        >>> at = [((0, 2), (4, 6)), ((2, 3), (6, 7)), ((3, 4), (8, 9))]
        >>> moves = tuple((slice(*there), slice(*here)) for there, here in at)
        >>> Source(0, 9, moves).joined().moves
        ((slice(0, 3, None), slice(4, 7, None)), (slice(3, 4, None), slice(8, 9, None)))
        """
        moves = tuple((there, here) for there, here in joined_places(self.moves))
        return self._replace(moves=moves)


@dataclass(frozen=True)
class SharedMemory:
    """A fabric through symmetric memory; `ranks` are the ring's ranks in the workspace's group.

    `known` is a cache of forms and moves.
    """

    ring: Ring
    space: SymmetricWorkspace
    ranks: tuple[int, ...]
    known: dict[Hashable, Any] = field(
        default_factory=dict, compare=False, repr=False, kw_only=True
    )

    name = "shared memory"
    sends_messages = False

    @property
    def taped(self) -> bool:
        return False

    def follow_stream(self) -> Hashable:
        self.space.follow_stream()
        return self.space.keys, self.space.grads, self.space.swaps

    def drain(self) -> None:
        self.space.wait_copies()

    def swap(
        self, tensors: Sequence[Tensor], ways: Sequence[CopyPlan], outs: Sequence[Tensor]
    ) -> None:
        """Write this rank's tensors, then read its pieces of the others', by kernels."""
        buffer, me = self.space.swaps, self.ring.rank
        forms = []
        for place in range(len(self.ranks)):
            parts = [way.part(t, place) for t, way in zip(tensors, ways)]
            forms.append(Form.of_parts(tuple(parts)))
        buffer.wait_for_readers()
        torch._foreach_copy_(buffer.local_view(forms[me]), [*tensors])
        theirs = [buffer.peer_view(rank, form) for rank, form in zip(self.ranks, forms)]
        sources = [*zip(*theirs)]  # of each tensor, by rank
        moves = [way.moves[me] for way in ways]
        key = me, self.ranks, tuple(way.key for way in ways), forms[me]
        table = fused_copies.table_of_pieces(buffer, key, outs, sources, moves)
        if table is not None:
            fused_copies.take(fused_copies.FusedCopy(buffer.read_barrier(), table), *outs)
            return
        buffer.publish()
        for out, by_rank, some in zip(outs, sources, moves):
            for m in some:
                out[:, m.to_rows, m.to_heads] = by_rank[m.place][:, m.rows, m.heads]
        self.space.board.fill_nan(*outs)

    def form(self, keys: KVBlock, length: int, masks: bool = False) -> Form:
        """Return the form of `length` keys with `masks`; without, of their gradients. Cached.

        k and v are next to each other, so that one copy moves both: each copy has a fixed cost.
        """
        if (masks, length) not in self.known:
            form = Form.of(keys[:3], length) if masks else Form.of_grads(keys, length)
            k, v, *mask = form.parts
            both = k._replace(shape=(*k.shape[:-1], k.shape[-1] + v.shape[-1]))
            self.known[masks, length] = Form.of_parts((both, *mask))
        return self.known[masks, length]

    def users_of_own(self, program: Program, transfer: Transfer) -> list[Stretch]:
        """List stretches of own tokens, each with the ranks that have gradients of it.

        A rank is given with its number of tokens and the place of the stretch among them.
        """
        made = program.blocks[transfer.source].made
        if ("grads", id(made)) not in self.known:
            sources = []
            for distance in transfer.distances:
                user = (self.ring.rank - distance) % self.ring.size
                theirs, moves = made.pieces[user], []
                for piece, there in places(theirs, self.ring.rank):
                    moves.append((there, piece.cols))
                source = Source(self.ranks[user], tokens(theirs), tuple(moves))
                sources.append(source.joined())
            self.known["grads", id(made)] = _by_stretch(sources)
        return self.known["grads", id(made)]


class SharedChannel:
    """One call through symmetric memory; gradients are computed where owners read them."""

    def __init__(
        self, fabric: SharedMemory, program: Program, own: KVBlock, totals: KVGrads | None
    ) -> None:
        self.fabric: Any = fabric  # a subclass of `SharedMemory`
        self.program: Program = program
        self.own: KVBlock = own
        self.totals: KVGrads | Any = totals  # None is forward
        self.space: SymmetricWorkspace = fabric.space
        self.received: list[Tensor] = []  # memory for the keys of a round
        if len(program.blocks) > 1:
            self._begin(len(program.blocks) - 1)

    def _begin(self, turns: int) -> None:
        self.space.begin(turns, self.totals is not None)

    def grad_accumulators(self, keys: KVBlock) -> KVGrads:
        """Return accumulators (dk, dv) in the memory that owners read."""
        (place,) = self.space.grads.write_view(self.fabric.form(keys, keys.k.shape[1]))
        dk, dv = apart(place, keys)
        wide = wire_dtype(keys.k.dtype)
        return (
            GradAccumulator(keys.k, calls=1, place=dk, dtype=wide),
            GradAccumulator(keys.v, calls=1, place=dv, dtype=wide),
        )

    def peer_gradients(self, transfer: Transfer) -> Iterator[tuple[slice, list[Tensor]]]:
        """Yield stretches of own tokens, and their gradients in peers' memory."""
        for here, users in self.fabric.users_of_own(self.program, transfer):
            parts = []
            for rank, length, there in users:
                (both,) = self.space.grads.peer_view(rank, self.fabric.form(self.own, length))
                parts.append(both[:, there])
            yield here, parts


def _by_stretch(sources: Sequence[Source]) -> list[Stretch]:
    """List stretches of own tokens, each with the ranks that have gradients for all of it.

    >>> at = {1: (slice(4, 8), slice(0, 4)), 2: (slice(0, 2), slice(2, 4))}
    >>> for stretch in _by_stretch([Source(rank, 8, (move,)) for rank, move in at.items()]):
    ...     print(*stretch)
    slice(0, 2, None) [(1, 8, slice(4, 6, None))]
    slice(2, 4, None) [(1, 8, slice(6, 8, None)), (2, 8, slice(0, 2, None))]
    """
    moves = [(source, there, here) for source in sources for there, here in source.moves]
    stretches = []
    for span, which in disjoint_spans([here for _, _, here in moves]):
        users = []
        for number in which:
            source, there, here = moves[number]
            shift = there.start - here.start
            users.append((source.rank, source.length, slice(span.start + shift, span.stop + shift)))
        stretches.append((span, users))
    return stretches


def apart(both: Tensor, keys: KVBlock) -> tuple[Tensor, ...]:
    """Split k and v, or their gradients, which are joined along the head size."""
    return both.split_with_sizes((keys.k.shape[-1], keys.v.shape[-1]), dim=-1)
