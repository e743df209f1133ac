"""The keys of each owner that a rank needs, their order and their rounds: arithmetic on ints."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, wraps
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from ring_attention_pytorch.geometry.segments import Segment, Segments, whole_pieces
from ring_attention_pytorch.geometry.tiles import Mask, needed_distances, tiles

_T = TypeVar("_T")
_UNMASKED = Mask()


class Workload(NamedTuple):
    """The work of one attention: every rank's queries and keys, and the mask.

    Where samples have different masks, `visible` is their union, and `apart` has the mask of each.
    """

    queries: tuple[Segments, ...]
    keys: tuple[Segments, ...]
    visible: Mask
    apart: tuple[Mask, ...] = ()

    @property
    def distances(self) -> tuple[int, ...]:
        """Distances behind a rank of all owners whose keys some rank needs, 0 first."""
        distances: set[int] = set()
        for mask in self.apart or (self.visible,):
            distances.update(needed_distances(self.queries, self.keys, mask))
        return tuple(sorted(distances))

    def others(self, at_once: int) -> Iterator[tuple[int, ...]]:
        """Yield the distances without 0, `at_once` at a time."""
        others = self.distances[1:]
        for first in range(0, len(others), at_once):
            yield others[first : first + at_once]


def cached(make: Callable[..., _T]) -> Callable[..., _T]:
    """Cache a function's results by workload, as `Mask.once` does; not if samples' masks differ."""

    @lru_cache(maxsize=1024)
    def made(mask: Mask, unmasked: Workload, *args: Any, **kwargs: Any) -> _T:
        return make(unmasked._replace(visible=mask), *args, **kwargs)

    @wraps(make)
    def again(workload: Workload, *args: Any, **kwargs: Any) -> _T:
        if workload.apart:
            return make(workload, *args, **kwargs)
        unmasked = Workload(workload.queries, workload.keys, _UNMASKED)
        return workload.visible.once(made, unmasked, *args, **kwargs)

    return again


class KVShape(NamedTuple):
    """Shapes of the tensors of one attention; heads are counted on one rank."""

    batch: int
    heads: int
    key_heads: int
    d: int
    d_v: int
    itemsize: int
    wide: bool = False  # parts of gradients travel in the accumulator's dtype
    encoded: int = 0  # numbers of one key head and its value, if a codec encodes them

    @property
    def token_bytes(self) -> int:
        """Bytes of one key and its value, over all heads and samples."""
        width = self.encoded or self.d + self.d_v
        return self.batch * self.key_heads * width * self.itemsize

    @property
    def query_bytes(self) -> int:
        """Bytes of one query and its output, over all heads and samples."""
        return self.batch * self.heads * (self.d + self.d_v) * self.itemsize

    @property
    def wide_bytes(self) -> int:
        """Bytes of the gradients of one key and its value in the accumulator's dtype."""
        return self.token_bytes // self.itemsize * max(4, self.itemsize)

    @property
    def grad_bytes(self) -> int:
        """Bytes of the gradients of one key and its value, as they are sent to their owner."""
        return self.wide_bytes if self.wide else self.token_bytes

    @property
    def pair_flops(self) -> int:
        """FLOPs of one visible (query, key) pair, forward, over all heads and samples."""
        return 2 * self.batch * self.heads * (self.d + self.d_v)

    @property
    def row_bytes(self) -> int:
        """Bytes moved to merge a partial result of one query into the running one in float32."""
        return self.batch * self.heads * self.d_v * (2 * 4 + self.itemsize)


class Chunk(NamedTuple):
    """Some of an owner's keys, from the owner's local index `first` on; `segment`: positions."""

    owner: int
    first: int
    segment: Segment

    @property
    def cols(self) -> slice:
        """Slice of the owner's keys."""
        return slice(self.first, self.first + self.segment.length)


Chunks = tuple[Chunk, ...]
Stage = tuple[tuple[int, ...], ...]  # distances; keys of one tuple are in the order of positions


class Round(NamedTuple):
    """A round: owners at some distances behind each rank, whose keys arrive stage by stage.

    `pieces` are the chunks that each rank receives, over all stages. `parts` are the slices of
    their tokens that arrive in each stage.
    """

    stages: tuple[Stage, ...]
    pieces: tuple[Chunks, ...]
    parts: tuple[tuple[slice, ...], ...]

    @classmethod
    def of_stage(cls, stage: Stage, pieces: Sequence[Chunks]) -> "Round":
        """Return the round of a single stage, in which each rank receives all of its chunks."""
        parts = tuple((slice(0, tokens(chunks)),) for chunks in pieces)
        return cls((stage,), tuple(pieces), parts)

    @property
    def distances(self) -> tuple[int, ...]:
        """Distances of all stages."""
        return tuple(chain.from_iterable(chain.from_iterable(self.stages)))

    @property
    def at_once(self) -> "Round":
        """This round in one stage."""
        return Round.of_stage(tuple(chain.from_iterable(self.stages)), self.pieces)


def of_owner(chunks: Chunks, owner: int) -> Chunks:
    """Return the chunks of one owner."""
    return tuple(chunk for chunk in chunks if chunk.owner == owner)


def places(chunks: Chunks, owner: int) -> Iterator[tuple[Chunk, slice]]:
    """Yield one owner's chunks, each with its slice of the concatenation of all chunks."""
    start = 0
    for chunk in chunks:
        stop = start + chunk.segment.length
        if chunk.owner == owner:
            yield chunk, slice(start, stop)
        start = stop


def tokens(chunks: Sequence[Chunk]) -> int:
    """Count the keys of these chunks."""
    return sum(chunk.segment.length for chunk in chunks)


@cached
def rounds_of(workload: Workload, at_once: int) -> tuple[Round, ...]:
    """Return the rounds, of `at_once` owners each, in which every rank fetches the keys it needs.

    Zigzag, four ranks: rank 1 sees chunk 0 with all of its queries, and chunks 2 to 5 with the
    queries of its late chunk, 6; that is two large tiles.

    >>> from ring_attention_pytorch.geometry.layouts import all_segments
    >>> four = all_segments("zigzag", 4, 16)
    >>> (group,) = rounds_of(Workload(four, four, Mask(causal=True)), at_once=3)
    >>> joined(group.pieces[1])
    (Segment(start=0, stride=1, length=2), Segment(start=4, stride=1, length=8))
    """
    return tuple(_round(workload, ((distances,),)) for distances in workload.others(at_once))


@cached
def in_two_stages(workload: Workload) -> Round:
    """Return the round of all owners in two stages, the nearest behind each rank first.

    Chunks are ordered by owner, so that most of an owner's keys arrive in one copy.

    >>> from ring_attention_pytorch.geometry.layouts import all_segments
    >>> four = all_segments("zigzag", 4, 16)
    >>> group = in_two_stages(Workload(four, four, Mask(causal=True)))
    >>> group.stages, [piece.owner for piece in group.pieces[1]], group.parts[1]
    ((((1,),), ((2,), (3,))), [0, 3, 3, 2, 2], (slice(0, 2, None), slice(2, 10, None)))
    """
    one_by_one = tuple((distance,) for distance in workload.distances[1:])
    half = len(one_by_one) // 2
    return _round(workload, (one_by_one[:half], one_by_one[half:]))


@cached
def all_together(workload: Workload) -> Round:
    """Return the round of all owners in one stage, including each rank itself."""
    return _round(workload, ((workload.distances,),))


def _round(workload: Workload, stages: tuple[Stage, ...]) -> Round:
    """Build a round; keys of the distances in one tuple are in the order of positions."""
    pieces = []
    parts = []
    for rank in range(len(workload.queries)):
        chunks: list[Chunk] = []
        spans = []
        for stage in stages:
            start = tokens(chunks)
            for distances in stage:
                chunks += needed(rank, workload, distances)
            spans.append(slice(start, tokens(chunks)))
        pieces.append(tuple(chunks))
        parts.append(tuple(spans))
    return Round(stages, tuple(pieces), tuple(parts))


def most_in_front(group: Round) -> bool:
    """True if ranks need at least as many chunks of owners in front of them as of owners behind.

    The chunks of all ranks are counted together.

    >>> from ring_attention_pytorch.geometry.layouts import all_segments
    >>> for layout in ("zigzag", "contiguous"):
    ...     four = all_segments(layout, 4, 16)
    ...     most_in_front(*rounds_of(Workload(four, four, Mask(causal=True)), at_once=3))
    True
    False
    """
    in_front = 0
    for rank, chunks in enumerate(group.pieces):
        for chunk in chunks:
            in_front += 1 if rank < chunk.owner else -1
    return in_front >= 0


def returning_keys(group: Round) -> Counter[int]:
    """Count the key gradients sent to each owner: each key once for each rank that fetched it."""
    keys = Counter[int]()
    for chunk in chain.from_iterable(group.pieces):
        keys[chunk.owner] += chunk.segment.length
    return keys


def needed(rank: int, workload: Workload, distances: Sequence[int]) -> Chunks:
    """Return the chunks of owners at these distances that a rank sees, in order of positions."""
    queries = workload.queries[rank]
    chunks = []
    for distance in distances:
        owner = (rank - distance) % len(workload.keys)
        keys = workload.keys[owner]
        visible = tiles(queries, keys, workload.visible)
        for start, (position, stride, length) in whole_pieces(keys):
            stop = start + length
            first, last = stop, start  # until a tile shows some
            for _, cols, _, _ in visible:
                if cols.start < stop and cols.stop > start:
                    first = min(first, max(cols.start, start))
                    last = max(last, min(cols.stop, stop))
            if first < last:
                segment = Segment(position + (first - start) * stride, stride, last - first)
                chunks.append(Chunk(owner, first, segment))
    return tuple(sorted(chunks, key=lambda chunk: (chunk.segment.start, chunk.owner)))


def joined_places(places: Iterable[tuple[slice, ...]]) -> list[tuple[slice, ...]]:
    """Join places that are adjacent in each of their slices, to as few as possible.

    >>> joined_places([(slice(0, 2), slice(4, 6)), (slice(2, 3), slice(6, 7))])
    [(slice(0, 3, None), slice(4, 7, None))]
    """
    found: list[tuple[slice, ...]] = []
    for place in places:
        if found and all(last.stop == at.start for last, at in zip(found[-1], place)):
            place = tuple(slice(last.start, at.stop) for last, at in zip(found.pop(), place))
        found.append(place)
    return found


def joined(chunks: Chunks) -> Segments:
    """Return the positions of the chunks one after another, in as few segments as possible."""
    segments: list[Segment] = []
    end = stride = None  # where the last segment would continue
    for _, _, segment in chunks:
        start, length = segment.start, segment.length
        if segment.stride == stride and start == end:
            last = segments.pop()
            segment = Segment(last.start, segment.stride, last.length + length)
        segments.append(segment)
        stride = segment.stride
        end = start + stride * length
    return tuple(segments)
