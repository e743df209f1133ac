"""What neighbours swap for Ulysses, out of memory that all of them can read.

A rank writes what it has for each of the others; they read it where it lies.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ring_attention_pytorch.ring import Ring
from ring_attention_pytorch.transports.messages import Form
from ring_attention_pytorch.transports.shelves import Shared, Space, rounded, shared_by


class SharedSwap(NamedTuple):
    """Neighbours' messages to one another, each read where its sender wrote it."""

    space: Space
    ranks: tuple[int, ...]  # of the neighbours, in the group that the space is of
    each: int  # bytes of one message, at most

    @classmethod
    def among(cls, neighbours: Ring, most: int, device: torch.device) -> "SharedSwap | None":
        """For messages of so many bytes at most, anywhere in the group; None where its ranks can't
        share memory. All of them call this together.
        """
        shared = shared_by(neighbours, device)
        return None if shared is None else cls.over(shared, most)

    @classmethod
    def over(cls, shared: Shared, most: int) -> "SharedSwap":
        """With room for it."""
        space, group, ranks = shared
        space.make_room(group, swaps=rounded(most) * (len(ranks) - 1))
        return cls(space, ranks, rounded(most))

    def swap(
        self,
        me: int,
        pieces: Sequence[Sequence[Tensor]],
        of_pieces: Sequence[Form],
        forms: Sequence[Form],
    ) -> list[Sequence[Tensor]]:
        """To each place its pieces; and what each has for this one, for reading at once."""
        shelf = self.space.swaps
        self.space.follow_stream()
        shelf.meet()
        for place, (theirs, form) in enumerate(zip(pieces, of_pieces)):
            if place != me:
                for there, t in zip(shelf.mine(form, self._start(me, place)), theirs):
                    there.copy_(t)
        shelf.publish()
        return [
            pieces[me] if place == me else shelf.of(rank, form, self._start(place, me))
            for place, (rank, form) in enumerate(zip(self.ranks, forms))
        ]

    def _start(self, sender: int, receiver: int) -> int:
        """Where a message lies in its sender's memory, which has no place for one to itself."""
        return (receiver - sender - 1) % len(self.ranks) * self.each
