"""Slices of tokens: whether, where and how often they overlap."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise


def is_free(at: slice, taken: Sequence[slice]) -> bool:
    """True if `at` overlaps none of the slices in `taken`."""
    return all(at.stop <= other.start or other.stop <= at.start for other in taken)


def deepest(spans: Sequence[slice]) -> int:
    """Return the largest number of spans that cover one token."""
    ends = []
    for at in spans:
        ends.append((at.start, 1))
        ends.append((at.stop, -1))
    ends.sort()
    return max(accumulate((by for _, by in ends), initial=0))


def disjoint_spans(spans: Sequence[slice]) -> Iterator[tuple[slice, list[int]]]:
    """Yield disjoint slices that the spans cover, each with the indices of its spans.

    The slices are cut where any span begins or ends.

    >>> list(disjoint_spans([slice(0, 4), slice(2, 4)]))
    [(slice(0, 2, None), [0]), (slice(2, 4, None), [0, 1])]
    """
    cuts = set()
    for at in spans:
        cuts.add(at.start)
        cuts.add(at.stop)
    for start, stop in pairwise(sorted(cuts)):
        which = [i for i, at in enumerate(spans) if at.start <= start and stop <= at.stop]
        if which:
            yield slice(start, stop), which
