"""Accumulators of out, lse and gradients: parts are merged or summed in wide dtypes, rounded once.

A kernel that updates a running result in place calls `begin_update`, or `update_memory`, whose
memory need not be zeroed first. A kernel that returns a part in a tensor of its own passes it to
`add`; a first part of all tokens becomes the running result without a copy. If a single call
computes the whole result, nothing is copied, cast or zeroed. A kernel with an output argument asks
`alloc` for memory: parts that fill the result's own memory become the result. Parts are transposed
without einops, because host time counts when tokens are few.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ring_attention_pytorch.runtime.rowwise import accumulation_dtype, add_, merge_, merge_sinks_
from ring_attention_pytorch.runtime.streams import record_use, wait_side_streams

Tensors = tuple[Tensor, ...]
Part = tuple[slice, Tensors]  # its tokens, and tensors of these tokens

_MOST = 4  # parts that are put off, to be combined in one pass


class Deferred(list[Callable[[], None]]):
    """Work that a kernel puts off so that finished gradients can start their transfer, in order."""

    def do(self) -> None:
        """Run all of it, in order; empties the list."""
        while self:
            self.pop(0)()


class _Accumulator:
    """An accumulator of parts of a result that has the tokens of `like` [b, n, ...].

    Parts are put off, or combined into wide running tensors. The result has dtype `end`. Subclasses
    define its tensors (`_anew`), and how parts are combined.
    """

    _dims: tuple[int, ...]  # the dimension of tokens, in each tensor of a part
    _nothing: tuple[float, ...]  # the value of each tensor without parts
    # writes the result of running tensors and of parts of the same tokens into the former
    _combine: Callable[..., None]

    def __init__(
        self,
        like: Tensor,
        end: torch.dtype,
        calls: int | None,
        into: Tensors | None = None,
        place: Tensors | None = None,
    ) -> None:
        self._like, self._end, self._calls = like, end, calls
        self._dtype = accumulation_dtype(like.dtype)
        self._whole = slice(0, like.shape[1])
        self._into = into
        self._place = place
        self._given = place is not None
        self._taken: list[slice] = []  # tokens of `_place` in which parts lie
        self._wide: Tensors | None = None
        self._parts: list[Part] = []
        self._first_is_borrowed = False  # the first part must not be written
        self._waits: list[Callable[[], None]] = []  # to be called before parts are read

    def _anew(self, at: slice, dtype: torch.dtype) -> Tensors:
        """Return new memory for these tokens."""
        raise NotImplementedError

    def add(self, at: slice, *part: Tensor) -> None:
        """Add a part of these tokens, (out, lse) or a gradient; the accumulator owns its memory."""
        if part[0].is_cuda:
            record_use(*part)
        wide = at == self._whole and part[0].dtype == self._dtype and self._into is None
        if wide and not (self._wide or self._parts):
            self._wide = part
            return
        self._parts.append((at, part))
        if self._wide is not None or len(self._parts) > _MOST:
            self._update()

    def _alloc(self, at: slice, flat: bool = False) -> Tensors:
        """Return memory for a part of these tokens, within the result's own if possible."""
        if self._end != self._like.dtype:
            return self._anew(at, self._like.dtype)
        if self._place is self._into is self._wide is None and not self._parts:
            self._place = self._anew(self._whole, self._end)
        apart = flat and len(self._like) > 1 and at != self._whole
        if self._place is None or apart or not is_free(at, self._taken):
            return self._anew(at, self._end)
        self._taken.append(at)
        return narrowed(self._place, self._dims, self._whole, at)

    def _update(self) -> Tensors:
        """Combine all parts into the running tensors; return these."""
        self._join()
        if self._wide is None:
            if self._begins_whole and not self._first_is_borrowed:
                _, first = self._parts.pop(0)
                if self._into is None:
                    self._wide = tuple([t.to(self._dtype) for t in first])
                else:
                    self._wide = self._into
                    for there, t in zip(self._into, first):
                        there.copy_(t)
            else:
                self._wide = self._blank(self._dtype)
                for t, value in zip(self._wide, self._nothing):
                    t.fill_(value)
        parts, self._parts, self._first_is_borrowed = self._parts, [], False
        if not self._given:
            self._place, self._taken = None, []
        for at, which in disjoint_spans([tokens for tokens, _ in parts]):
            found = [t for i in which for t in narrowed(parts[i][1], self._dims, parts[i][0], at)]
            self._combine(*narrowed(self._wide, self._dims, self._whole, at), *found)
        return self._wide

    def _update_memory(self) -> tuple[Tensors | None, Tensors]:
        """Return the result so far, if any, and the memory that the next call must write.

        After parts of another kernel the last call writes one more: they are combined in one pass.
        """
        last = self._calls == 1
        dtype = self._end if last else self._dtype
        if self._calls is not None:
            self._calls -= 1
        if last and self._parts and self._wide is None and self._into is None:
            totals = self._anew(self._whole, dtype)
            self._parts.append((self._whole, totals))
            return None, totals
        before = None if self.is_empty else self._update()
        if before is not None:
            moves = dtype != self._dtype and self._into is None and before[0].is_contiguous()
            if not moves:
                return before, before
        totals = self._blank(dtype)
        self._wide, self._parts = None, []
        if totals[0].dtype == self._dtype:
            self._wide = totals
        else:
            self._parts.append((self._whole, totals))
        return before, totals

    def parts(self) -> list[Part]:
        """Return the parts so far, each with its tokens; combined ones are one of all tokens."""
        self._join()
        return self._parts if self._wide is None else [(self._whole, self._wide), *self._parts]

    @property
    def is_empty(self) -> bool:
        """True if no part was added yet."""
        return self._wide is None and not self._parts

    @property
    def _begins_whole(self) -> bool:
        """True if the first part has all tokens, so that others can be combined into it."""
        return bool(self._parts) and self._parts[0][0] == self._whole

    def _join(self) -> None:
        """Make the current stream wait for all parts."""
        if self._like.is_cuda:
            wait_side_streams(self._like.device)
        while self._waits:
            self._waits.pop()()

    def _fold_into_first(self) -> Tensors:
        """Combine all later parts into the first one, which has all tokens; return it."""
        _, self._wide = self._parts.pop(0)
        first = self._update()
        self._wide, self._parts = None, [(self._whole, first)]
        return first

    def _join_in_place(self, place: Tensors) -> None:
        """Replace parts that together fill `place` with one part."""
        if _fill(place, self._dims, self._taken, self._parts):
            self._parts[: len(self._taken)] = [(self._whole, place)]

    def _blank(self, dtype: torch.dtype) -> Tensors:
        """Return memory for all tokens."""
        if self._into is not None:
            return self._into
        if dtype == self._like.dtype == self._end:
            return self._alloc(self._whole)
        if dtype == self._end and self._place is not None:
            return self._place
        return self._anew(self._whole, dtype)


class OutputAccumulator(_Accumulator):
    """An accumulator of (out, lse) for queries like q and values of head size `d_v`; first empty.

    `calls` is the number of kernel calls that make up the whole result, None if unknown.
    """

    _dims = (1, 2)
    _nothing = (0.0, -torch.inf)
    _combine = staticmethod(merge_)

    def __init__(self, q: Tensor, d_v: int, calls: int | None = None) -> None:
        super().__init__(q, q.dtype, calls)
        self._d_v = d_v

    def alloc(self, rows: slice) -> Tensors:
        """Return memory for out and lse of these rows, for a kernel with output arguments."""
        return self._alloc(rows)

    def begin_update(self) -> Tensors:
        """Return out and lse in `accumulation_dtype(dtype)`, to be merged into in place."""
        return self._update()

    def update_memory(self) -> tuple[Tensor | None, Tensor, Tensor]:
        """Return (before, out, lse) for a call of a kernel that merges by itself.

        `before` is None if nothing was merged yet: then all of out and lse must be written.
        Otherwise lse is the running one, to be merged into in place, and so is out. Only for the
        last call can out be other memory, shaped like `before` but in q's dtype: then all of out
        must be written.
        """
        before, (out, lse) = self._update_memory()
        return None if before is None else before[0], out, lse

    def samples(self, which: slice) -> "OutputAccumulator":
        """Return an accumulator of some samples, in the same memory."""
        if which == slice(None):
            return self
        out, lse = self._update()
        part = OutputAccumulator(self._like[which], self._d_v)
        part._wide = out[which], lse[which]
        return part

    def add_sinks(self, sinks: Tensor) -> None:
        """Merge a key that every query sees, of score `sinks` [h] and value 0.

        >>> result = OutputAccumulator(torch.zeros(1, 1, 1, 2), 2)
        >>> result.add(slice(0, 1), torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1))
        >>> result.add_sinks(torch.zeros(1))
        >>> [t.flatten().tolist() for t in result.finalize()]
        [[0.5, 0.5], [0.6931471824645996]]
        """
        out, lse = self._update()
        merge_sinks_(out, lse, sinks)

    def finalize(self) -> tuple[Tensor, Tensor]:
        """Return out in q's dtype, lse in the accumulator's."""
        self._join()
        if self._place is not None:
            self._join_in_place(self._place)
        whole = self._wide is None and self._begins_whole
        out, lse = self._fold_into_first() if whole else self._update()
        return out.to(self._end), lse

    def _anew(self, at: slice, dtype: torch.dtype) -> Tensors:
        b, _, h, _ = self._like.shape
        n = at.stop - at.start
        out = self._like.new_empty((b, n, h, self._d_v), dtype=dtype)
        return out, self._like.new_empty((b, h, n), dtype=self._dtype)

    def _blank(self, dtype: torch.dtype) -> Tensors:
        if self._wide is None:
            return self._anew(self._whole, dtype)
        out, lse = self._wide  # lse stays where it is
        return torch.empty_like(out, dtype=dtype), lse


class GradAccumulator(_Accumulator):
    """An accumulator of parts that lie along the tokens of a tensor like this one, [b, n, ...].

    `calls` is the number of kernel calls that make up the whole sum, None if unknown. `into` is
    memory of the accumulator's dtype for the running sum. Parts have the dtype of `like`; the final
    sum has `dtype`, by default like's, and lies in `place` if given, which has that dtype and
    like's shape. Kernels can put off calls that add to it by `deferred`, if given; the caller that
    passes it must run them before it reads the sum.
    """

    _dims = (1,)
    _nothing = (0.0,)
    _combine = staticmethod(add_)

    def __init__(
        self,
        like: Tensor,
        calls: int | None = None,
        into: Tensor | None = None,
        place: Tensor | None = None,
        dtype: torch.dtype | None = None,
        deferred: Deferred | None = None,
    ) -> None:
        super().__init__(
            like,
            like.dtype if dtype is None else dtype,
            calls,
            None if into is None else (into,),
            None if place is None else (place,),
        )
        self.deferred = deferred

    def after(self, wait: Callable[[], None]) -> None:
        """Register `wait`, to be called before parts that are added from now on are read."""
        self._waits.append(wait)

    def alloc(self, at: slice, flat: bool = False) -> Tensor:
        """Return memory for a part of these tokens, for a kernel with an output argument.

        The memory is in `place` if possible. With `flat` all samples lie one after another.
        """
        return self._alloc(at, flat)[0]

    def add_all(self, parts: Iterable[tuple[slice, Tensor]]) -> None:
        """Add parts, in this order.

        They are not summed while few of them cover the same tokens, or while they must not be read
        yet.
        """
        for at, part in parts:
            if self._wide or self._parts:
                self._parts.append((at, (part,)))
            else:
                self.add(at, part)
        if self._crowded and not self._waits:
            self._update()

    def add_borrowed(self, at: slice, part: Tensor) -> None:
        """Add a part that lies in a peer's memory. It is only read, and not after `flush`."""
        self._first_is_borrowed |= self.is_empty
        self._parts.append((at, (part,)))

    def whole(self) -> Tensor | None:
        """Return the only part, to be added to in place, if it has the sum's shape and dtype.

        >>> total = GradAccumulator(torch.zeros(1, 2, 1, 1))
        >>> total.add_borrowed(slice(0, 2), torch.ones(1, 2, 1, 1))
        >>> total.whole() is None
        True
        >>> total.flush().data_ptr() == total.whole().data_ptr()
        True
        """
        self._join()
        if self._first_is_borrowed:
            return None
        found, others = self._wide, self._parts
        if found is None and self._begins_whole:
            (_, found), *others = self._parts
        if found is None or others:
            return None
        return found[0] if found[0].dtype == self._end and found[0].is_contiguous() else None

    def flush(self) -> Tensor:
        """Sum all parts and return the sum; borrowed memory is not read after this.

        >>> total, borrowed = GradAccumulator(torch.zeros(1, 2, 1, 1)), torch.ones(1, 2, 1, 1)
        >>> total.add_borrowed(slice(0, 2), borrowed)
        >>> total.add_borrowed(slice(1, 2), borrowed[:, 1:])
        >>> total.flush().flatten().tolist(), borrowed.flatten().tolist()
        ([1.0, 2.0], [1.0, 1.0])
        """
        total = self.finalize()
        self._wide, self._parts, self._first_is_borrowed = None, [(self._whole, (total,))], False
        self._taken = [self._whole]
        return total

    def begin_update(self) -> Tensor:
        """Return the sum as `accumulation_dtype(dtype)`, to be added to in place."""
        return self._update()[0]

    def update_memory(self) -> tuple[Tensor | None, Tensor]:
        """Return (before, sum) for a kernel that adds by itself."""
        before, (total,) = self._update_memory()
        return None if before is None else before[0], total

    def move_to(self, other: "GradAccumulator") -> None:
        """Move all parts to another accumulator of the same tokens.

        >>> some, other = (GradAccumulator(torch.zeros(1, 3, 1, 1)) for _ in range(2))
        >>> some.add(slice(0, 3), torch.arange(3.0).view(1, 3, 1, 1))
        >>> some.move_to(other)
        >>> other.finalize().flatten().tolist()
        [0.0, 1.0, 2.0]
        """
        whole = [] if self._wide is None else [(self._whole, self._wide)]
        other._waits += self._waits
        other.add_all((at, part) for at, (part,) in [*whole, *self._parts])
        self._parts, self._wide, self._waits = [], None, []

    def samples(self, which: slice) -> "GradAccumulator":
        """Return an accumulator of some samples, in the same memory."""
        if which == slice(None):
            return self
        part = GradAccumulator(self._like[which], deferred=self.deferred)
        part._wide = (self.begin_update()[which],)
        return part

    def finalize(self) -> Tensor:
        """Return the sum in its final dtype."""
        self._join()
        if self._crowded:
            if self._wide is not None and 0 < len(self._parts) <= _MOST and self._ends_elsewhere:
                self._parts.insert(0, (self._whole, self._wide))
                self._wide = None
                return self._written(self._place or self._anew(self._whole, self._end))
            (wide,) = self._update()  # it stays here: another stream may be reading it
            if self._place is None:
                return wide.to(self._end)
            return self._place[0].copy_(wide)
        if self._place is not None:
            self._join_in_place(self._place)
            return self._written(self._place)
        adopts = self._begins_whole and not self._first_is_borrowed
        if adopts and self._parts[0][1][0].dtype == self._end:
            return self._fold_into_first()[0]
        return self._written(self._blank(self._end))

    @property
    def _ends_elsewhere(self) -> bool:
        """True if the final sum lies in other memory than the running one."""
        return self._end != self._dtype and self._into is None

    def _written(self, totals: Tensors) -> Tensor:
        """Sum all parts into `totals` in one pass; a part can lie there already. Return the sum."""
        everywhere = (self._whole, *(at for at, _ in self._parts))
        for at, (_, *which) in disjoint_spans(everywhere):
            (there,) = narrowed(totals, self._dims, self._whole, at)
            covering = [self._parts[i - 1] for i in which]
            parts = [narrowed(part, self._dims, tokens, at)[0] for tokens, part in covering]
            others = [part for part in parts if part.data_ptr() != there.data_ptr()]
            if others or not parts:
                add_(there, *others, fresh=len(others) == len(parts))
        self._parts = [(self._whole, totals)]
        return totals[0]

    @property
    def _crowded(self) -> bool:
        """True if parts must be summed in a wide dtype: some were already, or many overlap."""
        many = len(self._parts) > _MOST and deepest([at for at, _ in self._parts]) > _MOST
        return self._wide is not None or many

    def _anew(self, at: slice, dtype: torch.dtype) -> Tensors:
        b, _, *token = self._like.shape
        return (self._like.new_empty((b, at.stop - at.start, *token), dtype=dtype),)


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


def _fill(place: Tensors, dims: Sequence[int], taken: list[slice], parts: Sequence[Part]) -> bool:
    """True if the first parts lie in `place`, where `taken` says, and together fill it."""
    if not taken or sum(at.stop - at.start for at in taken) < place[0].shape[dims[0]]:
        return False
    where = [(t.data_ptr(), t.stride(dim) * t.element_size()) for t, dim in zip(place, dims)]
    there = [(at, [first + at.start * step for first, step in where]) for at in taken]
    return there == [(at, [t.data_ptr() for t in part]) for at, part in parts[: len(taken)]]
