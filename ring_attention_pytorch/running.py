"""Results under way: parts of one attention, merged or summed in wide numbers and rounded once.

A kernel that keeps a running result in memory asks for `running()` and works in place there, or
for `room`, which need not be filled with zeros first. A kernel that returns a part by itself
hands it to `add`: the first part of all tokens is taken as it is. So where one call is all there
is nothing is copied, cast or filled.
"""

from functools import lru_cache

import torch
from einops import einsum
from torch import Tensor


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which running sums of tensors of `dtype` are kept."""
    return torch.promote_types(dtype, torch.float32)


class Result:
    """The (out, lse) of queries like q and values like v, which have seen nothing yet.

    `only` says that one call of a kernel will bring all that there is.
    """

    def __init__(self, q: Tensor, v: Tensor, only: bool = False) -> None:
        self._q, self._d_v, self._dtype, self._only = q, v.shape[-1], accumulator(q.dtype), only
        self._held: tuple[Tensor, Tensor] | None = None
        self._late: tuple[slice, Tensor, Tensor] | None = None

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Merge what these rows saw. Both tensors become this result's own."""
        if self._held is None and rows == slice(0, self._q.shape[1]):
            self._held = out, lse
        elif self._held is not None and self._late is None and self._held[0].dtype != self._dtype:
            self._late = rows, out, lse  # maybe it is the last: then one rounding is enough
        else:
            _merge_rows(self.running(), rows, out, lse)

    def running(self) -> tuple[Tensor, Tensor]:
        """Both as `accumulator(dtype)`, to be merged into in place."""
        if self._held is None:
            (b, n, h, _), q, dtype = self._q.shape, self._q, self._dtype
            out = q.new_zeros((b, n, h, self._d_v), dtype=dtype)
            self._held = out, q.new_full((b, h, n), -torch.inf, dtype=dtype)
        if self._held[0].dtype != self._dtype:
            self._held = self._held[0].to(self._dtype), self._held[1]
            self._add_late()
        return self._held

    def room(self, rows: slice) -> tuple[Tensor, Tensor, bool]:
        """(out, lse, fresh). Where fresh, nothing is in them yet, and all of these rows, which
        are all there are, must be written; else they are the running ones."""
        if self._held is not None or rows != slice(0, self._q.shape[1]):
            return *self.running(), False
        (b, n, h, _), q = self._q.shape, self._q
        out = q.new_empty((b, n, h, self._d_v), dtype=q.dtype if self._only else self._dtype)
        self._held = out, q.new_empty((b, h, n), dtype=self._dtype)
        return *self._held, True

    def final(self) -> tuple[Tensor, Tensor]:
        """out in q's dtype, lse in the accumulator's."""
        if self._held is None:
            self.running()
        self._add_late()
        out, lse = self._held
        return out.to(self._q.dtype), lse

    def _add_late(self) -> None:
        if self._late is not None:
            late, self._late = self._late, None
            _merge_rows(self._held, *late)


class Sum:
    """A sum of parts that lie along the tokens of a tensor like this one, [b, n, ...].

    `only` says that one call of a kernel will bring all that there is. `into` is memory of the
    accumulator's dtype in which the sum has to be.
    """

    def __init__(self, like: Tensor, only: bool = False, into: Tensor | None = None) -> None:
        self._like, self._dtype, self._only = like, accumulator(like.dtype), only
        self._into = into
        self._held: Tensor | None = None
        self._late: tuple[slice, Tensor] | None = None

    def add(self, at: slice, part: Tensor) -> None:
        """Add a part of these tokens. The tensor becomes this sum's own."""
        if self._held is None and at == slice(0, self._like.shape[1]):
            self._held = part if self._into is None else self._into.copy_(part)
        elif self._held is not None and self._late is None and self._held.dtype != self._dtype:
            self._late = at, part
        else:
            self.running()[:, at] += part

    def running(self) -> Tensor:
        """The sum as `accumulator(dtype)`, to be added to in place."""
        if self._held is None:
            self._held = self._empty(self._dtype).zero_()
        if self._held.dtype != self._dtype:
            self._held = self._held.to(self._dtype)
            self._add_late()
        return self._held

    def room(self, at: slice) -> tuple[Tensor, bool]:
        """(sum, fresh), as `Result.room`."""
        if self._held is not None or at != slice(0, self._like.shape[1]):
            return self.running(), False
        self._held = self._empty(self._like.dtype if self._only else self._dtype)
        return self._held, True

    def final(self) -> Tensor:
        """The sum in the dtype of what it is like."""
        if self._held is None:
            return torch.zeros_like(self._like)
        self._add_late()
        return self._held.to(self._like.dtype)

    def _empty(self, dtype: torch.dtype) -> Tensor:
        if self._into is not None:
            return self._into
        return torch.empty_like(self._like, dtype=dtype, memory_format=torch.contiguous_format)

    def _add_late(self) -> None:
        if self._late is not None:
            (at, part), self._late = self._late, None
            self._held[:, at] += part


def merge_(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge, in place, attention to further keys into `out` [b, n, h, d] and `lse` [b, h, n].

    Either lse may be -inf, or both: a side that saw nothing has no weight, and no NaN comes.
    The convex combination never overflows, however far the two lse are apart.

    >>> out, lse = torch.zeros(1, 1, 1, 2), torch.full((1, 1, 1), -torch.inf)
    >>> merge_(out, lse, torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1))
    >>> merge_(out, lse, torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1))
    >>> out.flatten().tolist(), round(lse.item(), 4)
    ([0.5, 0.5], 0.6931)
    """
    if out.is_cuda and out.dtype != torch.float64 and _has_triton():
        from ring_attention_pytorch._triton_rows import fused_merge_

        fused_merge_(out, lse, part_out, part_lse)
        return
    weight = torch.sigmoid(part_lse - lse).masked_fill_(part_lse == -torch.inf, 0.0)
    wide = accumulator(out.dtype)
    merged = out.to(wide).lerp_(part_out.to(wide), weight.transpose(1, 2).unsqueeze(-1))
    if merged is not out:
        out.copy_(merged)
    torch.logaddexp(lse, part_lse, out=lse)


def sum_of_products(a: Tensor, b: Tensor) -> Tensor:
    """[b, h, n] in the accumulator's dtype: of two `[b, n, h, d]` each row's inner product."""
    if a.is_cuda and a.dtype != torch.float64 and _has_triton():
        from ring_attention_pytorch._triton_rows import fused_sum_of_products

        return fused_sum_of_products(a, b)
    wide = accumulator(a.dtype)
    return einsum(a.to(wide), b.to(wide), "b n h d, b n h d -> b h n")


def _merge_rows(held: tuple[Tensor, Tensor], rows: slice, out: Tensor, lse: Tensor) -> None:
    merge_(held[0][:, rows], held[1][..., rows], out, lse)


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True
