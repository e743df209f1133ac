"""A gather of all keys that a rank needs, all of it on the current stream.

It is for few tokens, where the host takes longer to launch calls that overlap than a GPU takes to
run them. Nothing runs side by side, so no stream waits for another, and launches are few: own keys
come among the others, in one block, or are computed on by themselves, whichever takes fewer calls
of the kernel (`policy.own_keys_apart`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

import torch
from torch import Tensor

from ring_attention_pytorch.comm import visits
from ring_attention_pytorch.comm.carry_out import KVGrads
from ring_attention_pytorch.comm.gather import GatherCall
from ring_attention_pytorch.comm.gather_symmetric import (
    SymmetricCall,
    SymmetricGather,
    apart,
    room_for,
)
from ring_attention_pytorch.comm.symmetric_memory import PeerGroup
from ring_attention_pytorch.geometry.segments import count
from ring_attention_pytorch.runtime.interfaces import KVBlock
from ring_attention_pytorch.runtime.rowwise import wire_dtype
from ring_attention_pytorch.schedule import steps
from ring_attention_pytorch.schedule.pieces import (
    Chunks,
    KVShape,
    Workload,
    all_together,
    joined_places,
    schedule,
    tokens,
)
from ring_attention_pytorch.schedule.steps import Block, Program, Transfer


@dataclass(frozen=True)
class SerialGather(SymmetricGather):
    """A `SymmetricGather` of one round, on one stream."""

    @classmethod
    def like(
        cls,
        gather: SymmetricGather,
        blocks: Workload,
        job: KVShape,
        shared: PeerGroup,
        own_apart: bool = False,
    ) -> "SerialGather":
        """Make one like a gather, in the same memory; own keys are a block `own_apart`, or not.

        All ranks of the ring call this together.
        """
        if own_apart:
            rounds = schedule(blocks, at_once=len(blocks.keys))
            plan = steps.gather(blocks, [Block.of(each) for each in rounds])
        else:
            widest = max(map(tokens, all_together(blocks).pieces))
            shared.space.make_room(shared.group, grads=widest * job.grad_bytes)
            plan = steps.gather_first(blocks)
        return cls(gather.ring, plan, space=shared.space, ranks=shared.ranks)

    @property
    def keeps(self) -> bool:
        """False: there is nothing that could run beside a call."""
        return False

    @property
    def taped(self) -> bool:
        """True: all is on the current stream, and meetings are `opaque`."""
        return True

    def call(self, program: Program, own: KVBlock, totals: KVGrads | None = None) -> GatherCall:
        return _Call(self, program, own, totals)


class _Call(SymmetricCall):
    """One call, all of it on the current stream.

    Its meetings and what follows them are one launch each (`visits`), but where a CUDA graph is
    captured before there are tables.
    """

    def _begin(self, turns: int) -> None:
        self.space.begin(turns, self.totals is not None)

    def _publish(self, block: int) -> None:
        length = tokens(self._chunks(block))
        self.rooms = [room_for(t, length) for t in self._written()]

    def _written(self) -> list[Tensor]:
        shelf, own, forward = self.space.keys, self.own, self.totals is None
        if not own.k.is_cuda:  # threads that stand in for GPUs
            if forward:
                shelf.meet()
            return super()._written()
        place, *mask = shelf.own(self.gather.form(own, own.k.shape[1], masks=True))
        visits.write(visits.Writing(shelf.to_write(), forward), own.k, own.v, place)
        if own.key_mask is not None:
            mask[0].copy_(own.key_mask)
        return [place, *mask]

    def _come(self, transfer: Transfer) -> None:
        """Pull all keys of a block, in the order of positions."""
        shelf, there = self.space.keys, []
        for owner, at in in_stretches(self._chunks(transfer.block)):
            form = self.gather.form(self.own, self._held_by(owner), masks=True)
            there.append([t[:, at] for t in shelf.of(self.gather.ranks[owner], form)])
        parts, *parts_of_masks = [*zip(*there)] or [()] * len(self.rooms)
        room, *masks = self.rooms
        ring = self.gather.ring
        table = visits.table_of_copies(shelf, room, parts, ring.rank, ring.size)
        if table is None:
            shelf.publish()  # after the call for own keys, which needs nobody
            _copy_all(room, parts)
        else:
            visits.pull(visits.Visit(shelf.to_read(), table), room)
        for mask, theirs in zip(masks, parts_of_masks):
            _copy_all(mask, theirs)
        if table is None or masks:  # what a visit brings it has looked after
            self.space.board.spoil(room)
        self._has_come(transfer.block, [*apart(room, self.own), *masks])

    def _held_by(self, owner: int) -> int:
        return count(self.program.workload.keys[owner])

    def _send_home(self, transfer: Transfer) -> Callable[[], None]:
        for total in self.sums.pop(transfer.source):
            total.finalize()
        del self.blocks[transfer.source]

        def wait() -> None:
            shares = [visits.Share(*at) for at in self._coming(transfer)]
            if not self._add_up(shares):
                self._add_plainly(shares)

        return wait

    def _add_up(self, shares: list[visits.Share]) -> bool:
        """Publish, and add what others have of own gradients, in one launch; tell if it can be."""
        k, v, shelf = self.own.k, self.own.v, self.space.grads
        fresh = all(total.is_empty for total in self.totals)
        dk, dv = (total.whole() for total in self.totals)
        if fresh:
            dk, dv = room_for(k), room_for(v)
        if dk is None or dv is None or not k.numel():
            return False
        table = visits.table_of_sums(shelf, k, shares)
        if table is None:
            return False
        visits.add_up(visits.Visit(shelf.to_read(), table), dk, dv, wire_dtype(k.dtype), fresh)
        for total, t in zip(self.totals, (dk, dv)) if fresh else ():
            total.add(slice(0, k.shape[1]), t)
        return True

    def _add_plainly(self, shares: list[visits.Share]) -> None:
        self.space.grads.publish()
        for here, parts in shares:
            for both in parts:
                for total, part in zip(self.totals, apart(both, self.own)):
                    total.add_lent(here, part)
        self.space.board.spoil(*[total.settle() for total in self.totals])


def in_stretches(chunks: Chunks) -> list[tuple[int, slice]]:
    """List owners, and slices of their keys: of neighbouring chunks that follow one another, one.

    >>> from ring_attention_pytorch.schedule.pieces import Chunk, Segment
    >>> at = Segment(0, 1, 4)
    >>> in_stretches((Chunk(1, 0, at), Chunk(1, 4, at), Chunk(0, 0, at)))
    [(1, slice(0, 8, None)), (0, slice(0, 4, None))]
    """
    return [
        (owner, at)
        for owner, theirs in groupby(chunks, attrgetter("owner"))
        for (at,) in joined_places((chunk.cols,) for chunk in theirs)
    ]


def _copy_all(place: Tensor, parts: Sequence[Tensor]) -> None:
    """Copy parts to a place, one behind another, by one kernel: nothing else computes."""
    here = place.split_with_sizes([part.shape[1] for part in parts], dim=1)
    if parts and len(place):
        torch._foreach_copy_(_by_sample(here), _by_sample(parts))


def _by_sample(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Split tensors of several samples into single samples, which are dense."""
    return [*tensors] if len(tensors[0]) == 1 else [t for each in tensors for t in each.unbind()]
