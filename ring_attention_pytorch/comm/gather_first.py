"""A gather of all keys that a rank needs, its own among them, before it computes on any.

It is for few tokens, where the host takes longer to launch calls one by one than a GPU takes to run
them. Keys lie in one block, in the order of positions, so that there is little to merge. Nothing
runs side by side, so no stream waits for another.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ring_attention_pytorch.comm.gather_symmetric import SymmetricGather, apart, room_for
from ring_attention_pytorch.comm.symmetric_memory import PeerGroup
from ring_attention_pytorch.geometry.layouts import Segments
from ring_attention_pytorch.runtime.accumulate import GradAccumulator
from ring_attention_pytorch.runtime.interfaces import KVBlock
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype, add_
from ring_attention_pytorch.schedule.pieces import (
    Chunks,
    KVShape,
    Workload,
    all_together,
    joined,
    tokens,
)
from ring_attention_pytorch.schedule.steps import Schedule, gather_first


@dataclass(frozen=True)
class GatherFirst(SymmetricGather):
    """A `SymmetricGather` of one group, to which each rank's own keys belong, too."""

    @classmethod
    def like(
        cls, gather: SymmetricGather, blocks: Workload, job: KVShape, shared: PeerGroup
    ) -> "GatherFirst":
        """Make one like a gather, in the same memory, with room for own keys' gradients, too."""
        group = all_together(blocks)
        widest = max(map(tokens, group.pieces))
        shared.space.make_room(shared.group, grads=widest * job.grad_bytes)
        return cls(gather.ring, (group,), gather.lengths, shared.space, shared.ranks)

    @property
    def keeps(self) -> bool:
        """False: there is nothing that could run beside a call."""
        return False

    def schedule(self, workload: Workload) -> Schedule:
        return gather_first(workload)

    def stream(self, keys: KVBlock) -> Iterator[KVBlock]:
        self.space.begin(turns=1, back=False)
        yield self._all(keys)

    def stream_back(
        self, own_keys: KVBlock, own: tuple[GradAccumulator, GradAccumulator]
    ) -> Iterator[tuple[KVBlock, tuple[GradAccumulator, GradAccumulator]]]:
        self.space.begin(turns=1, back=True)
        keys = self._all(own_keys)
        grads = self._grads_of(keys)
        yield keys, grads
        for total in grads:
            total.finalize()
        self.space.grads.publish()
        for total, found in zip(own, self._brought(own_keys)):
            total.add(slice(0, found.shape[1]), found)

    @cached_property
    def _pieces(self) -> Chunks:
        return self.groups[0].pieces[self.ring.rank]

    @cached_property
    def _segments(self) -> Segments:
        return joined(self._pieces)

    def _all(self, own: KVBlock) -> KVBlock:
        """Pull all keys that this rank needs, in the order of positions."""
        shelf, lengths = self.space.keys, [piece.segment.length for piece in self._pieces]
        whole = [room_for(t, sum(lengths)) for t in self._written(own)]
        shelf.publish()
        there = []
        for piece in self._pieces:
            form = self._form(own, self.lengths[piece.owner], masks=True)
            theirs = shelf.of(self.ranks[piece.owner], form)
            there.append([t[:, piece.cols] for t in theirs])
        for place, parts in zip(whole, zip(*there)):  # by one kernel: nothing else computes
            here = place.split(lengths, dim=1)
            if len(own.k):
                torch._foreach_copy_(_by_sample(here), _by_sample(parts))
        self.space.board.spoil(whole[0])
        k, v = apart(whole[0], own)
        return KVBlock(k, v, whole[1] if len(whole) > 1 else None, self._segments)

    def _brought(self, own: KVBlock) -> list[Tensor]:
        """Return the gradients of own k and v, each in memory of its own.

        They are summed in the accumulator's dtype.
        """
        found = [*self._coming(self.groups[0], own)]
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
