"""Gathering by copy engines, out of memory that all ranks of an NVLink domain can read.

A rank writes its keys, or the gradients of others' keys, into its own shelf; the others pull
what they need on a stream of its own, by copies between contiguous memory, which take no
multiprocessors. An owner adds the gradients that it pulled in one order.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from ring_attention_pytorch.contract import Keys
from ring_attention_pytorch.lanes import behind
from ring_attention_pytorch.layouts import count
from ring_attention_pytorch.ring import Ring
from ring_attention_pytorch.running import Sum
from ring_attention_pytorch.transports.gather import Gather
from ring_attention_pytorch.transports.messages import form_of
from ring_attention_pytorch.transports.pieces import Blocks, Group, places, schedule, tokens
from ring_attention_pytorch.transports.shelves import Shared, Space


class Source(NamedTuple):
    """What this rank takes out of another's message of so many tokens, and where it puts it."""

    rank: int  # in the group that the space is of
    length: int
    moves: tuple[tuple[slice, slice], ...]  # from there to here


class Coming(NamedTuple):
    """A part of own keys' gradients, where its source has it and where it is to be."""

    source: Source
    there: slice
    here: slice
    parts: list[Tensor]


@dataclass(frozen=True)
class SymmetricGather(Gather):
    """`Gather` where messages are replaced by pulls.

    `ranks` are those of the ring in the group that the space is of; `sources` what has to move
    for each group of owners, once that is worked out. Where the call of own keys is `overtaken` by
    those of the others', it is what goes on while gradients come home.
    """

    space: Space
    ranks: tuple[int, ...]
    overtaken: bool = False
    sources: dict[tuple[str, int], list[Source]] = field(
        default_factory=dict, compare=False, repr=False
    )

    @classmethod
    def over(
        cls,
        ring: Ring,
        blocks: Blocks,
        at_once: int,
        token_bytes: int,
        shared: Shared,
        overtaken: bool = False,
    ) -> "SymmetricGather":
        """With room for tokens of so many bytes, their mask included."""
        groups = schedule(blocks, at_once)
        lengths = tuple(map(count, blocks.keys))
        widest = max((tokens(p) for g in groups for p in g.pieces), default=0)
        space, group, ranks = shared
        space.make_room(group, keys=max(lengths) * token_bytes, grads=widest * token_bytes)
        overtaken = overtaken and len(groups) == 1  # of several, calls wait for one another
        return cls(ring, groups, lengths, space, ranks, overtaken)

    @property
    def capturable(self) -> bool:
        """Barriers and copies are what graphs are made for."""
        return True

    def follow_stream(self) -> Hashable:
        """The shelves that calls before used, on whatever stream."""
        self.space.follow_stream()
        return self.space.keys, self.space.grads

    def _cut(self, length: int) -> int:
        return length if self.overtaken else super()._cut(length)

    def stream(self, keys: Keys) -> Iterator[Keys]:
        if self.groups:
            self.space.begin(len(self.groups), back=False)
        return super().stream(keys)

    def stream_back(
        self, own_keys: Keys, own: tuple[Sum, Sum]
    ) -> Iterator[tuple[Keys, tuple[Sum, Sum]]]:
        if self.groups:
            self.space.begin(len(self.groups), back=True)
        return super().stream_back(own_keys, own)

    def _pull(self, own: Keys, group: Group) -> Callable[[], list[Tensor]]:
        shelf, sources = self.space.keys, self._of_keys(group)
        tensors = [t for t in own[:3] if t is not None]
        length = max((here.stop for each in sources for _, here in each.moves), default=0)
        whole = [_empty_like(t, length) for t in tensors]
        for place, t in zip(shelf.own(form_of(tensors, own.k.shape[1])), tensors):
            place.copy_(t)
        # before the kernel that runs beside the copies: else it might have to wait for room there
        shelf.publish()
        shelf.follow()

        def pull() -> list[Tensor]:
            # told to the device only now, when that kernel has been launched
            with shelf.beside():
                for rank, length, moves in sources:  # each rank begins with another one
                    for place, t in zip(whole, shelf.of(rank, form_of(tensors, length))):
                        for there, here in moves:
                            _copy(place[:, here], t[:, there])
            shelf.join()
            return whole

        return pull

    def _send_home(
        self,
        group: Group,
        own_keys: Keys,
        grads: tuple[Sum, Sum] | None,
        own: tuple[Sum, Sum],
    ) -> Callable[[], None]:
        shelf, kinds = self.space.grads, own_keys[:2]
        found = [
            Coming(source, there, here, [_empty_like(t, here.stop - here.start) for t in kinds])
            for source in self._of_grads(group)
            for there, here in source.moves
        ]
        with behind(own_keys.k.device) if self.overtaken else nullcontext():
            memory = shelf.own(form_of(kinds, tokens(group.pieces[self.ring.rank])))
            for place, total in zip(memory, grads or ()):
                total.write(place)
            shelf.publish()  # it is everyone's turn, be there nothing to write
            shelf.follow()

        def wait() -> None:
            with shelf.beside():
                for (rank, length, _), there, _, parts in found:
                    for part, t in zip(parts, shelf.of(rank, form_of(kinds, length))):
                        _copy(part, t[:, there])
            shelf.join()
            for i, total in enumerate(own):
                total.add_all((each.here, each.parts[i]) for each in found)

        return wait

    def _of_keys(self, group: Group) -> list[Source]:
        """Out of each owner's keys, what this rank needs of them."""
        if ("keys", id(group)) not in self.sources:
            pieces = group.pieces[self.ring.rank]
            self.sources["keys", id(group)] = [
                Source(
                    self.ranks[owner],
                    self.lengths[owner],
                    tuple((piece.cols, here) for piece, here in places(pieces, owner)),
                )
                for owner in self._owners(group.distances)
            ]
        return self.sources["keys", id(group)]

    def _of_grads(self, group: Group) -> list[Source]:
        """Out of what each user found, the gradients of own keys."""
        if ("grads", id(group)) not in self.sources:
            self.sources["grads", id(group)] = [
                Source(
                    self.ranks[user],
                    tokens(group.pieces[user]),
                    tuple(
                        (there, piece.cols)
                        for piece, there in places(group.pieces[user], self.ring.rank)
                    ),
                )
                for user in self._users(group.distances)
            ]
        return self.sources["grads", id(group)]


def _empty_like(t: Tensor, length: int) -> Tensor:
    """[b, length, ...]"""
    return t.new_empty((t.shape[0], length, *t.shape[2:]))


def _copy(place: Tensor, t: Tensor) -> None:
    """Sample by sample: what is contiguous goes by copy engine."""
    for sample, given in zip(place, t) if len(t) > 1 else ((place, t),):
        sample.copy_(given)
