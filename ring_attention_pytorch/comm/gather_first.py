"""A gather of all keys that a rank needs, its own among them, before it computes on any.

It is for few tokens, where the host takes longer to launch calls one by one than a GPU takes to run
them. Keys lie in one block, in the order of positions, so that there is little to merge. Nothing
runs side by side, so no stream waits for another.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ring_attention_pytorch.comm.carry_out import KVGrads
from ring_attention_pytorch.comm.gather_symmetric import (
    SymmetricCall,
    SymmetricGather,
    apart,
    room_for,
)
from ring_attention_pytorch.comm.symmetric_memory import PeerGroup
from ring_attention_pytorch.geometry.layouts import count
from ring_attention_pytorch.runtime.interfaces import KVBlock
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype, add_
from ring_attention_pytorch.schedule import steps
from ring_attention_pytorch.schedule.pieces import KVShape, Workload, all_together, tokens
from ring_attention_pytorch.schedule.steps import Program, Transfer


@dataclass(frozen=True)
class GatherFirst(SymmetricGather):
    """A `SymmetricGather` of one round, to which each rank's own keys belong, too."""

    @classmethod
    def like(
        cls, gather: SymmetricGather, blocks: Workload, job: KVShape, shared: PeerGroup
    ) -> "GatherFirst":
        """Make one like a gather, in the same memory, with room for own keys' gradients, too."""
        widest = max(map(tokens, all_together(blocks).pieces))
        shared.space.make_room(shared.group, grads=widest * job.grad_bytes)
        return cls(gather.ring, steps.gather_first(blocks), space=shared.space, ranks=shared.ranks)

    @property
    def keeps(self) -> bool:
        """False: there is nothing that could run beside a call."""
        return False

    @property
    def taped(self) -> bool:
        """True: all is on the current stream, and meetings are `opaque`."""
        return True

    def _call(self, program: Program, own: KVBlock, totals: KVGrads | None) -> SymmetricCall:
        return _Call(self, program, own, totals)


class _Call(SymmetricCall):
    """One call, all of it on the current stream."""

    def _publish(self, block: int) -> None:
        length = tokens(self._chunks(block))
        self.rooms = [room_for(t, length) for t in self._written()]
        self.space.keys.publish()

    def _come(self, transfer: Transfer) -> None:
        """Pull all keys that this rank needs, in the order of positions."""
        pieces, there = self._chunks(transfer.block), []
        lengths = [piece.segment.length for piece in pieces]
        for piece in pieces:
            form = self.gather.form(self.own, self._held_by(piece.owner), masks=True)
            theirs = self.space.keys.of(self.gather.ranks[piece.owner], form)
            there.append([t[:, piece.cols] for t in theirs])
        for place, parts in zip(self.rooms, zip(*there)):  # by one kernel: nothing else computes
            here = place.split(lengths, dim=1)
            if len(self.own.k):
                torch._foreach_copy_(_by_sample(here), _by_sample(parts))
        self.space.board.spoil(self.rooms[0])
        self._has_come(transfer.block, [*apart(self.rooms[0], self.own), *self.rooms[1:]])

    def _held_by(self, owner: int) -> int:
        return count(self.program.workload.keys[owner])

    def _send_home(self, transfer: Transfer) -> Callable[[], None]:
        for total in self.sums.pop(transfer.source):
            total.finalize()
        self.space.grads.publish()

        def wait() -> None:
            for total, found in zip(self.totals, self._brought(transfer)):
                total.add(slice(0, found.shape[1]), found)

        return wait

    def _brought(self, transfer: Transfer) -> list[Tensor]:
        """Return the gradients of own k and v, each in memory of its own.

        They are summed in the accumulator's dtype.
        """
        own, found = self.own, [*self._coming(transfer)]
        (b, n, h, d), dtype = own.k.shape, own.k.dtype
        both = own.k.new_empty((b, n, h, d + own.v.shape[-1]), dtype=accumulation_dtype(dtype))
        if sum(here.stop - here.start for here, _ in found) < n:
            both.zero_()  # some own keys are seen by no query
        for here, parts in found:
            add_(both[:, here], *parts, fresh=True)
        self.space.board.spoil(both)
        alone = dict(copy=True, memory_format=torch.contiguous_format)
        return [t.to(dtype, **alone) for t in apart(both, own)]


def _by_sample(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Split tensors of several samples into single samples, which are dense."""
    return tensors if len(tensors[0]) == 1 else [t for each in tensors for t in each.unbind()]
