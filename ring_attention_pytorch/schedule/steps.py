"""A schedule: the steps of all ranks, forward and back, as ints.

    step | waits for         | starts               | computes        a ring of three, forward
    -----|-------------------|----------------------|-----------
       0 |                   | keys of block 1      | block 0         block 0: own keys
       1 | keys of block 1   | keys of block 2      | block 1         block 1: the neighbour's, ...
       2 | keys of block 2   |                      | block 2

A step first waits, then starts transfers, then computes. All ranks take the same steps, so they
make the same exchanges in the same order. Only copies differ between ranks: which tokens each one
receives from which peer. They follow from the blocks, and are computed for one rank at a time.

Calls, the cost model and explanations all read a schedule.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple

from ring_attention_pytorch.geometry.segments import Segments, count, slice_segments, whole_pieces
from ring_attention_pytorch.schedule.pieces import (
    Chunk,
    Chunks,
    KVShape,
    Round,
    Stage,
    Workload,
    all_together,
    cached,
    joined,
    needed,
    places,
    tokens,
)

KEYS, GRADS = "keys", "gradients"


class Block(NamedTuple):
    """Keys of owners at some distances behind each rank, in memory together, stage by stage.

    They are the keys that the rank's queries see; `made` caches them. A `whole` block has all keys
    of its one owner.
    """

    stages: tuple[Stage, ...]
    whole: bool = False
    made: Round | Any = None

    @classmethod
    def of(cls, made: Round) -> "Block":
        """Return the block of a round."""
        return cls(made.stages, made=made)

    @property
    def distances(self) -> tuple[int, ...]:
        return tuple(chain.from_iterable(chain.from_iterable(self.stages)))

    @property
    def at_once(self) -> "Block":
        """This block in one stage."""
        if self.made is not None:
            return Block.of(self.made.at_once)
        return Block((tuple(chain.from_iterable(self.stages)),))


class Transfer(NamedTuple):
    """A transfer to a block here, from a block of the ranks at some `distances` behind.

    Keys are copied to it, gradients are added to it. All ranks exchange with the peers at these
    distances, even if there is nothing to copy.
    """

    kind: str
    source: int  # number of the block on the peer
    block: int  # number of the block here
    distances: tuple[int, ...]
    stage: int = 0  # of the keys' block
    hop: bool = False  # of a ring: to one rank; whole blocks of keys, or sums of gradients

    @property
    def fetched(self) -> int:
        """Number of the block on the rank that fetches keys, or returns their gradients."""
        return self.block if self.kind == KEYS else self.source

    def token_bytes(self, shape: KVShape) -> int:
        """Return the bytes of one key, or of its gradients: a hop has sums, in a wide dtype."""
        if self.kind == KEYS:
            return shape.token_bytes
        return shape.wide_bytes if self.hop else shape.grad_bytes


class Copy(NamedTuple):
    """Tokens of a peer's block, and their place in the transfer's block here."""

    peer: int
    start: int
    to: int
    length: int


class Part(NamedTuple):
    """Some of a block's keys, on which a rank computes at once."""

    block: int
    stage: int = 0
    low_priority: bool = False  # gives way to all calls after it, and overlaps transfers


class Step(NamedTuple):
    """Numbers of the transfers to wait for, then to start; then the part to compute."""

    wait: tuple[int, ...] = ()
    start: tuple[int, ...] = ()
    compute: Part | None = None


class Program(NamedTuple):
    """The steps of one direction. Block 0 has own keys."""

    workload: Workload
    blocks: tuple[Block, ...]
    transfers: tuple[Transfer, ...]
    steps: tuple[Step, ...]

    @property
    def parts(self) -> list[Part]:
        """The parts that are computed, in order."""
        return [step.compute for step in self.steps if step.compute is not None]

    def owner(self, block: int, rank: int) -> int:
        """Return the owner of a block's keys on a rank; the block must have one owner."""
        (distance,) = self.blocks[block].distances
        return (rank - distance) % len(self.workload.keys)

    def held(self, block: int, rank: int) -> Segments:
        """Return the positions of all keys of a block on a rank."""
        if self.blocks[block].whole:
            return self.workload.keys[self.owner(block, rank)]
        return joined(self.chunks(block, rank))

    def chunks(self, block: int, rank: int) -> Chunks:
        """Return the chunks of a block on a rank, in memory order."""
        stages, whole, made = self.blocks[block]
        if made is not None:
            return made.pieces[rank]
        if whole:
            owner = self.owner(block, rank)
            pieces = whole_pieces(self.workload.keys[owner])
            return tuple(Chunk(owner, start, segment) for start, segment in pieces)
        chunks: list[Chunk] = []
        for distances in chain.from_iterable(stages):
            chunks += needed(rank, self.workload, distances)
        return tuple(chunks)

    def spans(self, block: int, rank: int) -> list[slice]:
        """Return the slice of a block's tokens that each stage has."""
        stages, _, made = self.blocks[block]
        if made is not None:
            return list(made.parts[rank])
        if len(stages) == 1:
            return [slice(0, count(self.held(block, rank)))]
        spans, start = [], 0
        for stage in stages:
            stop = start + sum(tokens(needed(rank, self.workload, each)) for each in stage)
            spans.append(slice(start, stop))
            start = stop
        return spans

    def segments(self, part: Part, rank: int) -> Segments:
        """Return the positions of a part's keys."""
        span = self.spans(part.block, rank)[part.stage]
        return slice_segments(self.held(part.block, rank), span)

    def copies(self, transfer: Transfer, rank: int) -> list[Copy]:
        """Return the copies that a rank makes in a transfer, in the order of addition."""
        size, (kind, source, block, distances, _, _) = len(self.workload.keys), transfer
        peers = [(rank - distance) % size for distance in distances]
        if source and block:  # a hop passes the whole block on
            return [Copy(peers[0], 0, 0, tokens(self.chunks(block, rank)))]
        copies = []
        if kind == GRADS:
            for peer in peers:
                for chunk, at in places(self.chunks(source, peer), rank):
                    copies.append(Copy(peer, at.start, chunk.first, chunk.segment.length))
            return copies
        for peer in peers:
            for chunk, at in places(self.chunks(block, rank), peer):
                copies.append(Copy(peer, chunk.first, at.start, chunk.segment.length))
        return copies


class Schedule(NamedTuple):
    """The programs of one forward and one backward call, the same on all ranks."""

    transport: str
    forward: Program
    backward: Program

    @property
    def own_low_priority(self) -> bool:
        """True if the backward call for own keys runs undivided, at low priority."""
        return self.backward.parts[0].low_priority

    def positions(self, back: bool, rank: int) -> Iterator[Segments]:
        """Yield the positions of the keys of each part on a rank."""
        program = self.backward if back else self.forward
        for part in program.parts:
            yield program.segments(part, rank)


OWN = Block((((0,),),), whole=True)


@cached
def ring(workload: Workload) -> Schedule:
    """Return the schedule of a ring: keys hop from neighbour to neighbour, gradients follow them.

    >>> from ring_attention_pytorch.geometry.layouts import all_segments
    >>> from ring_attention_pytorch.geometry.tiles import Mask
    >>> three = all_segments("contiguous", 3, 6)
    >>> forward = ring(Workload(three, three, Mask())).forward
    >>> [transfer.distances for transfer in forward.transfers], forward.steps[1]
    ([(1,), (1,)], Step(wait=(0,), start=(1,), compute=Part(block=1, stage=0, low_priority=False)))
    """
    distances = workload.distances
    blocks = tuple(Block((((distance,),),), whole=True) for distance in distances)
    keys = []
    for number, (near, far) in enumerate(pairwise(distances)):
        keys.append(Transfer(KEYS, number, number + 1, (far - near,), hop=True))
    # gradients go on in the same direction; at distance P is the owner itself, into its block 0
    jumps, grads = [*distances[1:], len(workload.keys)], []
    for number, (near, far) in enumerate(pairwise(jumps), 1):
        into = number + 1 if far < len(workload.keys) else 0
        grads.append(Transfer(GRADS, number, into, (far - near,), hop=True))
    forward, backward, hops = [], [], len(keys)
    for number in range(len(blocks)):
        wait = (number - 1,) if number else ()
        start = (number,) if number < hops else ()
        step = Step(wait, start, Part(number))
        forward.append(step)
        backward.append(step)
        if number:  # gradients follow the keys, one hop behind
            wait = (hops + number - 2,) if number > 1 else ()
            backward.append(Step(wait, start=(hops + number - 1,)))
    if hops:
        backward.append(Step(wait=(2 * hops - 1,)))
    return Schedule(
        "ring",
        Program(workload, blocks, tuple(keys), tuple(forward)),
        Program(workload, blocks, (*keys, *grads), tuple(backward)),
    )


def gather(workload: Workload, rounds: Sequence[Block], low_priority: bool = False) -> Schedule:
    """Return the schedule of a gather: rounds of owners, who send their keys directly.

    The next round is in flight while one computes.

    Args:
        workload: the work of all ranks.
        rounds: their blocks; keys arrive in stages forward, and at once backward.
        low_priority: the backward call for own keys gives way to all others.

    >>> from ring_attention_pytorch.geometry.layouts import all_segments
    >>> from ring_attention_pytorch.geometry.tiles import Mask
    >>> three = all_segments("contiguous", 3, 6)
    >>> both = gather(Workload(three, three, Mask()), [Block((((1, 2),),))])
    >>> [part.block for part in both.backward.parts]
    [0, 1]
    >>> both.forward.copies(both.forward.transfers[0], rank=0)
    [Copy(peer=2, start=0, to=2, length=2), Copy(peer=1, start=0, to=0, length=2)]
    """
    forward = _gathered(workload, (OWN, *rounds))
    at_once = (OWN, *(block.at_once for block in rounds))
    fetched = _gathered(workload, at_once)
    transfers, steps = [*fetched.transfers], [*fetched.steps]
    steps[0] = steps[0]._replace(compute=Part(0, low_priority=low_priority))
    backward, in_flight = [steps[0]], tuple[int, ...]()  # of gradients
    for number, step in enumerate(steps[1:], 1):
        users = _from_users(workload, at_once[number].distances)
        start = (len(transfers),)
        transfers.append(Transfer(GRADS, number, 0, users))
        backward += [step, Step(in_flight, start)]
        in_flight = start
    if in_flight:
        backward.append(Step(in_flight))
    back = Program(workload, at_once, tuple(transfers), tuple(backward))
    return Schedule("gather", forward, back)


def gather_first(workload: Workload) -> Schedule:
    """Return the schedule that gathers all keys, own ones too, before anything is computed.

    >>> from ring_attention_pytorch.geometry.layouts import all_segments
    >>> from ring_attention_pytorch.geometry.tiles import Mask
    >>> two = all_segments("contiguous", 2, 4)
    >>> gather_first(Workload(two, two, Mask())).forward.parts
    [Part(block=1, stage=0, low_priority=False)]
    """
    blocks = (OWN, Block.of(all_together(workload)))
    keys = Transfer(KEYS, 0, 1, workload.distances)
    home = Transfer(GRADS, 1, 0, _from_users(workload, workload.distances))
    forward = (Step(start=(0,)), Step(wait=(0,), compute=Part(1)))
    backward = (*forward, Step(start=(1,)), Step(wait=(1,)))
    return Schedule(
        "gather",
        Program(workload, blocks, (keys,), forward),
        Program(workload, blocks, (keys, home), backward),
    )


def _gathered(workload: Workload, blocks: Sequence[Block]) -> Program:
    """Return the steps that fetch blocks and compute on them: the next one is in flight."""
    transfers: list[Transfer] = []
    starts: list[tuple[int, ...]] = []  # of each block
    for number, block in enumerate(blocks[1:], 1):
        first = len(transfers)
        for stage, groups in enumerate(block.stages):
            distances = tuple(chain.from_iterable(groups))
            transfers.append(Transfer(KEYS, 0, number, distances, stage))
        starts.append(tuple(range(first, len(transfers))))
    following = [*starts, ()]
    steps = [Step(start=following[0], compute=Part(0))]
    for number, (waits, start) in enumerate(zip(starts, following[1:]), 1):
        for stage, transfer in enumerate(waits):
            last = stage == len(waits) - 1
            steps.append(Step((transfer,), start if last else (), Part(number, stage)))
    return Program(workload, tuple(blocks), tuple(transfers), tuple(steps))


def _from_users(workload: Workload, distances: tuple[int, ...]) -> tuple[int, ...]:
    """Return the distances behind an owner of the ranks that fetched its keys from `distances`."""
    return tuple(-distance % len(workload.keys) for distance in distances)
