"""Gathering by copy engines, out of memory that all ranks of an NVLink domain can read.

A rank writes its keys, or the gradients of others' keys, into its own shelf; the others pull
what they need on a stream of its own, by copies between contiguous memory, which take no
multiprocessors. An owner adds the gradients that it pulled in one order.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from torch import Tensor

from ring_attention_pytorch.contract import Keys
from ring_attention_pytorch.lanes import behind
from ring_attention_pytorch.layouts import count
from ring_attention_pytorch.ring import Ring
from ring_attention_pytorch.running import Sum
from ring_attention_pytorch.transports.gather import Gather
from ring_attention_pytorch.transports.messages import form_of
from ring_attention_pytorch.transports.pieces import (
    Blocks,
    Group,
    Job,
    in_two_stages,
    places,
    schedule,
    tokens,
)
from ring_attention_pytorch.transports.shelves import Mark, Shared, Space


class Source(NamedTuple):
    """What this rank takes out of another's message of so many tokens, and where it puts it."""

    rank: int  # in the group that the space is of
    length: int
    moves: tuple[tuple[slice, slice], ...]  # from there to here


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
    sources: dict[tuple[str, int], list] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def over(
        cls,
        ring: Ring,
        blocks: Blocks,
        at_once: int,
        job: Job,
        shared: Shared,
        overtaken: bool = False,
        late: bool = False,
    ) -> "SymmetricGather":
        """With room for the keys of that job and their gradients. Keys that come late come in two
        stages."""
        groups = (in_two_stages(blocks),) if late else schedule(blocks, at_once)
        lengths = tuple(map(count, blocks.keys))
        widest = max((tokens(p) for g in groups for p in g.pieces), default=0)
        space, group, ranks = shared
        token_bytes = job.token_bytes + job.batch  # and a mask
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

    def _pull(self, own: Keys, group: Group) -> Callable[[], tuple[list[Tensor], Iterable[slice]]]:
        shelf, stages = self.space.keys, self._of_keys(group)
        tensors = [t for t in own[:3] if t is not None]
        mine = slice(0, tokens(group.pieces[self.ring.rank]))
        whole = [_room(t, mine) for t in tensors]
        for place, t in zip(shelf.own(form_of(tensors, own.k.shape[1])), tensors):
            place.copy_(t)
        # before the kernel that runs beside the copies: else it might have to wait for room there
        shelf.publish()
        shelf.follow()

        def pull() -> tuple[list[Tensor], Iterable[slice]]:
            # told to the device only now, when that kernel has been launched
            ends = []
            with shelf.beside():
                for sources in stages:
                    for rank, length, moves in sources:  # each rank begins with another one
                        for place, t in zip(whole, shelf.of(rank, form_of(tensors, length))):
                            for there, here in moves:
                                _copy(place[:, here], t[:, there])
                    ends.append(shelf.mark())
            parts = come(ends)
            # of several groups all is read here before the next turn, which says that it was
            return whole, parts if len(self.groups) == 1 else [*parts]

        def come(ends: list[Mark]) -> Iterator[slice]:
            for part, end in zip(group.parts[self.ring.rank], ends):
                shelf.join(end)
                if part.start < part.stop:
                    yield part

        return pull

    def _send_home(
        self,
        group: Group,
        own_keys: Keys,
        grads: tuple[Sum, Sum] | None,
        own: tuple[Sum, Sum],
    ) -> Callable[[], None]:
        shelf, kinds = self.space.grads, own_keys[:2]
        coming = [
            (source, there, here, [_room(t, here) for t in kinds])
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
                for (rank, length, _), there, _, parts in coming:
                    for part, t in zip(parts, shelf.of(rank, form_of(kinds, length))):
                        _copy(part, t[:, there])
                end = shelf.mark()
            if len(self.groups) > 1:
                shelf.join(end)
            for i, total in enumerate(own):
                if len(self.groups) == 1:  # dq need not wait for that
                    total.after(partial(shelf.join, end))
                total.add_all((here, parts[i]) for _, _, here, parts in coming)

        return wait

    def _of_keys(self, group: Group) -> list[list[Source]]:
        """Out of each owner's keys, what this rank needs of them, stage by stage."""
        if ("keys", id(group)) not in self.sources:
            pieces = group.pieces[self.ring.rank]
            self.sources["keys", id(group)] = [
                [
                    Source(
                        self.ranks[owner],
                        self.lengths[owner],
                        _moves((piece.cols, here) for piece, here in places(pieces, owner)),
                    )
                    for owner in self._owners(stage)
                ]
                for stage in group.stages
            ]
        return self.sources["keys", id(group)]

    def _of_grads(self, group: Group) -> list[Source]:
        """Out of what each user found, the gradients of own keys."""
        if ("grads", id(group)) not in self.sources:
            self.sources["grads", id(group)] = [
                Source(
                    self.ranks[user],
                    tokens(group.pieces[user]),
                    _moves(
                        (there, piece.cols)
                        for piece, there in places(group.pieces[user], self.ring.rank)
                    ),
                )
                for user in self._users(group.distances)
            ]
        return self.sources["grads", id(group)]


def _moves(found: Iterable[tuple[slice, slice]]) -> tuple[tuple[slice, slice], ...]:
    """From where to where, as few as can be: a copy takes some time, however short.

    >>> _moves([(slice(0, 2), slice(4, 6)), (slice(2, 3), slice(6, 7)), (slice(3, 4), slice(8, 9))])
    ((slice(0, 3, None), slice(4, 7, None)), (slice(3, 4, None), slice(8, 9, None)))
    """
    joined: list[tuple[slice, slice]] = []
    for there, here in found:
        if joined and (joined[-1][0].stop, joined[-1][1].stop) == (there.start, here.start):
            before, after = joined.pop()
            there, here = slice(before.start, there.stop), slice(after.start, here.stop)
        joined.append((there, here))
    return tuple(joined)


def _room(t: Tensor, at: slice) -> Tensor:
    """For so many tokens."""
    return t.new_empty((t.shape[0], at.stop - at.start, *t.shape[2:]))


def _copy(place: Tensor, t: Tensor) -> None:
    """Sample by sample: what is contiguous goes by copy engine."""
    for sample, given in zip(place, t) if len(t) > 1 else ((place, t),):
        sample.copy_(given)
