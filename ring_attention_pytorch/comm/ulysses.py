"""Ulysses: all-to-all between heads and sequence, around any transport.

Jacobs et al. 2023, "DeepSpeed Ulysses", section 3. Neighbours in a ring make an all-to-all, so
that each has all their tokens for some heads. Keys then travel among the ranks that have the same
heads. Arriving tokens are sorted by position, so that chunks of neighbours become one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate
from math import gcd
from typing import Any, Literal, NamedTuple

from einops import rearrange
from torch import Tensor

from ring_attention_pytorch.comm.all_to_all import CopyPlan
from ring_attention_pytorch.comm.collectives import linear
from ring_attention_pytorch.comm.fabric import Fabric
from ring_attention_pytorch.comm.fused_copies import Move
from ring_attention_pytorch.comm.messages import Form, Part
from ring_attention_pytorch.comm.transports import fabric_among
from ring_attention_pytorch.geometry.segments import Segment, Segments, count
from ring_attention_pytorch.ranks.ring import Caller, Ring, SubRing
from ring_attention_pytorch.runtime.interfaces import ScoreMods
from ring_attention_pytorch.runtime.observe import spanned
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype
from ring_attention_pytorch.runtime.tape import Tapes
from ring_attention_pytorch.runtime.torch_func import resolved

Heads = tuple[tuple[int, ...], ...]  # the heads that each place gets


class Landing(NamedTuple):
    """Some rows of a place's shard, and their rows among all places' tokens."""

    place: int
    rows: slice
    at: slice


@dataclass(frozen=True)
class HeadPartition:
    """A tensor `[b, n, h, ...]` split over sequence or over heads, and the all-to-all both ways."""

    lengths: tuple[int, ...]  # tokens of each place's shard
    longest: int  # tokens of the longest shard of any rank
    landings: tuple[Landing, ...]
    heads: Heads

    @cached_property
    def repeats(self) -> bool:
        """True if several places have the same head."""
        every = [head for heads in self.heads for head in heads]
        return len(every) > len(set(every))

    @cached_property
    def to_heads(self) -> CopyPlan:
        """The all-to-all from own tokens of all heads to all tokens of own heads."""
        every = 1 + max(head for heads in self.heads for head in heads)
        tokens = sum(self.lengths)
        given = [(length, every) for length in self.lengths]
        got = [(tokens, len(heads)) for heads in self.heads]
        moves = []
        for heads in self.heads:
            to_place = []
            for place, rows, at in self.landings:
                for which, here in _neighbours(heads):
                    to_place.append(Move(place, rows, which, at, here))
            moves.append(tuple(to_place))
        return CopyPlan(tuple(given), tuple(got), tuple(moves))

    @cached_property
    def to_sequence(self) -> CopyPlan:
        """The all-to-all back to sequence, the places' heads one after another."""
        starts = [0, *accumulate(map(len, self.heads))]
        got = [(length, starts[-1]) for length in self.lengths]
        moves = []
        for place in range(len(self.lengths)):
            to_place = []
            for sender, heads in enumerate(self.heads):
                there, here = slice(0, len(heads)), slice(starts[sender], starts[sender + 1])
                for owner, rows, at in self.landings:
                    if owner == place:
                        to_place.append(Move(sender, at, there, rows, here))
            moves.append(tuple(to_place))
        return CopyPlan(self.to_heads.got, tuple(got), tuple(moves))


def check_ulysses(degree: int, ring_size: int, heads: int) -> None:
    """Raise ValueError unless the degree divides ranks and heads. Alone, any degree is 1."""
    if degree < 1 or (ring_size > 1 and ring_size % degree):
        raise ValueError(f"ulysses must divide the ring's {ring_size} ranks, got {degree}")
    if ring_size > 1 and heads % degree:
        raise ValueError(
            f"ulysses must divide the {heads} heads of q, got {degree}; fewer key heads are fine"
        )


def key_heads(heads: int, grouped: int, places: int) -> Heads:
    """List the key heads of each place's query heads, replicated as little as equal groups allow.

    >>> key_heads(8, 4, places=2)  # two key heads each, for four query heads
    ((0, 1), (2, 3))
    >>> key_heads(8, 2, places=4)  # two places share one
    ((0,), (0,), (1,), (1,))
    >>> key_heads(12, 4, places=3)  # a place's four query heads are no whole groups of three
    ((0, 0, 0, 1), (1, 1, 2, 2), (2, 3, 3, 3))
    """
    group, mine = heads // grouped, heads // places
    together = gcd(group, mine)
    firsts = range(0, mine, together)
    return tuple(tuple((p * mine + i) // group for i in firsts) for p in range(places))


def land(shards: Sequence[Segments]) -> tuple[Segments, tuple[Landing, ...]]:
    """Sort the positions of several places' tokens; return them, and the target of each shard.

    >>> from ring_attention_pytorch.geometry.layouts import all_segments
    >>> land(all_segments("zigzag", 4, 16)[2:])[0]  # as one of two ranks would hold them
    (Segment(start=4, stride=1, length=8),)
    >>> for place, rows, at in land(all_segments("striped", 2, 5))[1]:
    ...     print(place, rows, at)
    0 slice(0, 3, None) slice(0, 5, 2)
    1 slice(0, 2, None) slice(1, 5, 2)
    """
    held = []
    for place, segments in enumerate(shards):
        starts = accumulate((s.length for s in segments), initial=0)
        held += [(s, place, slice(a, a + s.length)) for a, s in zip(starts, segments)]
    held.sort(key=lambda each: (each[0].start, each[1]))
    total = sum(s.length for s, _, _ in held)
    if (whole := _interleaved([s for s, _, _ in held], total)) is not None:
        return whole, tuple(
            Landing(place, rows, slice(i, total, len(held)))
            for i, (_, place, rows) in enumerate(held)
        )
    found: list[Segment] = []
    landings, start = [], 0
    for s, place, rows in held:
        if found and s.stride == 1 == found[-1].stride and sum(found[-1][::2]) == s.start:
            found[-1] = found[-1]._replace(length=found[-1].length + s.length)
        else:
            found.append(s)
        landings.append(Landing(place, rows, slice(start, start + s.length)))
        start += s.length
    return tuple(found), tuple(landings)


def _interleaved(found: list[Segment], total: int) -> Segments | None:
    """Return the one segment that these form, interleaved token by token; or None."""
    turn = len(found)
    if turn < 2 or found[0].stride == 1 or found[0].stride % turn:
        return None
    step = found[0].stride // turn
    expected = [
        Segment(found[0].start + i * step, found[0].stride, len(range(i, total, turn)))
        for i in range(turn)
    ]
    return (Segment(found[0].start, step, total),) if found == expected else None


@dataclass(frozen=True)
class Ulysses:
    """The ranks of a ring under Ulysses.

    `together` are the neighbours of the all-to-all, `ring` the ranks that then have the same heads.
    """

    together: SubRing
    ring: SubRing
    queries: HeadPartition
    keys: HeadPartition
    by: Fabric  # of the neighbours
    number: int = 0  # the number that all ranks have for it, used by its exchanges
    of_layer: str = ""  # as in the names of the plan's calls
    tapes: Tapes | None = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        tapes = Tapes(self.by.follow_stream) if self.by.taped else None
        object.__setattr__(self, "tapes", tapes)

    @classmethod
    def make(
        cls,
        ring: Ring,
        degree: int,
        segments: tuple[Sequence[Segments], Sequence[Segments]],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        d_v: int | None = None,
    ) -> tuple["Ulysses", tuple[Segments, ...], tuple[Segments, ...]]:
        """Make it for `segments` of queries and keys like these; all ranks call this together.

        `d_v` is the head size of results, v's by default.

        Also returned: the segments of queries and of keys that each rank of `ring` then holds.
        """
        place = ring.rank % degree
        first = ring.rank - place
        heads, key_head_count = q.shape[2], k.shape[2]
        share = heads // degree
        query_heads = tuple(tuple(range(p * share, (p + 1) * share)) for p in range(degree))
        of_heads = query_heads, key_heads(heads, key_head_count, degree)
        spreads, landed = [], []
        for shards, theirs in zip(segments, of_heads):
            landings = [land(shards[f : f + degree]) for f in range(0, ring.size, degree)]
            lengths = tuple(map(count, shards[first : first + degree]))
            longest = max(map(count, shards))
            spreads.append(HeadPartition(lengths, longest, landings[first // degree][1], theirs))
            landed.append(tuple(positions for positions, _ in landings))
        together = SubRing(ring, range(first, first + degree))
        rest = SubRing(ring, range(place, ring.size, degree))
        most = most_bytes((spreads[0], spreads[1]), q, k, v, d_v)
        by = fabric_among(together, most, q.device)
        (queries, keys), (rows, cols) = spreads, landed
        return cls(together, rest, queries, keys, by, ring.steps.notes), rows, cols

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange own tokens for all these neighbours' tokens of some heads. Differentiable."""
        return self._differentiable(QKV_TO_HEADS, (q, k, v))

    def to_sequence(self, out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Send results back to the owners of their tokens, for all heads. Differentiable."""
        if lse is None:
            return *self._differentiable(ROWS_TO_SEQUENCE, (out,)), None
        by_token = rearrange(lse, "b h n -> b n h")
        out, by_token = self._differentiable(ROWS_TO_SEQUENCE, (out, by_token))
        return out, rearrange(by_token, "b n h -> b h n")

    def _differentiable(
        self, way: "AllToAll", tensors: Sequence[Tensor], caller: Caller | None = None
    ) -> tuple[Any, ...]:
        """Exchange tensors `[b, n, h, ...]`; gradients take the opposite way."""

        def there(tensors: Sequence[Tensor], caller: Caller) -> tuple[Tensor, ...]:
            return self.exchange(way, *tensors, back_of=caller.back_of)

        caller = caller or Caller(self.together, "all-to-all", self.number)
        return linear(there, partial(self._differentiable, way.back), tensors, caller)

    def rows_to_heads(
        self, of_out: Tensor, of_lse: Tensor | None, back_of: int
    ) -> tuple[Tensor, Tensor | None]:
        """Send tensors like out and lse to the owners of their heads. Not differentiable."""
        if of_lse is None:
            (of_out,) = self.exchange(ROWS_TO_HEADS, of_out, back_of=back_of)
            return of_out, None
        by_token = rearrange(of_lse, "b h n -> b n h")
        of_out, by_token = self.exchange(ROWS_TO_HEADS, of_out, by_token, back_of=back_of)
        return of_out, rearrange(by_token, "b n h -> b h n")

    @property
    def heads(self) -> slice:
        """The heads of q on this rank after the all-to-all, as one run."""
        mine = self.queries.heads[self.together.rank]
        return slice(mine[0], mine[-1] + 1)

    def of_heads(self, terms: ScoreMods) -> ScoreMods:
        """Slice score terms of all heads to this rank's, which a kernel counts from 0."""
        alibi, mask_mod, dropout = terms.alibi, terms.mask_mod, terms.dropout
        first = self.heads.start
        return terms._replace(
            alibi=None if alibi is None else alibi[self.heads],
            mask_mod=None if mask_mod is None else lambda b, h, i, j: mask_mod(b, h + first, i, j),
            dropout=None if dropout is None else dropout._replace(first_head=first),
        )

    def whole_mask(self, mask: Tensor) -> Tensor:
        """Gather the key mask `[b, m]` of all these neighbours."""
        same = replace(self.keys, heads=((0,),) * self.together.size)
        by_head = rearrange(mask, "b m -> b m 1")
        (whole,) = replace(self, queries=same).exchange(ROWS_TO_HEADS, by_head, back_of=None)
        return whole[..., 0]

    def exchange(
        self, way: "AllToAll", *tensors: Tensor, back_of: int | None
    ) -> tuple[Tensor, ...]:
        """Exchange tensors `[b, n, h, ...]` with the neighbours, by a tape if there is one.

        `back_of` is as for `Ring.call`.
        """
        tensors = tuple([resolved(t) for t in tensors])
        name = f"all-to-all{self.of_layer} of {len(tensors)} to {way.to}"
        device = tensors[0].device
        call = self.together.call(name, self.number, back_of)
        with call, spanned(f"ring attention, {name}", device):
            if self.tapes is None:
                return way(self, *tensors)
            return self.tapes.run(way, self, *tensors)


@dataclass(frozen=True)
class AllToAll:
    """An all-to-all to heads or to sequence: a function of ranks and tensors `[b, n, h, ...]`."""

    to: Literal["heads", "sequence"]
    with_keys: bool  # with q, k and v; otherwise only tensors with the tokens and heads of q

    @property
    def back(self) -> "AllToAll":
        """The opposite direction, for gradients."""
        return replace(self, to="sequence" if self.to == "heads" else "heads")

    def __call__(self, ranks: Ulysses, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Exchange own tokens of all heads for all tokens of own heads, or undo that.

        Values that several places have for one head are summed, in their order.
        """
        queries, keys, me = ranks.queries, ranks.keys, ranks.together.rank
        spreads = (queries, keys, keys) if self.with_keys else (queries,) * len(tensors)
        ways = [each.to_heads if self.to == "heads" else each.to_sequence for each in spreads]
        found = [way.alloc(t, me) for way, t in zip(ways, tensors)]
        ranks.by.swap(tensors, ways, found)
        for i, spread in enumerate(spreads):
            if self.to == "sequence" and spread.repeats:
                found[i] = _summed(found[i], spread.heads)
        return tuple(found)


QKV_TO_HEADS, ROWS_TO_HEADS = AllToAll("heads", True), AllToAll("heads", False)
QKV_TO_SEQUENCE, ROWS_TO_SEQUENCE = QKV_TO_HEADS.back, ROWS_TO_HEADS.back


def _neighbours(heads: tuple[int, ...]) -> Iterator[tuple[slice, slice]]:
    """Yield runs of consecutive heads: the heads, and their places among these."""
    first = 0
    for i, head in enumerate(heads, 1):
        if i == len(heads) or heads[i] != head + 1:
            yield slice(heads[first], head + 1), slice(first, i)
            first = i


def most_bytes(
    spreads: tuple[HeadPartition, HeadPartition],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_v: int | None = None,
) -> int:
    """Return the most bytes any rank sends at once: q, k and v; their gradients; out and lse."""
    places = len(spreads[0].lengths)
    (rows, heads), (cols, few) = ((s.longest, max(map(len, s.heads))) for s in spreads)

    def like(t: Tensor, length: int, heads: int) -> Part:
        return Part((t.shape[0], length, heads, t.shape[3]), t.dtype)

    by_token = [like(q, rows, q.shape[2]), like(k, cols, k.shape[2]), like(v, cols, v.shape[2])]
    rows, cols = places * rows, places * cols
    by_head = [like(q, rows, heads), like(k, cols, few), like(v, cols, few)]
    lse = Part((q.shape[0], rows, heads), accumulation_dtype(q.dtype))
    out = Part((q.shape[0], rows, heads, d_v or v.shape[3]), q.dtype)
    return max(Form.of_parts(tuple(parts)).nbytes for parts in (by_token, by_head, [out, lse]))


def _summed(t: Tensor, heads: Heads) -> Tensor:
    """Return all heads in order, from the results of all places; some heads occur twice or more.

    They are summed in the accumulator's dtype.
    """
    order = [head for theirs in heads for head in theirs]
    b, n, _, *rest = t.shape
    total = t.new_zeros((b, n, 1 + max(order), *rest), dtype=accumulation_dtype(t.dtype))
    for i, head in enumerate(order):
        total[:, :, head] += t[:, :, i]
    return total.to(t.dtype)
