"""Slices of tokens: whether, where and how often they overlap."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from torch import Tensor

Tensors = tuple[Tensor, ...]
Part = tuple[slice, Tensors]  # its tokens, and tensors of these tokens


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


def narrowed(tensors: Tensors, dims: Sequence[int], tokens: slice, at: slice) -> Tensors:
    """Narrow tensors of `tokens`, along `dims`, to the tokens `at`."""
    if at == tokens:
        return tensors
    start, length = at.start - tokens.start, at.stop - at.start
    return tuple([t.narrow(dim, start, length) for t, dim in zip(tensors, dims)])


def overlaps(parts: Sequence[Part], dims: Sequence[int]) -> Iterator[tuple[slice, list[Tensors]]]:
    """Yield disjoint slices of tokens, each with the parts that cover it, narrowed to it.

    `dims` are the dimensions of tokens, in each tensor of a part.
    """
    for at, which in disjoint_spans([tokens for tokens, _ in parts]):
        found = []
        for i in which:
            tokens, tensors = parts[i]
            found.append(narrowed(tensors, dims, tokens, at))
        yield at, found
