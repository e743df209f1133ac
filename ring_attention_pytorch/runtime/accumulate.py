"""Accumulators of out, lse and gradients: parts are merged or summed in wide dtypes, rounded once.

A kernel that keeps a running result in memory calls `begin_update` and works in place there, or
calls `room`, whose memory need not be filled with zeros first. A kernel that returns a part in a
tensor of its own hands it to `add`; the first part of all tokens is taken as it is. So where one
call brings everything, nothing is copied, cast or filled. A kernel that can be told where to write
a part asks `alloc` for memory: parts that fill the result's own memory side by side are the result,
too. Parts are transposed without einops: where tokens are few, the host's time for each of them
counts.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ring_attention_pytorch.runtime.rowwise import accumulation_dtype, add_, merge_
from ring_attention_pytorch.runtime.streams import record_use, wait_side_streams

_MOST = 4  # parts that wait to be merged together


class OutputAccumulator:
    """An accumulator of (out, lse) for queries like q and values like v; empty at first.

    `calls` is how many calls of a kernel bring the whole result, None if that is not known.
    """

    def __init__(self, q: Tensor, v: Tensor, calls: int | None = None) -> None:
        self._q, self._d_v, self._dtype, self._calls = (
            q,
            v.shape[-1],
            accumulation_dtype(q.dtype),
            calls,
        )
        self._whole = slice(0, q.shape[1])
        self._wide: tuple[Tensor, Tensor] | None = None
        self._parts: list[tuple[slice, Tensor, Tensor]] = []
        self._place: tuple[Tensor, Tensor] | None = None
        self._taken: list[slice] = []  # rows of the place that parts have taken

    def alloc(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Return memory for out and lse of these rows, for a kernel that is told where to write."""
        if self._wide is None and not self._parts:
            self._place, self._taken = self._empty(self._q.dtype, self._whole), []
        if self._place is None or not _free(rows, self._taken):
            return self._empty(self._q.dtype, rows)
        self._taken.append(rows)
        out, lse = self._place
        return (out, lse) if rows == self._whole else (out[:, rows], lse[..., rows])

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Merge a part of these rows. Both tensors become this accumulator's own."""
        record_use(out, lse)
        first = self._wide is None and not self._parts
        if first and rows == self._whole and out.dtype == self._dtype:
            self._wide = out, lse
            return
        self._parts.append((rows, out, lse))
        if self._wide is not None or len(self._parts) > _MOST:
            self.begin_update()

    def begin_update(self) -> tuple[Tensor, Tensor]:
        """Return out and lse in `accumulation_dtype(dtype)`, to be merged into in place."""
        wait_side_streams(self._q.device)
        if self._wide is None and _begins_with(self._parts, self._whole):
            _, out, lse = self._parts.pop(0)
            self._wide = out.to(self._dtype), lse
        elif self._wide is None:
            out, lse = self._empty(self._dtype, self._whole)
            self._wide = out.zero_(), lse.fill_(-torch.inf)
        self._fold(*self._wide)
        return self._wide

    def room(self) -> tuple[Tensor | None, Tensor, Tensor]:
        """Return (before, out, lse) for a call of a kernel that merges by itself.

        `before` is None if nothing was merged yet: then all of out and lse must be written.
        Otherwise lse is the running one, to be merged into in place, and so is out. Only for the
        last call may out be other memory, like `before` but in q's dtype: then all of out must be
        written.
        """
        dtype, self._calls = _dtype_of_call(self._calls, self._q.dtype, self._dtype)
        if self._wide is None and not self._parts:
            out, lse = self._empty(dtype, self._whole)
            self.add(self._whole, out, lse)
            return None, out, lse
        before, lse = self.begin_update()
        if dtype == self._dtype or not before.is_contiguous():
            return before, before, lse
        out = torch.empty_like(before, dtype=dtype)
        self._wide = None
        self.add(self._whole, out, lse)
        return before, out, lse

    def samples(self, which: slice) -> "OutputAccumulator":
        """Return an accumulator of some samples, in the same memory."""
        if which == slice(None):
            return self
        out, lse = self.begin_update()
        part = OutputAccumulator(self._q[which], out)
        part._wide = out[which], lse[which]
        return part

    def add_sinks(self, sinks: Tensor) -> None:
        """Merge a key that every query sees, of score `sinks` [h] and value 0.

        >>> result = OutputAccumulator(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2))
        >>> result.add(slice(0, 1), torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1))
        >>> result.add_sinks(torch.zeros(1))
        >>> [t.flatten().tolist() for t in result.finalize()]
        [[0.5, 0.5], [0.6931471824645996]]
        """
        out, lse = self.begin_update()
        sinks = sinks.to(lse.dtype).unsqueeze(1)
        weight = torch.sigmoid(lse - sinks).masked_fill_(lse == -torch.inf, 0.0)
        out.mul_(weight.transpose(1, 2).unsqueeze(-1))
        torch.logaddexp(lse, sinks, out=lse)

    def finalize(self) -> tuple[Tensor, Tensor]:
        """out in q's dtype, lse in the accumulator's."""
        wait_side_streams(self._q.device)
        if self._place is not None and _fill(self._place[0], self._taken, self._parts):
            self._parts[: len(self._taken)] = [(self._whole, *self._place)]
        if self._wide is None and _begins_with(self._parts, self._whole):
            whole = self._parts.pop(0)
            self._fold(*whole[1:])
            self._parts = [whole]
            return whole[1:]
        out, lse = self.begin_update()
        return out.to(self._q.dtype), lse

    def _empty(self, dtype: torch.dtype, rows: slice) -> tuple[Tensor, Tensor]:
        (b, _, h, _), n, q = self._q.shape, rows.stop - rows.start, self._q
        return q.new_empty((b, n, h, self._d_v), dtype=dtype), q.new_empty(
            (b, h, n), dtype=self._dtype
        )

    def _fold(self, out: Tensor, lse: Tensor) -> None:
        parts = [(rows, o, x.transpose(1, 2)) for rows, o, x in self._parts]
        self._parts, self._place, self._taken = [], None, []
        for rows, found in overlaps(parts):
            others = (t for o, x in found for t in (o, x.transpose(1, 2)))
            merge_(out[:, rows], lse[..., rows], *others)


class GradAccumulator:
    """An accumulator of parts that lie along the tokens of a tensor like this one, [b, n, ...].

    `calls` is how many calls of a kernel bring the whole sum, None if that is not known. `into` is
    memory of the accumulator's dtype in which the sum has to be kept. Parts have the dtype of
    `like`; the sum is of `dtype` at the end, which is like's unless given. `place` is memory of
    that dtype, like `like`, in which the sum has to be at the end.
    """

    def __init__(
        self,
        like: Tensor,
        calls: int | None = None,
        into: Tensor | None = None,
        place: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._like, self._dtype, self._calls = like, accumulation_dtype(like.dtype), calls
        self._end = like.dtype if dtype is None else dtype
        self._whole, self._into = slice(0, like.shape[1]), into
        self._place, self._given = place, place is not None
        self._taken: list[slice] = []  # tokens of the place that parts have taken
        self._wide: Tensor | None = None
        self._parts: list[tuple[slice, Tensor]] = []
        self._waits: list[Callable[[], None]] = []

    def after(self, wait: Callable[[], None]) -> None:
        """Register `wait`, to be called before any part that is added next is read."""
        self._waits.append(wait)

    def add(self, at: slice, part: Tensor) -> None:
        """Add a part of these tokens. The tensor becomes this accumulator's own."""
        record_use(part)
        first = self._wide is None and not self._parts
        if first and at == self._whole and self._into is None and part.dtype == self._dtype:
            self._wide = part
            return
        self._parts.append((at, part))
        if self._wide is not None or len(self._parts) > _MOST:
            self.begin_update()

    def alloc(self, at: slice, flat: bool = False) -> Tensor:
        """Return memory for a part of these tokens, for a kernel that is told where to write.

        The memory is in `place` if it can be. With `flat` all samples lie one after another.
        """
        if self._end != self._like.dtype:
            return self._anew(at)
        if self._place is None and self._wide is None and not self._parts and self._into is None:
            self._place = self._anew(self._whole)
        apart = flat and len(self._like) > 1 and at != self._whole
        if self._place is None or apart or not _free(at, self._taken):
            return self._anew(at)
        self._taken.append(at)
        return self._place if at == self._whole else self._place[:, at]

    def add_all(self, parts: Iterable[tuple[slice, Tensor]]) -> None:
        """Add parts, in this order.

        They wait for more while few of them cover the same tokens, or while they must not be read
        yet.
        """
        for at, part in parts:
            if self._wide is None and not self._parts:
                self.add(at, part)
            else:
                self._parts.append((at, part))
        if self._crowded and not self._waits:
            self.begin_update()

    def begin_update(self) -> Tensor:
        """The sum as `accumulation_dtype(dtype)`, to be added to in place."""
        self._join()
        if self._wide is None and _begins_with(self._parts, self._whole):
            part = self._parts.pop(0)[1]
            self._wide = part.to(self._dtype) if self._into is None else self._into.copy_(part)
        elif self._wide is None:
            self._wide = self._empty(self._dtype).zero_()
        self._fold(self._wide)
        return self._wide

    def room(self) -> tuple[Tensor | None, Tensor]:
        """Return (before, sum) for a kernel that adds by itself, as `OutputAccumulator.room`."""
        dtype, self._calls = _dtype_of_call(self._calls, self._end, self._dtype)
        before = None if self._wide is None and not self._parts else self.begin_update()
        if before is not None and (
            dtype == self._dtype or self._into is not None or not before.is_contiguous()
        ):
            return before, before
        total = self._empty(dtype)
        self._wide = total if total.dtype == self._dtype else None
        self._parts = [] if self._wide is not None else [(self._whole, total)]
        return before, total

    def move_to(self, whole: "GradAccumulator", first: int) -> None:
        """Add everything here to another accumulator, whose token `first` is the first one here."""
        wide = [] if self._wide is None else [(self._whole, self._wide)]
        parts = [*wide, *self._parts]
        whole._waits += self._waits
        whole.add_all((slice(first + at.start, first + at.stop), part) for at, part in parts)
        self._parts, self._wide, self._waits = [], None, []

    def samples(self, which: slice) -> "GradAccumulator":
        """Return an accumulator of some samples, in the same memory."""
        if which == slice(None):
            return self
        part = GradAccumulator(self._like[which])
        part._wide = self.begin_update()[which]
        return part

    def finalize(self) -> Tensor:
        """Return the sum in the dtype that it has to have at the end."""
        self._join()
        if self._crowded:
            wide = self.begin_update()  # it stays here: another stream may be reading it
            return wide.to(self._end) if self._place is None else self._place.copy_(wide)
        if self._place is not None:
            if _fill(self._place, self._taken, self._parts):
                self._parts[: len(self._taken)] = [(self._whole, self._place)]
            return self._written(self._place)
        if _begins_with(self._parts, self._whole) and self._parts[0][1].dtype == self._end:
            whole = self._parts.pop(0)
            self._fold(whole[1])
            self._parts = [whole]
            return whole[1]
        return self._written(self._empty(self._end))

    def _written(self, total: Tensor) -> Tensor:
        """Sum all parts in `total` in one pass, except one that lies there already; return it."""
        for at, found in overlaps([(self._whole,), *self._parts]):
            there, parts = total[:, at], [part for (part,) in found[1:]]
            others = [part for part in parts if part.data_ptr() != there.data_ptr()]
            if others or not parts:
                add_(there, *others, fresh=len(others) == len(parts))
        self._parts = [(self._whole, total)]
        return total

    @property
    def _crowded(self) -> bool:
        """Tell whether parts must be summed in a wide dtype: some are already, or many overlap."""
        many = len(self._parts) > _MOST and _deepest(self._parts) > _MOST
        return self._wide is not None or many

    def _join(self) -> None:
        """Let the current stream wait for all parts."""
        wait_side_streams(self._like.device)
        while self._waits:
            self._waits.pop()()

    def _empty(self, dtype: torch.dtype) -> Tensor:
        if self._into is not None:
            return self._into
        if dtype == self._like.dtype == self._end:
            return self.alloc(self._whole)
        if dtype == self._end and self._place is not None:
            return self._place
        return torch.empty_like(self._like, dtype=dtype, memory_format=torch.contiguous_format)

    def _anew(self, at: slice) -> Tensor:
        b, _, *token = self._like.shape
        return self._like.new_empty((b, at.stop - at.start, *token))

    def _fold(self, total: Tensor) -> None:
        parts, self._parts = self._parts, []
        if not self._given:
            self._place, self._taken = None, []
        for at, found in overlaps(parts):
            add_(total[:, at], *(part for (part,) in found))


def _dtype_of_call(
    calls: int | None, last: torch.dtype, running: torch.dtype
) -> tuple[torch.dtype, int | None]:
    """Return the dtype that the next of so many calls writes, and how many are left after it."""
    return last if calls == 1 else running, None if calls is None else calls - 1


def _begins_with(parts: Sequence[tuple[slice, ...]], whole: slice) -> bool:
    """Tell whether the first part has all tokens, so that others can be merged into it."""
    return bool(parts) and parts[0][0] == whole


def _free(at: slice, taken: Sequence[slice]) -> bool:
    """Tell whether these tokens overlap none of those that are taken."""
    return all(at.stop <= other.start or other.stop <= at.start for other in taken)


def _fill(place: Tensor, taken: list[slice], parts: Sequence[tuple]) -> bool:
    """Tell whether the first parts are those that took a place, and together fill it."""
    if not taken or sum(at.stop - at.start for at in taken) < place.shape[1]:
        return False
    first, step = place.data_ptr(), place.stride(1) * place.element_size()
    found = [(at, part.data_ptr()) for at, part, *_ in parts[: len(taken)]]
    return found == [(at, first + at.start * step) for at in taken]


def _deepest(parts: Sequence[tuple[slice, Tensor]]) -> int:
    """Return the largest number of parts that cover one token."""
    ends = sorted(end for at, _ in parts for end in ((at.start, 1), (at.stop, -1)))
    return max(accumulate((by for _, by in ends), initial=0))


def overlaps(parts: Sequence[tuple[slice, ...]]) -> Iterator[tuple[slice, list[list[Tensor]]]]:
    """Yield stretches of tokens, each with what the parts that cover it have there.

    A part is (tokens, tensors...); the tensors' tokens are their second dimension.
    """
    for at, which in disjoint_spans([part[0] for part in parts]):
        found = []
        for i in which:
            here, *tensors = parts[i]
            found.append([t[:, at.start - here.start : at.stop - here.start] for t in tensors])
        yield at, found


def disjoint_spans(spans: Sequence[slice]) -> Iterator[tuple[slice, list[int]]]:
    """Yield disjoint stretches that spans cover, and which of the spans cover each.

    Stretches are cut where any span begins or ends.

    >>> list(disjoint_spans([slice(0, 4), slice(2, 4)]))
    [(slice(0, 2, None), [0]), (slice(2, 4, None), [0, 1])]
    """
    cuts = sorted({end for at in spans for end in (at.start, at.stop)})
    for start, stop in pairwise(cuts):
        which = [i for i, at in enumerate(spans) if at.start <= start and stop <= at.stop]
        if which:
            yield slice(start, stop), which
