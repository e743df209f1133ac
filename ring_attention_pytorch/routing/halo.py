"""A transport for short windows: only the keys near a rank's own tokens travel, in one exchange.

A window of w tokens needs the w keys before a run of tokens, and without causal the w after it:
2 * w * h_kv * d numbers of keys and values a side. The ring would bring whole shards.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ring_attention_pytorch.contract import Keys, accumulator
from ring_attention_pytorch.layouts import Segment, Segments, Visible, count, tiles
from ring_attention_pytorch.plan import RingPlan
from ring_attention_pytorch.ring import Ring, Transfer

Span = tuple[int, int]  # tokens first to last of what a rank holds, last excluded


def spans_seen(queries: Segments, keys: Segments, visible: Visible) -> tuple[Span, ...]:
    """Which of the keys the queries see at all, as few spans.

    >>> spans_seen((Segment(8, 1, 8),), (Segment(0, 1, 8),), Visible(causal=True, window=3))
    ((5, 8),)
    """
    found: list[Span] = []
    for first, last in sorted((t.cols.start, t.cols.stop) for t in tiles(queries, keys, visible)):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        else:
            found.append((first, last))
    return tuple(found)


def cut(segments: Segments, spans: Sequence[Span]) -> Segments:
    """The segments of these tokens of a rank.

    >>> cut((Segment(0, 2, 4), Segment(9, 2, 4)), [(3, 6)])
    (Segment(start=6, stride=2, length=1), Segment(start=9, stride=2, length=2))
    """
    found = []
    for first, last in spans:
        at = 0
        for start, stride, length in segments:
            a, z = max(first - at, 0), min(last - at, length)
            if a < z:
                found.append(Segment(start + stride * a, stride, z - a))
            at += length
    return tuple(found)


@dataclass(frozen=True)
class Halo:
    """`segments` are every rank's keys; `needs[r][o]` what rank r needs of rank o's."""

    ring: Ring
    segments: tuple[Segments, ...]
    needs: tuple[tuple[tuple[Span, ...], ...], ...]

    @classmethod
    def make(cls, plan: RingPlan) -> "Halo":
        """The same keys for the same queries as the plan's own transport."""
        keys = plan.transport.segments
        needs = tuple(
            tuple(
                () if r == o else spans_seen(queries, theirs, plan.visible)
                for o, theirs in enumerate(keys)
            )
            for r, queries in enumerate(plan.query_segments)
        )
        return cls(plan.ring, keys, needs)

    @property
    def _owners(self) -> list[int]:
        """Of whose keys something comes here."""
        return [o for o, spans in enumerate(self.needs[self.ring.rank]) if spans]

    @property
    def _askers(self) -> list[int]:
        """Who gets some of the keys here."""
        return [r for r, spans in enumerate(self.needs) if spans[self.ring.rank]]

    def stream(self, keys: Keys) -> Iterator[Keys]:
        """Own keys, then all others that the window needs, at once."""
        tensors = [t for t in keys[:3] if t is not None]
        me, mine = self.ring.rank, [
            (asker, rows(t, self.needs[asker][self.ring.rank]))
            for asker in self._askers for t in tensors
        ]  # fmt: skip
        coming = self._exchange(
            mine, tensors, [(o, self._held(self.needs[me][o])) for o in self._owners]
        )
        yield keys
        got = coming.wait()
        if not got:
            return
        k, v, *mask = (torch.cat(got[i :: len(tensors)], 1) for i in range(len(tensors)))
        segments = [cut(self.segments[o], self.needs[me][o]) for o in self._owners]
        yield Keys(k, v, mask[0] if mask else None, tuple(s for each in segments for s in each))

    def stream_back(
        self, own_keys: Keys, own: tuple[Tensor, Tensor]
    ) -> Iterator[tuple[Keys, tuple[Tensor, Tensor]]]:
        """The same, each with zeroed (dk, dv); those of others go home, where they are summed."""
        dtype, grads, me = accumulator(own_keys.k.dtype), None, self.ring.rank
        for keys in self.stream(own_keys):
            if keys is own_keys:
                yield keys, own
                continue
            grads = tuple(torch.zeros_like(t, dtype=dtype) for t in (keys.k, keys.v))
            yield keys, grads
        lengths = [self._held(self.needs[me][o]) for o in self._owners]
        parts = [] if grads is None else [t.split(lengths, 1) for t in grads]
        mine = [(o, part[i].contiguous()) for i, o in enumerate(self._owners) for part in parts]
        asked = [(r, self._held(self.needs[r][me])) for r in self._askers]
        got = self._exchange(mine, own, asked).wait()
        for (asker, _), *parts in zip(asked, got[::2], got[1::2]):
            for total, part in zip(own, parts):
                at = 0
                for first, last in self.needs[asker][me]:
                    total[:, first:last] += part[:, at : at + last - first]
                    at += last - first

    def _exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        like: Sequence[Tensor],
        receives: Sequence[tuple[int, int]],
    ) -> Transfer:
        """`receives`: from whom, how many rows of tensors otherwise like these."""
        buffers = [
            (rank, t.new_empty((t.shape[0], length, *t.shape[2:])))
            for rank, length in receives
            for t in like
        ]
        return self.ring.exchange(sends, buffers)

    @staticmethod
    def _held(spans: Sequence[Span]) -> int:
        return sum(last - first for first, last in spans)


def rows(t: Tensor, spans: Sequence[Span]) -> Tensor:
    """These tokens of `[b, m, ...]`, in memory of their own."""
    return torch.cat([t[:, first:last] for first, last in spans], 1)


def with_halo(plan: RingPlan) -> RingPlan:
    """The same attention, its keys moved by a halo exchange where there is a window and a ring."""
    if plan.visible.window is None or plan.ring.size == 1:
        return plan
    return replace(plan, transport=Halo.make(plan))


def halo_rows(plan: RingPlan) -> list[int]:
    """How many keys come to each rank: with v and k, times h_kv * (d + d_v) numbers each."""
    halo = Halo.make(plan)
    return [sum(count(cut(halo.segments[o], s)) for o, s in enumerate(n)) for n in halo.needs]
