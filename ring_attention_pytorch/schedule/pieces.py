"""The keys of each owner that a rank needs, in what order and when: arithmetic on ints."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, wraps
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple, TypeVar

from ring_attention_pytorch.geometry.layouts import Segment, Segments, count
from ring_attention_pytorch.geometry.tiles import Mask, needed_distances, tiles, visible_pairs

_T = TypeVar("_T")
_SHORT, _UNDIVIDED = 2e13, 2e14  # FLOPs forward, if nothing were hidden
_FEW = 1e12  # FLOPs forward: 6 ms with backward, which a host takes to launch overlapping calls
_SOON_COPIED = 2**26  # bytes of own keys: with their gradients 0.1 ms of an H200's memory
_MEANWHILE = 1800  # FLOPs of a kernel while a byte comes: an H200's 600 TFLOP/s over 330 GB/s
_MEANWHILE_BACK = 1600  # the same backward, at 525 TFLOP/s


class Workload(NamedTuple):
    """The work of one attention: every rank's queries and keys, and what is visible.

    Where samples see differently, `visible` covers all that any of them sees, and `apart` has the
    mask of each.
    """

    queries: tuple[Segments, ...]
    keys: tuple[Segments, ...]
    visible: Mask
    apart: tuple[Mask, ...] = ()

    @property
    def lasting(self) -> bool:
        """Tell whether this workload will come again."""
        return self.visible.lasting and not self.apart

    @property
    def distances(self) -> tuple[int, ...]:
        """Distances behind a rank at which owners are that anyone needs, 0 first."""
        each = self.apart or (self.visible,)
        found = (needed_distances(self.queries, self.keys, seen) for seen in each)
        return tuple(sorted(set().union(*found)))

    def others(self, at_once: int) -> Iterator[tuple[int, ...]]:
        """Yield the distances without 0, `at_once` at a time."""
        _, *others = self.distances
        return (tuple(others[i : i + at_once]) for i in range(0, len(others), at_once))


def _known(make: Callable[..., _T]) -> Callable[..., _T]:
    """Cache a function's results for workloads that will come again."""
    keeping = lru_cache(maxsize=1024)(make)

    @wraps(make)
    def found(blocks: Workload, *how: Any, **named: Any) -> _T:
        return (keeping if blocks.lasting else make)(blocks, *how, **named)

    return found


class KVShape(NamedTuple):
    """Shapes of the tensors that a transport works for; heads are those of one rank."""

    batch: int
    heads: int
    key_heads: int
    d: int
    d_v: int
    itemsize: int
    wide: bool = False  # parts of gradients travel in the accumulator's dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of one key and its value, over all heads and samples."""
        return self.batch * self.key_heads * (self.d + self.d_v) * self.itemsize

    @property
    def wide_bytes(self) -> int:
        """Bytes of the gradients of one key and its value in the accumulator's dtype."""
        return self.token_bytes // self.itemsize * max(4, self.itemsize)

    @property
    def grad_bytes(self) -> int:
        """Bytes of the gradients of one key and its value in a part that is sent to their owner."""
        return self.wide_bytes if self.wide else self.token_bytes

    @property
    def pair_flops(self) -> int:
        """FLOPs of one query that sees one key, forward, over all heads and samples."""
        return 2 * self.batch * self.heads * (self.d + self.d_v)

    @property
    def row_bytes(self) -> int:
        """Bytes moved to merge one more partial result of one query into that in float32."""
        return self.batch * self.heads * self.d_v * (2 * 4 + self.itemsize)


def is_short(blocks: Workload, job: KVShape, undivided: bool = False) -> bool:
    """Tell whether ranks have so little to compute that the ends of calls are much of it.

    That is at most 16384 queries a rank, of 32 heads of size 128, over four ranks: 10 ms of an
    H200. It is ten times the FLOPs where own keys are `undivided` backward, which spares calls of a
    kernel.
    """
    pairs = max(map(count, blocks.queries)) * sum(map(count, blocks.keys))
    return pairs * job.pair_flops <= (_UNDIVIDED if undivided else _SHORT)


def is_few(blocks: Workload, job: KVShape) -> bool:
    """Tell whether a GPU computes no longer than the host takes to launch calls that overlap.

    Own keys must be soon copied, too. That is at most 4096 queries a rank, of 32 heads of size 128,
    over four ranks under a causal mask; of short documents 16384, with 8 key heads.
    """
    queries, keys, visible, _ = blocks
    if max(map(count, keys)) * job.token_bytes > _SOON_COPIED:
        return False
    if visible.documents is not None:
        whole = (Segment(0, 1, sum(map(count, queries))),)  # whichever rank holds what of it
        seen = visible_pairs(tiles(whole, whole, visible)) / len(queries)
    else:
        most = sum(map(count, keys)) / (1 + visible.causal)
        if visible.window is not None:
            most = min(most, (2 - visible.causal) * visible.window + 1)
        seen = max(map(count, queries)) * most
    return seen * job.pair_flops <= _FEW


class Chunk(NamedTuple):
    """Some of an owner's keys, from its own index `first` on; `segment` has their positions."""

    owner: int
    first: int
    segment: Segment

    @property
    def cols(self) -> slice:
        """Slice of the owner's keys."""
        return slice(self.first, self.first + self.segment.length)


Chunks = tuple[Chunk, ...]


class Round(NamedTuple):
    """A round: owners at some distances behind each rank, whose keys come stage by stage.

    `pieces` are the chunks that come to each rank, all at once. `parts` are the slices of their
    tokens, one after another, that each stage brings.
    """

    stages: tuple[tuple[int, ...], ...]
    pieces: tuple[Chunks, ...]
    parts: tuple[tuple[slice, ...], ...]

    @property
    def distances(self) -> tuple[int, ...]:
        """Distances of all stages."""
        return tuple(chain.from_iterable(self.stages))

    @property
    def at_once(self) -> "Round":
        """This round in one stage."""
        parts = tuple((slice(0, tokens(coming)),) for coming in self.pieces)
        return Round((self.distances,), self.pieces, parts)


def slice_segments(segments: Segments, at: slice) -> Segments:
    """Return the positions of some of the tokens held, one after another.

    >>> slice_segments((Segment(0, 1, 4), Segment(12, 1, 4)), slice(3, 6))
    (Segment(start=3, stride=1, length=1), Segment(start=12, stride=1, length=2))
    """
    found, start = [], 0
    for position, stride, length in segments:
        first, last = max(at.start - start, 0), min(at.stop - start, length)
        if first < last:
            found.append(Segment(position + first * stride, stride, last - first))
        start += length
    return tuple(found)


def of_owner(pieces: Chunks, owner: int) -> Chunks:
    """Return the pieces of one owner."""
    return tuple(p for p in pieces if p.owner == owner)


def places(pieces: Chunks, owner: int) -> Iterator[tuple[Chunk, slice]]:
    """Yield one owner's pieces, and where each lies among all pieces one after another."""
    starts = accumulate((piece.segment.length for piece in pieces), initial=0)
    for start, piece in zip(starts, pieces):
        if piece.owner == owner:
            yield piece, slice(start, start + piece.segment.length)


def tokens(pieces: Chunks) -> int:
    """Count the keys of these pieces."""
    return sum(p.segment.length for p in pieces)


@_known
def schedule(blocks: Workload, at_once: int) -> tuple[Round, ...]:
    """Return the rounds, of `at_once` owners each, that bring every rank the keys that it needs.

    Zigzag, four ranks: rank 1 sees chunk 0 with all of its queries, and chunks 2 to 5 with those of
    its late chunk, 6; that is two large tiles.

    >>> from ring_attention_pytorch.geometry.layouts import all_segments
    >>> four = all_segments("zigzag", 4, 16)
    >>> (group,) = schedule(Workload(four, four, Mask(causal=True)), at_once=3)
    >>> joined(group.pieces[1])
    (Segment(start=0, stride=1, length=2), Segment(start=4, stride=1, length=8))
    """
    return tuple(_group(blocks, ((chosen,),)) for chosen in blocks.others(at_once))


@_known
def in_two_stages(blocks: Workload) -> Round:
    """Return the round of all owners in two stages, those nearest behind each rank first.

    Pieces go owner by owner, so that most of an owner's keys come in one copy.

    >>> from ring_attention_pytorch.geometry.layouts import all_segments
    >>> four = all_segments("zigzag", 4, 16)
    >>> group = in_two_stages(Workload(four, four, Mask(causal=True)))
    >>> group.stages, [piece.owner for piece in group.pieces[1]], group.parts[1]
    (((1,), (2, 3)), [0, 3, 3, 2, 2], (slice(0, 2, None), slice(2, 10, None)))
    """
    others = blocks.distances[1:]
    half = len(others) // 2
    return _group(
        blocks, tuple(tuple((t,) for t in some) for some in (others[:half], others[half:]))
    )


@_known
def all_together(blocks: Workload) -> Round:
    """Return the round of all owners in one stage, each rank itself among them."""
    return _group(blocks, ((blocks.distances,),))


def _group(blocks: Workload, stages: tuple[tuple[tuple[int, ...], ...], ...]) -> Round:
    """Build a round: what comes from some distances at once is in the order of positions."""
    found = [
        [[p for chosen in stage for p in needed(rank, blocks, chosen)] for stage in stages]
        for rank in range(len(blocks.queries))
    ]
    ends = ([*accumulate(map(tokens, coming), initial=0)] for coming in found)
    return Round(
        tuple(tuple(chain(*stage)) for stage in stages),
        tuple(tuple(chain(*coming)) for coming in found),
        tuple(tuple(slice(*cut) for cut in pairwise(each)) for each in ends),
    )


@_known
def keys_come_late(blocks: Workload, at_once: int, job: KVShape) -> bool:
    """Tell whether a rank has computed on own keys before those of several others have come.

    All ranks must have work on own keys, and the others' keys must come together.
    """
    visible = blocks.visible
    if visible != Mask(visible.causal) or blocks.apart:
        return False  # keys are few, or make large tiles only in the order of positions
    groups = schedule(blocks, at_once)
    if len(groups) != 1 or len(groups[0].distances) < 2:
        return False
    own = [
        job.pair_flops * visible_pairs(tiles(queries, keys, visible))
        for queries, keys in zip(blocks.queries, blocks.keys)
    ]
    coming = [_MEANWHILE * job.token_bytes * tokens(pieces) for pieces in groups[0].pieces]
    return min(own) > 0 and any(mine < others for mine, others in zip(own, coming))


def most_in_front(group: Round) -> bool:
    """Tell whether ranks need more pieces of the owners in front of them than of those behind.

    Pieces of all ranks are counted together; a tie counts as more.

    >>> from ring_attention_pytorch.geometry.layouts import all_segments
    >>> for layout in ("zigzag", "contiguous"):
    ...     four = all_segments(layout, 4, 16)
    ...     most_in_front(*schedule(Workload(four, four, Mask(causal=True)), at_once=3))
    True
    False
    """
    owners = ((rank, p.owner) for rank, pieces in enumerate(group.pieces) for p in pieces)
    return sum(1 if rank < owner else -1 for rank, owner in owners) >= 0


def coming_home(group: Round) -> Counter[int]:
    """Count the keys whose gradients come home to each owner, each as often as a rank has some."""
    found = Counter[int]()
    for piece in chain.from_iterable(group.pieces):
        found[piece.owner] += piece.segment.length
    return found


def come_home_aside(
    blocks: Workload, groups: Sequence[Round], cuts: Sequence[int], job: KVShape, overtaken: bool
) -> bool:
    """Tell whether ranks compute on while at least half of their gradients come home from others.

    They compute on own keys from these `cuts` on, kept for the end. Or they compute on what is left
    of own keys where their call is `overtaken`: it has gone on while the others' keys came, and
    about as much in the gaps of their calls. With several groups, the gradients of each but the
    last come home while the next computes.
    """
    if len(groups) != 1:
        return True
    coming = max(coming_home(groups[0]).values(), default=0)
    brought = max(map(tokens, groups[0].pieces)) if overtaken else 0
    left = min(
        visible_pairs(tiles(queries, slice_segments(keys, slice(cut, count(keys))), blocks.visible))
        for queries, keys, cut in zip(blocks.queries, blocks.keys, cuts)
    )
    moved = _MEANWHILE_BACK * job.grad_bytes * (2 * brought + coming / 2)
    return 2.5 * job.pair_flops * left >= moved


def needed(rank: int, blocks: Workload, distances: Sequence[int]) -> Chunks:
    """Return the keys of owners at these distances that a rank sees, in order of positions."""
    (queries, keys, visible, _), found = blocks, []
    for distance in distances:
        owner = (rank - distance) % len(keys)
        shown = [tile.cols for tile in tiles(queries[rank], keys[owner], visible)]
        starts = accumulate((s.length for s in keys[owner]), initial=0)
        for start, (position, stride, length) in zip(starts, keys[owner]):
            seen = [(max(c.start, start), min(c.stop, start + length)) for c in shown]
            seen = [(first, last) for first, last in seen if first < last]
            if seen:
                first, last = min(f for f, _ in seen), max(s for _, s in seen)
                at = Segment(position + (first - start) * stride, stride, last - first)
                found.append(Chunk(owner, first, at))
    return tuple(sorted(found, key=lambda piece: (piece.segment.start, piece.owner)))


def joined(pieces: Chunks) -> Segments:
    """Return the positions of the pieces one after another, in as few segments as can be."""
    found: list[Segment] = []
    for _, _, segment in pieces:
        if found and _follows(found[-1], segment):
            found[-1] = found[-1]._replace(length=found[-1].length + segment.length)
        else:
            found.append(segment)
    return tuple(found)


def _follows(a: Segment, b: Segment) -> bool:
    return a.stride == b.stride and b.start == a.start + a.stride * a.length
