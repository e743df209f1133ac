"""What layouts, kernels and transports hand to one another. Shapes, everywhere:

    b batch   n queries held here   m keys of one owner   h query heads   h_kv key heads
    q [b, n, h, d]   k [b, m, h_kv, d]   v [b, m, h_kv, d_v]
    out, dout [b, n, h, d_v]   lse, dlse, delta [b, h, n]

`lse` is the natural logarithm of the sum of exponentials. Running results (out, lse, dq, dk,
dv) are kept in `accumulator(dtype)`: float32 at least, float64 for float64.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ring_attention_pytorch.layouts import Segments, Tile


class Keys(NamedTuple):
    """All that travels together, and whose positions it has."""

    k: Tensor
    v: Tensor
    key_mask: Tensor | None  # bool [b, m], True = may be seen
    segments: Segments

    def samples(self, which: slice) -> "Keys":
        """Those of some samples."""
        return Keys(*(_of(t, which) for t in self[:3]), self.segments)


class Terms(NamedTuple):
    """What a score is: `scale * q.k`, then `c * tanh(score / c)` if softclamp is c.

    `bucket_size` is no part of that: it bounds the rows of a tile that are computed at once.
    """

    scale: float
    softclamp: float | None
    bucket_size: int


class Saved(NamedTuple):
    """The queries' side of a backward pass.

    `delta` is the row sum of dout * out, less dlse; kernels that make their own delta from
    `out` need `dlse` by itself, which is None where nothing was differentiated through lse.
    """

    q: Tensor
    out: Tensor
    lse: Tensor
    dout: Tensor
    delta: Tensor
    dlse: Tensor | None

    def samples(self, which: slice) -> "Saved":
        """Those of some samples."""
        return Saved(*(_of(t, which) for t in self))


class Grads(NamedTuple):
    """Running sums, added to in place."""

    dq: Tensor
    dk: Tensor
    dv: Tensor

    def samples(self, which: slice) -> "Grads":
        """Those of some samples, in the same memory."""
        return Grads(*(_of(t, which) for t in self))


class Tiles(tuple[Tile, ...]):
    """The tiles of a block, with room for what a kernel makes of them once."""

    def once(self, what: Hashable, make: Callable[[], Any]) -> Any:
        """What `make` gives, made when first asked for."""
        if what not in self.__dict__:
            self.__dict__[what] = make()
        return self.__dict__[what]


class Case(NamedTuple):
    """What is asked of a kernel: all that decides whether it can do it.

    `capability` is that of a CUDA device; `named` is True where the kernel was asked for by
    name, which lets it run where it is never the fastest.
    """

    device: str
    dtype: torch.dtype
    softclamp: bool
    d: int = 64
    d_v: int = 64
    capability: tuple[int, int] | None = None
    named: bool = False

    @classmethod
    def of(cls, q: Tensor, v: Tensor, softclamp: float | None) -> "Case":
        """What tensors like these ask for."""
        capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else None
        return cls(
            q.device.type, q.dtype, softclamp is not None, q.shape[-1], v.shape[-1], capability
        )


class Kernel(Protocol):
    """Attention on the visible tiles of one block. A module with these is a kernel.

    A row that sees no key leaves its out and lse as they were, and has no gradient.
    """

    __name__: str

    def problem(self, case: Case) -> str | None:
        """Why this kernel can't do the case; None where it can."""

    def forward(
        self, q: Tensor, keys: Keys, tiles: Sequence[Tile], terms: Terms, out: Tensor, lse: Tensor
    ) -> None:
        """Merge attention to these keys into the running `out` and `lse`, in place."""

    def backward(
        self, saved: Saved, keys: Keys, tiles: Sequence[Tile], terms: Terms, grads: Grads
    ) -> None:
        """Add the gradients of these tiles to `grads`, in place."""


def _of(t: Tensor | None, which: slice) -> Tensor | None:
    return None if t is None else t[which]


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which running sums of tensors of `dtype` are kept."""
    return torch.promote_types(dtype, torch.float32)


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
    weight = torch.sigmoid(part_lse - lse).masked_fill_(part_lse == -torch.inf, 0.0)
    out.lerp_(part_out.to(out.dtype), weight.transpose(1, 2).unsqueeze(-1))
    torch.logaddexp(lse, part_lse, out=lse)


def merge_sinks_(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Merge, in place, a key that every query sees, of score `sinks` [h] and value 0.

    >>> out, lse = torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1)
    >>> merge_sinks_(out, lse, torch.zeros(1))
    >>> out.flatten().tolist(), round(lse.item(), 4)
    ([0.5, 0.5], 0.6931)
    """
    sinks = sinks.to(lse.dtype).unsqueeze(1)
    weight = torch.sigmoid(lse - sinks).masked_fill_(lse == -torch.inf, 0.0)
    out.mul_(weight.transpose(1, 2).unsqueeze(-1))
    torch.logaddexp(lse, sinks, out=lse)


def grad_of_sinks(sinks: Tensor, saved: Saved) -> Tensor:
    """[h], from the queries here. A sink has no value, so its d(score) is -p * delta."""
    p = (sinks.to(saved.lse.dtype).unsqueeze(1) - saved.lse).exp()
    p = p.masked_fill_(saved.lse == -torch.inf, 0.0)
    return -(p * saved.delta).sum(dim=(0, 2)).to(sinks.dtype)
