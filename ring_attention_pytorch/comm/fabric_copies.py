"""A fabric of copy engines: they move keys and gradients while kernels compute.

Ranks pull the keys that they need on a side stream, by copies between contiguous memory, which take
no multiprocessors. An owner sums its gradients on that stream. It sums copies of them or, if
no compute is left to hide the copies, reads peers' memory.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from ring_attention_pytorch.comm.fabric import KVGrads
from ring_attention_pytorch.comm.fabric_shared import SharedChannel, SharedMemory, Source, apart
from ring_attention_pytorch.comm.symmetric_memory import Mark
from ring_attention_pytorch.geometry.segments import count
from ring_attention_pytorch.runtime.interfaces import KVBlock
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype, add_
from ring_attention_pytorch.runtime.streams import side_stream_after_others
from ring_attention_pytorch.schedule.pieces import (
    Chunks,
    Round,
    most_in_front,
    places,
    tokens,
)
from ring_attention_pytorch.schedule.steps import Program, Transfer


class CopyChannel(SharedChannel):
    """One call whose copies overlap kernels."""

    fabric: "CopyEngines"

    def __init__(
        self, fabric: "CopyEngines", program: Program, own: KVBlock, totals: KVGrads | None
    ) -> None:
        super().__init__(fabric, program, own, totals)
        self.ends: list[Mark] = []  # of the stages of a round
        self.home: dict[Transfer, tuple[list[tuple[slice, Tensor]], Mark]] = {}  # sums in flight

    def _begin(self, turns: int) -> None:
        super()._begin(turns)
        if self.totals is None:
            self.space.keys.wait_for_readers()

    def put(self, transfer: Transfer) -> None:
        if transfer.stage != 0:
            return
        buffer, written = self.space.keys, self._written()
        self.received = [alloc_for(t, tokens(self._chunks(transfer.block))) for t in written]
        # before the kernel that overlaps the copies: the barrier needs a free multiprocessor
        buffer.publish()
        buffer.side_stream_follows()

    def _written(self) -> list[Tensor]:
        """Write own keys to the buffer that peers read; return that memory."""
        own = self.own
        places = self.space.keys.write_view(self.fabric.form(own, own.k.shape[1], masks=True))
        torch.cat((own.k, own.v), dim=-1, out=places[0])
        if own.key_mask is not None:
            places[1].copy_(own.key_mask)
        return places

    def take(self, transfer: Transfer) -> list[Tensor]:
        """Return memory for a round's keys; the current stream waits for one stage of them."""
        if transfer.stage == 0:
            self._launch_copies(transfer.block)
        self.space.keys.join(self.ends[transfer.stage])
        self.space.board.fill_nan(self.received[0])
        return [*apart(self.received[0], self.own), *self.received[1:]]

    def _launch_copies(self, block: int) -> None:
        """Launch the copies of all stages, after the kernel that overlaps them."""
        buffer, self.ends = self.space.keys, []
        with buffer.on_side_stream():
            for sources in self.fabric.sources_of_keys(self.program, block):
                for rank, length, moves in sources:  # each rank starts at a different owner
                    form = self.fabric.form(self.own, length, masks=True)
                    for place, t in zip(self.received, buffer.peer_view(rank, form)):
                        for there, here in moves:
                            _copy(place[:, here], t[:, there])
                self.ends.append(buffer.mark())

    def give(self, transfer: Transfer, grads: KVGrads) -> None:
        """Publish gradients for their owners, and launch the sums of own ones."""
        buffer, arriving = self.space.grads, []
        for here, parts in self.peer_gradients(transfer):
            arriving.append((here, alloc_for(parts[0], wide=len(parts) > 1), parts))
        own_low_priority = self.program.parts[0].low_priority
        with side_stream_after_others(self.own.k.device) if own_low_priority else nullcontext():
            for total in grads if self._chunks(transfer.source) else ():
                total.finalize()
            buffer.publish()  # every rank must, even with nothing to write
            buffer.side_stream_follows()
        with buffer.on_side_stream():
            for _, out, parts in arriving:
                _sum(out, parts, self.fabric.by_copy_engine)
                self.space.board.fill_nan(out)
            self.home[transfer] = [(here, out) for here, out, _ in arriving], buffer.mark()

    def reduce(self, transfer: Transfer) -> None:
        buffer, (arriving, end) = self.space.grads, self.home.pop(transfer)
        one_round = len(self.program.blocks) == 2
        if not one_round:
            buffer.join(end)
        sums = [(here, apart(out, self.own)) for here, out in arriving]
        for i, total in enumerate(self.totals):
            if one_round:  # dq does not depend on it
                total.after(partial(buffer.join, end))
            total.add_all((here, both[i]) for here, both in sums)

    def _chunks(self, block: int) -> Chunks:
        return self.program.chunks(block, self.fabric.ring.rank)


@dataclass(frozen=True)
class CopyEngines(SharedMemory):
    """A fabric whose copies overlap kernels; `idle` if there is nothing to copy.

    Copy engines fetch gradients if that is hidden (`by_copy_engine`). Otherwise kernels read them
    from peers' memory while they add.
    """

    channel_type = CopyChannel

    by_copy_engine: bool = False
    idle: bool = False

    @property
    def taped(self) -> bool:
        return self.idle

    @property
    def return_path(self) -> str:
        return " by copy engine" if self.by_copy_engine else ", added where they lie"

    def sources_of_keys(self, program: Program, block: int) -> list[list[Source]]:
        """List the keys that this rank pulls from each owner, by stage."""
        made = program.blocks[block].made
        if ("keys", id(made)) not in self.known:
            self.known["keys", id(made)] = self._sources(self.lengths(program, block), made)
        return self.known["keys", id(made)]

    def lengths(self, program: Program, block: int) -> Sequence[int]:
        """Return how many keys each rank publishes for a block: all of its own."""
        return [*map(count, program.workload.keys)]

    def _sources(self, lengths: Sequence[int], made: Round) -> list[list[Source]]:
        pieces, stages = made.pieces[self.ring.rank], []
        for stage in made.stages:
            sources = []
            for distance in chain.from_iterable(stage):
                owner = (self.ring.rank - distance) % self.ring.size
                moves = tuple((piece.cols, here) for piece, here in places(pieces, owner))
                sources.append(Source(self.ranks[owner], lengths[owner], moves))
            if len(made.stages) > 1:
                stages.append([source.joined() for source in sources])
            else:
                stages.append(_interleaved(sources[::-1] if most_in_front(made) else sources))
        return stages


def _interleaved(sources: list[Source]) -> list[Source]:
    """Order pulls by turns: one piece of each source, then the next of each.

    Then no two ranks read from the same peer at once, which would slow both. It holds for pieces
    of one length, if ranks start on the side where they need more pieces: with causal zigzag a
    rank needs one piece of each rank behind it and two of each in front. It does not hold for
    windows or striped. A source with more than two pieces has adjacent ones joined.

    >>> sources = [Source(rank, 4, ((),) * n) for rank, n in ((2, 2), (3, 2), (0, 1))]
    >>> [source.rank for source in _interleaved(sources)]
    [2, 3, 0, 2, 3]
    """
    by_turn: list[list[Source]] = []
    for source in sources:
        moves = source.moves if len(source.moves) <= 2 else source.joined().moves
        for number, move in enumerate(moves):
            if number == len(by_turn):
                by_turn.append([])
            by_turn[number].append(source._replace(moves=(move,)))
    return list(chain.from_iterable(by_turn))


def alloc_for(like: Tensor, tokens: int | None = None, wide: bool = False) -> Tensor:
    """Return empty memory for `tokens` tokens like these; `wide`: in the accumulator's dtype."""
    b, n, *token = like.shape
    dtype = accumulation_dtype(like.dtype) if wide else like.dtype
    return like.new_empty((b, n if tokens is None else tokens, *token), dtype=dtype)


def _copy(place: Tensor, t: Tensor) -> None:
    """Copy sample by sample: copy engines take contiguous memory only."""
    pairs = zip(place, t) if len(t) > 1 else [(place, t)]
    for sample, given in pairs:
        sample.copy_(given)


def _sum(place: Tensor, parts: list[Tensor], by_copy_engine: bool) -> None:
    """Sum parts in peers' memory; `by_copy_engine` copies them first, as for a single one."""
    if len(parts) == 1:
        _copy(place, parts[0])
        return
    if by_copy_engine:
        here = [torch.empty_like(part) for part in parts]
        for out, part in zip(here, parts):
            _copy(out, part)
        parts = here
    add_(place, *parts, fresh=True)
