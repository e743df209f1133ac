"""Results under way: parts of one attention, merged or summed in wide numbers and rounded once.

A kernel that keeps a running result in memory asks for `running()` and works in place there, or
for `room`, which need not be filled with zeros first. A kernel that returns a part by itself
hands it to `add`: the first part of all tokens is taken as it is. So where one call is all there
is nothing is copied, cast or filled. Parts are transposed without einops: where tokens are few, the
host's time for each of them counts.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
from einops import einsum
from torch import Tensor

from ring_attention_pytorch.lanes import hand_over, join

_MOST = 4  # parts that wait to be merged at once


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which running sums of tensors of `dtype` are kept."""
    return torch.promote_types(dtype, torch.float32)


class Result:
    """The (out, lse) of queries like q and values like v, which have seen nothing yet.

    `calls` of a kernel will bring all that there is, if that is known.
    """

    def __init__(self, q: Tensor, v: Tensor, calls: int | None = None) -> None:
        self._q, self._d_v, self._dtype, self._calls = q, v.shape[-1], accumulator(q.dtype), calls
        self._whole = slice(0, q.shape[1])
        self._wide: tuple[Tensor, Tensor] | None = None
        self._parts: list[tuple[slice, Tensor, Tensor]] = []

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Merge what these rows saw. Both tensors become this result's own."""
        hand_over(out, lse)
        first = self._wide is None and not self._parts
        if first and rows == self._whole and out.dtype == self._dtype:
            self._wide = out, lse
            return
        self._parts.append((rows, out, lse))
        if self._wide is not None or len(self._parts) > _MOST:
            self.running()

    def running(self) -> tuple[Tensor, Tensor]:
        """Both as `accumulator(dtype)`, to be merged into in place."""
        join(self._q.device)
        if self._wide is None and _begins_with(self._parts, self._whole):
            _, out, lse = self._parts.pop(0)
            self._wide = out.to(self._dtype), lse
        elif self._wide is None:
            out, lse = self._empty(self._dtype)
            self._wide = out.zero_(), lse.fill_(-torch.inf)
        self._fold(*self._wide)
        return self._wide

    def room(self) -> tuple[Tensor | None, Tensor, Tensor]:
        """(before, out, lse) for a call of a kernel that merges by itself.

        Where nothing was before, it is None, and all of out and lse must be written. Else lse is
        the running one, and so is out; or it is other memory, like `before` but in q's dtype,
        for the last call: then all of it must be written.
        """
        dtype, self._calls = _dtype_of_call(self._calls, self._q.dtype, self._dtype)
        if self._wide is None and not self._parts:
            out, lse = self._empty(dtype)
            self.add(self._whole, out, lse)
            return None, out, lse
        before, lse = self.running()
        if dtype == self._dtype or not before.is_contiguous():
            return before, before, lse
        out = torch.empty_like(before, dtype=dtype)
        self._wide = None
        self.add(self._whole, out, lse)
        return before, out, lse

    def samples(self, which: slice) -> "Result":
        """That of some samples, in the same memory."""
        if which == slice(None):
            return self
        out, lse = self.running()
        part = Result(self._q[which], out)
        part._wide = out[which], lse[which]
        return part

    def add_sinks(self, sinks: Tensor) -> None:
        """Merge a key that every query sees, of score `sinks` [h] and value 0.

        >>> result = Result(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2))
        >>> result.add(slice(0, 1), torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1))
        >>> result.add_sinks(torch.zeros(1))
        >>> [t.flatten().tolist() for t in result.final()]
        [[0.5, 0.5], [0.6931471824645996]]
        """
        out, lse = self.running()
        sinks = sinks.to(lse.dtype).unsqueeze(1)
        weight = torch.sigmoid(lse - sinks).masked_fill_(lse == -torch.inf, 0.0)
        out.mul_(weight.transpose(1, 2).unsqueeze(-1))
        torch.logaddexp(lse, sinks, out=lse)

    def final(self) -> tuple[Tensor, Tensor]:
        """out in q's dtype, lse in the accumulator's."""
        join(self._q.device)
        if self._wide is None and _begins_with(self._parts, self._whole):
            whole = self._parts.pop(0)
            self._fold(*whole[1:])
            self._parts = [whole]
            return whole[1:]
        out, lse = self.running()
        return out.to(self._q.dtype), lse

    def _empty(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        (b, n, h, _), q = self._q.shape, self._q
        return q.new_empty((b, n, h, self._d_v), dtype=dtype), q.new_empty(
            (b, h, n), dtype=self._dtype
        )

    def _fold(self, out: Tensor, lse: Tensor) -> None:
        parts = [(rows, o, x.transpose(1, 2)) for rows, o, x in self._parts]
        self._parts = []
        for rows, found in covered(parts):
            others = (t for o, x in found for t in (o, x.transpose(1, 2)))
            merge_(out[:, rows], lse[..., rows], *others)


class Sum:
    """A sum of parts that lie along the tokens of a tensor like this one, [b, n, ...].

    `calls` of a kernel will bring all that there is, if that is known. `into` is memory of the
    accumulator's dtype in which the sum has to be; `place` is memory like `like` in which it has to
    be at the end.
    """

    def __init__(
        self,
        like: Tensor,
        calls: int | None = None,
        into: Tensor | None = None,
        place: Tensor | None = None,
    ) -> None:
        self._like, self._dtype, self._calls = like, accumulator(like.dtype), calls
        self._whole, self._into = slice(0, like.shape[1]), into
        self._place, self._taken = place, False
        self._wide: Tensor | None = None
        self._parts: list[tuple[slice, Tensor]] = []
        self._waits: list[Callable[[], None]] = []

    def after(self, wait: Callable[[], None]) -> None:
        """What is added next must not be read before this was called."""
        self._waits.append(wait)

    def add(self, at: slice, part: Tensor) -> None:
        """Add a part of these tokens. The tensor becomes this sum's own."""
        hand_over(part)
        first = self._wide is None and not self._parts
        if first and at == self._whole and self._into is None and part.dtype == self._dtype:
            self._wide = part
            return
        self._parts.append((at, part))
        if self._wide is not None or len(self._parts) > _MOST:
            self.running()

    def blank(self, at: slice) -> Tensor:
        """Memory for a part of these tokens, for a kernel that is told where to make it; in `place`
        if it can be."""
        if at == self._whole and self._place is not None and not self._taken:
            self._taken = True
            return self._place
        b, _, *token = self._like.shape
        return self._like.new_empty((b, at.stop - at.start, *token))

    def add_all(self, parts: Iterable[tuple[slice, Tensor]]) -> None:
        """Add parts, in this order. They wait for more while few lie upon one another, or while
        they are not to be read."""
        for at, part in parts:
            if self._wide is None and not self._parts:
                self.add(at, part)
            else:
                self._parts.append((at, part))
        if self._crowded and not self._waits:
            self.running()

    def running(self) -> Tensor:
        """The sum as `accumulator(dtype)`, to be added to in place."""
        self._join()
        if self._wide is None and _begins_with(self._parts, self._whole):
            part = self._parts.pop(0)[1]
            self._wide = part.to(self._dtype) if self._into is None else self._into.copy_(part)
        elif self._wide is None:
            self._wide = self._empty(self._dtype).zero_()
        self._fold(self._wide)
        return self._wide

    def room(self) -> tuple[Tensor | None, Tensor]:
        """(before, sum), as `Result.room`."""
        dtype, self._calls = _dtype_of_call(self._calls, self._like.dtype, self._dtype)
        before = None if self._wide is None and not self._parts else self.running()
        if before is not None and (
            dtype == self._dtype or self._into is not None or not before.is_contiguous()
        ):
            return before, before
        total = self._empty(dtype)
        self._wide = total if total.dtype == self._dtype else None
        self._parts = [] if self._wide is not None else [(self._whole, total)]
        return before, total

    def move_to(self, whole: "Sum", first: int) -> None:
        """Add all that there is to another sum, whose token `first` is the first one here."""
        wide = [] if self._wide is None else [(self._whole, self._wide)]
        parts = [*wide, *self._parts]
        whole._waits += self._waits
        whole.add_all((slice(first + at.start, first + at.stop), part) for at, part in parts)
        self._parts, self._wide, self._waits = [], None, []

    def samples(self, which: slice) -> "Sum":
        """That of some samples, in the same memory."""
        if which == slice(None):
            return self
        part = Sum(self._like[which])
        part._wide = self.running()[which]
        return part

    def final(self) -> Tensor:
        """The sum in the dtype of what it is like."""
        self._join()
        if self._crowded:
            wide = self.running()  # which stays: another stream may be reading it
            return wide.to(self._like.dtype) if self._place is None else self._place.copy_(wide)
        if self._place is not None:
            return self._written(self._place)
        if _begins_with(self._parts, self._whole):
            whole = self._parts.pop(0)
            self._fold(whole[1])
            self._parts = [whole]
            return whole[1]
        return self._written(self._empty(self._like.dtype))

    def _written(self, total: Tensor) -> Tensor:
        """That, with all parts added up in one pass, but one that was made there."""
        for at, found in covered([(self._whole,), *self._parts]):
            there, parts = total[:, at], [part for (part,) in found[1:]]
            others = [part for part in parts if part.data_ptr() != there.data_ptr()]
            if others or not parts:
                add_(there, *others, fresh=len(others) == len(parts))
        self._parts = [(self._whole, total)]
        return total

    @property
    def _crowded(self) -> bool:
        """Whether parts are to be added in wide numbers: some are, or many lie upon one another."""
        many = len(self._parts) > _MOST and _deepest(self._parts) > _MOST
        return self._wide is not None or many

    def _join(self) -> None:
        """Let the current stream wait for all parts."""
        join(self._like.device)
        while self._waits:
            self._waits.pop()()

    def _empty(self, dtype: torch.dtype) -> Tensor:
        if self._into is not None:
            return self._into
        if dtype == self._like.dtype:
            return self.blank(self._whole)
        return torch.empty_like(self._like, dtype=dtype, memory_format=torch.contiguous_format)

    def _fold(self, total: Tensor) -> None:
        parts, self._parts = self._parts, []
        for at, found in covered(parts):
            add_(total[:, at], *(part for (part,) in found))


def _dtype_of_call(
    calls: int | None, last: torch.dtype, running: torch.dtype
) -> tuple[torch.dtype, int | None]:
    """That of what the next of so many calls writes, and how many are left after it."""
    return last if calls == 1 else running, None if calls is None else calls - 1


def _begins_with(parts: Sequence[tuple[slice, ...]], whole: slice) -> bool:
    """Whether the first part has all tokens, so that others can go into it."""
    return bool(parts) and parts[0][0] == whole


def _deepest(parts: Sequence[tuple[slice, Tensor]]) -> int:
    """How many parts lie upon one another, at most."""
    ends = sorted(end for at, _ in parts for end in ((at.start, 1), (at.stop, -1)))
    return max(accumulate((by for _, by in ends), initial=0))


def covered(parts: Sequence[tuple[slice, ...]]) -> Iterator[tuple[slice, list[list[Tensor]]]]:
    """Stretches of tokens, and what the parts that cover each of them have there.

    A part is (tokens, tensors...); the tensors' tokens are their second dimension.
    """
    cuts = sorted({end for at, *_ in parts for end in (at.start, at.stop)})
    for start, stop in pairwise(cuts):
        found = [
            [t[:, start - at.start : stop - at.start] for t in tensors]
            for at, *tensors in parts
            if at.start <= start and stop <= at.stop
        ]
        if found:
            yield slice(start, stop), found


def merge_(out: Tensor, lse: Tensor, *parts: Tensor) -> None:
    """Merge, in place, attention to further keys into `out` [b, n, h, d] and `lse` [b, h, n].

    `parts` are out and lse of one part, of the next, and so on. Any lse may be -inf, or all: a
    side that saw nothing has no weight, and no NaN comes. The convex combination never
    overflows, however far two lse are apart. It is rounded once.

    >>> out, lse = torch.zeros(1, 1, 1, 2), torch.full((1, 1, 1), -torch.inf)
    >>> merge_(out, lse, torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1))
    >>> merge_(out, lse, torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1))
    >>> out.flatten().tolist(), round(lse.item(), 4)
    ([0.5, 0.5], 0.6931)
    """
    if out.is_cuda and out.dtype != torch.float64 and has_triton():
        from ring_attention_pytorch._triton_rows import fused_merge_

        fused_merge_(out, lse, *parts)
        return
    merged, wide = out.to(accumulator(out.dtype)), accumulator(out.dtype)
    for part, part_lse in zip(parts[::2], parts[1::2]):
        weight = torch.sigmoid(part_lse - lse).masked_fill_(part_lse == -torch.inf, 0.0)
        merged.lerp_(part.to(wide), weight.transpose(1, 2).unsqueeze(-1))
        torch.logaddexp(lse, part_lse, out=lse)
    if merged is not out:
        out.copy_(merged)


def add_(total: Tensor, *parts: Tensor, fresh: bool = False) -> None:
    """Add, in place, to `[b, n, h, d]`, to nothing where that is fresh.

    Up to eight parts are rounded once.
    """
    if fresh and not parts:
        total.zero_()
    elif not fresh and len(parts) == 1:
        total.add_(parts[0])  # rounded once, too, and the host launches it sooner than our kernel
    elif total.is_cuda and total.dtype != torch.float64 and has_triton():
        from ring_attention_pytorch._triton_rows import fused_add_

        fused_add_(total, *parts, fresh=fresh)  # one too: in CUDA graphs copies have no priority
    elif fresh and len(parts) == 1:
        total.copy_(parts[0])
    else:
        wide = (parts[0] if fresh else total).to(accumulator(total.dtype), copy=fresh)
        for part in parts[fresh:]:
            wide += part
        if wide is not total:
            total.copy_(wide)


def sum_of_products(a: Tensor, b: Tensor) -> Tensor:
    """[b, h, n] in the accumulator's dtype: of two `[b, n, h, d]` each row's inner product."""
    if a.is_cuda and a.dtype != torch.float64 and has_triton():
        from ring_attention_pytorch._triton_rows import fused_sum_of_products

        return fused_sum_of_products(a, b)
    wide = accumulator(a.dtype)
    return einsum(a.to(wide), b.to(wide), "b n h d, b n h d -> b h n")


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Whether the passes over memory that are fused can be."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True
