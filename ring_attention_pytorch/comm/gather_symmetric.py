"""A gather through symmetric memory, which all ranks of an NVLink domain can read.

A rank writes its keys, or the gradients of others' keys, into its own buffer. The others pull the
keys that they need on a side stream, by copies between contiguous memory, which take no
multiprocessors. An owner sums its gradients on such a stream, in one order. It sums copies of them
or, where nothing is left to compute meanwhile, reads them where they lie.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ring_attention_pytorch.comm.carry_out import KVGrads
from ring_attention_pytorch.comm.gather import Gather, GatherCall
from ring_attention_pytorch.comm.messages import Form
from ring_attention_pytorch.comm.symmetric_memory import Mark, PeerGroup, SymmetricWorkspace
from ring_attention_pytorch.geometry.segments import count
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime.accumulate import GradAccumulator
from ring_attention_pytorch.runtime.interfaces import KVBlock
from ring_attention_pytorch.runtime.later import Later
from ring_attention_pytorch.runtime.replay import Replay
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype, add_, wire_dtype
from ring_attention_pytorch.runtime.spans import disjoint_spans
from ring_attention_pytorch.runtime.streams import side_stream_after_others
from ring_attention_pytorch.schedule import steps
from ring_attention_pytorch.schedule.hardware import H200, Hardware
from ring_attention_pytorch.schedule.pieces import (
    KVShape,
    Round,
    Workload,
    in_two_stages,
    joined_places,
    most_in_front,
    places,
    schedule,
    tokens,
)
from ring_attention_pytorch.schedule.policy import come_home_aside, own_keys_are_cut
from ring_attention_pytorch.schedule.steps import Block, Program, Transfer

Yielded = TypeVar("Yielded")


class Source(NamedTuple):
    """The parts that this rank takes of another's `length` tokens, and where it puts them."""

    rank: int  # in the workspace's group
    length: int
    moves: tuple[tuple[slice, slice], ...]  # from there to here

    def joined(self) -> "Source":
        """Join moves to as few as can be: a copy takes some time, however short.

        >>> at = [((0, 2), (4, 6)), ((2, 3), (6, 7)), ((3, 4), (8, 9))]
        >>> moves = tuple((slice(*there), slice(*here)) for there, here in at)
        >>> Source(0, 9, moves).joined().moves
        ((slice(0, 3, None), slice(4, 7, None)), (slice(3, 4, None), slice(8, 9, None)))
        """
        moves = tuple((there, here) for there, here in joined_places(self.moves))
        return self._replace(moves=moves)


@dataclass(frozen=True)
class SymmetricGather(Gather):
    """A `Gather` in which pulls replace messages.

    `ranks` are the ring's ranks in the workspace's group. Gradients come home `aside`, by copy
    engine, if there is time for it; else all multiprocessors read them where they are.
    """

    space: SymmetricWorkspace = field(kw_only=True)
    ranks: tuple[int, ...] = field(kw_only=True)
    aside: bool = False

    @classmethod
    def over(
        cls,
        ring: Ring,
        blocks: Workload,
        at_once: int,
        job: KVShape,
        shared: PeerGroup,
        machine: Hardware = H200,
        overtaken: bool = False,
        late: bool = False,
    ) -> "SymmetricGather":
        """Make one, with room for the keys of `job` and their gradients.

        Keys that come `late` come in two stages. If the call for own keys is `overtaken` by those
        for others' keys, it runs on while gradients come home.
        """
        rounds = (in_two_stages(blocks),) if late else schedule(blocks, at_once)
        lengths = [count(keys) for keys in blocks.keys]
        widest = max((tokens(chunks) for each in rounds for chunks in each.pieces), default=0)
        space, group, ranks = shared
        token_bytes = job.token_bytes + job.batch  # with a key mask
        space.make_room(group, keys=max(lengths) * token_bytes, grads=widest * job.grad_bytes)
        overtaken = overtaken and len(rounds) == 1  # of several rounds, calls wait for one another
        cut = not overtaken and own_keys_are_cut(blocks, rounds, job, machine)
        cuts = lengths
        if overtaken:
            cuts = [0] * len(lengths)
        elif cut:
            cuts = [length - length // 2 for length in lengths]
        aside = come_home_aside(blocks, rounds, cuts, job, machine, overtaken)
        plan = steps.gather(blocks, [*map(Block.of, rounds)], cut, gives_way=overtaken)
        return cls(ring, plan, space=space, ranks=ranks, aside=aside)

    @property
    def replay(self) -> Replay:
        """What may replay the calls: a CUDA graph, which can hold barriers and copies."""
        return super().replay._replace(graph=True, follow=self.follow_stream)

    def follow_stream(self) -> Hashable:
        """Wait for earlier calls on other streams; return the buffers in use now."""
        self.space.follow_stream()
        return self.space.keys, self.space.grads

    def call(self, program: Program, own: KVBlock, totals: KVGrads | None = None) -> GatherCall:
        return SymmetricCall(self, program, own, totals)

    def stream(self, own_keys: KVBlock) -> Iterator[KVBlock]:
        return self._awaiting_copies(super().stream(own_keys))

    def stream_back(
        self, own_keys: KVBlock, own: KVGrads, later: Later | None = None
    ) -> Iterator[tuple[KVBlock, KVGrads]]:
        return self._awaiting_copies(super().stream_back(own_keys, own, later))

    def _awaiting_copies(self, blocks: Iterator[Yielded]) -> Iterator[Yielded]:
        """Yield all blocks; if a call fails, nothing else uses memory that copies still write."""
        try:
            yield from blocks
        except BaseException:
            self.space.wait_copies()
            raise

    def form(self, keys: KVBlock, length: int, masks: bool = False) -> Form:
        """Return the form of `length` keys with `masks`, or else of their gradients.

        k and v lie beside one another, so that one copy brings both: each takes some time to begin.
        Forms are kept, because keys are always alike.
        """
        if (masks, length) not in self.known:
            if masks:
                k, v, *mask = Form.of(keys[:3], length).parts
            else:
                k, v, *mask = Form.of(keys[:2], length, wire_dtype(keys.k.dtype)).parts
            both = k._replace(shape=(*k.shape[:-1], k.shape[-1] + v.shape[-1]))
            self.known[masks, length] = Form.of_parts((both, *mask))
        return self.known[masks, length]

    def sources_of_keys(self, program: Program, block: int) -> list[list["Source"]]:
        """List what this rank needs of each owner's keys, stage by stage."""
        made = program.blocks[block].made
        if ("keys", id(made)) not in self.known:
            self.known["keys", id(made)] = self._sources(program.workload, made)
        return self.known["keys", id(made)]

    def _sources(self, workload: Workload, made: Round) -> list[list["Source"]]:
        pieces, stages = made.pieces[self.ring.rank], []
        for stage in made.stages:
            sources = []
            for distance in chain.from_iterable(stage):
                owner = (self.ring.rank - distance) % self.ring.size
                moves = tuple((piece.cols, here) for piece, here in places(pieces, owner))
                sources.append(Source(self.ranks[owner], count(workload.keys[owner]), moves))
            if len(made.stages) > 1:
                stages.append([source.joined() for source in sources])
            else:
                stages.append(_in_rounds(sources[::-1] if most_in_front(made) else sources))
        return stages

    def users_of_own(
        self, program: Program, transfer: Transfer
    ) -> list[tuple[slice, list[tuple[int, int, slice]]]]:
        """List stretches of own tokens, each with the ranks that have gradients of them.

        A rank comes with the number of tokens it has in all, and where these lie among them.
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


class SymmetricCall(GatherCall):
    """One call of a gather through symmetric memory."""

    space: SymmetricWorkspace
    gather: SymmetricGather

    def __init__(
        self,
        gather: SymmetricGather,
        program: Program,
        own: KVBlock,
        totals: KVGrads | None = None,
    ) -> None:
        super().__init__(gather, program, own, totals)
        self.space = gather.space
        if len(program.blocks) > 1:
            self._begin(len(program.blocks) - 1)
        self.rooms: list[Tensor] = []  # where the keys of a round come to
        self.ends: list[Mark] = []  # of its stages

    def _begin(self, turns: int) -> None:
        self.space.begin(turns, self.totals is not None)
        if self.totals is None:
            self.space.keys.meet()

    def _pull(self, transfer: Transfer) -> Callable[[], None]:
        if transfer.stage == 0:
            self._publish(transfer.block)
        return partial(self._come, transfer)

    def _publish(self, block: int) -> None:
        shelf, written = self.space.keys, self._written()
        self.rooms = [room_for(t, tokens(self._chunks(block))) for t in written]
        # before the kernel that runs beside the copies: else the barrier might wait for room there
        shelf.publish()
        shelf.follow()

    def _come(self, transfer: Transfer) -> None:
        """Let the current stream wait for a stage."""
        if transfer.stage == 0:
            self._launch_copies(transfer.block)
            self._has_come(transfer.block, [*apart(self.rooms[0], self.own), *self.rooms[1:]])
        self.space.keys.join(self.ends[transfer.stage])
        self.space.board.spoil(self.rooms[0])

    def _launch_copies(self, block: int) -> None:
        """Launch the copies of all stages: only now, after the kernel that runs beside them."""
        shelf, self.ends = self.space.keys, []
        with shelf.beside():
            for sources in self.gather.sources_of_keys(self.program, block):
                for rank, length, moves in sources:  # each rank begins with another owner
                    form = self.gather.form(self.own, length, masks=True)
                    for place, t in zip(self.rooms, shelf.of(rank, form)):
                        for there, here in moves:
                            _copy(place[:, here], t[:, there])
                self.ends.append(shelf.mark())

    def _written(self) -> list[Tensor]:
        """Write own keys where the others will read them; return that memory."""
        own = self.own
        places = self.space.keys.own(self.gather.form(own, own.k.shape[1], masks=True))
        torch.cat((own.k, own.v), dim=-1, out=places[0])
        if own.key_mask is not None:
            places[1].copy_(own.key_mask)
        return places

    def _grads_of(self, keys: KVBlock) -> KVGrads:
        """Make (dk, dv) accumulators where owners read them; kernels that can write there."""
        (place,) = self.space.grads.own(self.gather.form(keys, keys.k.shape[1]))
        dk, dv = apart(place, keys)
        wide = wire_dtype(keys.k.dtype)
        return (
            GradAccumulator(keys.k, calls=1, place=dk, dtype=wide),
            GradAccumulator(keys.v, calls=1, place=dv, dtype=wide),
        )

    def _send_home(self, transfer: Transfer) -> Callable[[], None]:
        shelf, coming = self.space.grads, []
        for here, parts in self._coming(transfer):
            coming.append((here, room_for(parts[0], wide=len(parts) > 1), parts))
        overtaken = self.gather.overtaken
        with side_stream_after_others(self.own.k.device) if overtaken else nullcontext():
            grads = self.sums.pop(transfer.source)
            for total in grads if self._chunks(transfer.source) else ():
                total.finalize()
            shelf.publish()  # every rank takes the turn, even with nothing to write
            shelf.follow()
        del self.blocks[transfer.source]
        with shelf.beside():
            for _, room, parts in coming:
                _sum(room, parts, self.gather.aside)
                self.space.board.spoil(room)
            end = shelf.mark()

        def wait() -> None:
            one_round = len(self.program.blocks) == 2
            if not one_round:
                shelf.join(end)
            sums = [(here, apart(room, self.own)) for here, room, _ in coming]
            for i, total in enumerate(self.totals):
                if one_round:  # dq need not wait for it
                    total.after(partial(shelf.join, end))
                total.add_all((here, both[i]) for here, both in sums)

        return wait

    def _coming(self, transfer: Transfer) -> Iterator[tuple[slice, list[Tensor]]]:
        """Yield stretches of own tokens, and their gradients in other ranks' memory."""
        for here, users in self.gather.users_of_own(self.program, transfer):
            parts = []
            for rank, length, there in users:
                (both,) = self.space.grads.of(rank, self.gather.form(self.own, length))
                parts.append(both[:, there])
            yield here, parts


def _by_stretch(sources: Sequence[Source]) -> list[tuple[slice, list[tuple[int, int, slice]]]]:
    """List stretches of what is here, each with the ranks that have something for all of it.

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


def _in_rounds(sources: list[Source]) -> list[Source]:
    """Order pulls in rounds: one piece of each source, then the next of each.

    If a rank has more than two pieces, those that join go at once.

    So no two ranks read from the same one at a time, which would make both wait. That holds where
    pieces are equally long and ranks begin with the side of which they need most: of zigzag's
    causal chunks a rank needs one of each rank behind it and two of each in front. (It does not
    hold with windows, nor for striped.)

    >>> [s.rank for s in _in_rounds([Source(i, 4, ((),) * n) for i, n in ((2, 2), (3, 2), (0, 1))])]
    [2, 3, 0, 2, 3]
    """
    by_round: list[list[Source]] = []
    for source in sources:
        moves = source.moves if len(source.moves) <= 2 else source.joined().moves
        for number, move in enumerate(moves):
            if number == len(by_round):
                by_round.append([])
            by_round[number].append(source._replace(moves=(move,)))
    return list(chain.from_iterable(by_round))


def apart(both: Tensor, keys: KVBlock) -> tuple[Tensor, ...]:
    """Split k and v, or their gradients, which lie beside one another."""
    return both.split_with_sizes((keys.k.shape[-1], keys.v.shape[-1]), dim=-1)


def room_for(like: Tensor, tokens: int | None = None, wide: bool = False) -> Tensor:
    """Return empty memory for so many tokens; if `wide`, for a sum in the accumulator's dtype."""
    b, n, *token = like.shape
    dtype = accumulation_dtype(like.dtype) if wide else like.dtype
    return like.new_empty((b, n if tokens is None else tokens, *token), dtype=dtype)


def _copy(place: Tensor, t: Tensor) -> None:
    """Copy sample by sample: what is contiguous goes by copy engine."""
    pairs = zip(place, t) if len(t) > 1 else [(place, t)]
    for sample, given in pairs:
        sample.copy_(given)


def _sum(place: Tensor, parts: list[Tensor], aside: bool) -> None:
    """Sum parts in others' memory; copy engines bring them if `aside`, or a single one."""
    if len(parts) == 1:
        _copy(place, parts[0])
        return
    if aside:
        here = [torch.empty_like(part) for part in parts]
        for room, part in zip(here, parts):
            _copy(room, part)
        parts = here
    add_(place, *parts, fresh=True)
