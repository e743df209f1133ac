"""What layouts, kernels and transports hand to one another. Shapes, everywhere:

    b batch   n queries held here   m keys of one owner   h query heads   h_kv key heads
    q [b, n, h, d]   k [b, m, h_kv, d]   v [b, m, h_kv, d_v]
    out, dout [b, n, h, d_v]   lse, dlse, delta [b, h, n]

`lse` is the natural logarithm of the sum of exponentials. Results (out, lse, dq, dk, dv) under
way are kept as `accumulate` says, in float32 at least, in float64 for float64.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ring_attention_pytorch.geometry.layouts import Segments
from ring_attention_pytorch.geometry.tiles import Tile
from ring_attention_pytorch.runtime.accumulate import GradAccumulator, OutputAccumulator
from ring_attention_pytorch.runtime.dropout import Dropout
from ring_attention_pytorch.runtime.rowwise import sum_of_products

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# what a kernel may lack; each is a field of `KernelRequest`
FEATURES = frozenset({
    "window", "key_mask", "softclamp", "unusual_scale", "deterministic", "alibi", "mask_mod",
    "dropout",
})  # fmt: skip


class KVBlock(NamedTuple):
    """All that travels together, and whose positions it has. `own` are this rank's."""

    k: Tensor
    v: Tensor
    key_mask: Tensor | None  # bool [b, m], True = may be seen
    segments: Segments
    own: bool = False

    def samples(self, which: slice) -> "KVBlock":
        """Those of some samples."""
        if which == slice(None):
            return self
        return KVBlock(*(_of(t, which) for t in self[:3]), *self[3:])


class ScoreMods(NamedTuple):
    """What a score is: `scale * q.k`, then `c * tanh(score / c)` if softclamp is c.

    Less `alibi` [h] times the distance of the positions in `Tiles`, where there is alibi; and
    `mask_mod` says of (sample, head, position of query, of key) whether the key may be seen.
    `dropout` drops probabilities by the numbers in `Tiles`; lse is without it.
    `bucket_size` is no part of that: it bounds the rows of a tile that are computed at once.
    """

    scale: float
    softclamp: float | None
    bucket_size: int
    alibi: Tensor | None = None
    mask_mod: MaskMod | None = None
    dropout: Dropout | None = None


@dataclass(frozen=True)
class Residuals:
    """The queries' side of a backward pass; dlse is None where nothing came through lse."""

    q: Tensor
    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None

    @cached_property
    def delta(self) -> Tensor:
        """The row sum of dout * out, less dlse: d(score) = p * (dout.v - delta).

        Under dropout dout.v is what is left of it, and so it is in out.
        Made once, for the kernels that ask for it.
        """
        delta = sum_of_products(self.dout, self.out)
        return delta if self.dlse is None else delta - self.dlse

    def samples(self, which: slice) -> "Residuals":
        """Those of some samples."""
        if which == slice(None):
            return self
        given = (self.q, self.out, self.lse, self.dout, self.dlse)
        return Residuals(*(_of(t, which) for t in given))


class Grads(NamedTuple):
    """What the gradients of this rank's queries, and of these keys, sum to so far."""

    dq: GradAccumulator
    dk: GradAccumulator
    dv: GradAccumulator

    def samples(self, which: slice) -> "Grads":
        """Those of some samples, in the same memory."""
        return Grads(*(total.samples(which) for total in self))


class Tiles(tuple[Tile, ...]):
    """The tiles of a block, with room for what a kernel makes of them once.

    `rows_at` and `cols_at` are the positions of its queries and keys, int32 `[n]` and `[m]`,
    where `ScoreMods` need them; `first` is its first sample's number. Dropout draws by
    `row_numbers` and `col_numbers`, int32 too, no two of them alike: documents share positions.
    `concurrent` allows a kernel that returns parts to compute them on side streams.

    Plans that differ in nothing but their key mask share `made`; each has a `masked` of its own.
    """

    first: int = 0
    concurrent: bool = False

    rows_at: Tensor | None = None
    cols_at: Tensor | None = None
    row_numbers: Tensor | None = None
    col_numbers: Tensor | None = None

    def __init__(self, _: Iterable[Tile] = ()) -> None:
        self.made: dict[Hashable, Any] = {}
        self.masked: dict[Hashable, Any] = {}

    def once(self, what: Hashable, make: Callable[[], Any], *, of_mask: bool = False) -> Any:
        """What `make` gives, made when first asked for; `of_mask` if the key mask is in it."""
        kept = self.masked if of_mask else self.made
        if what not in kept:
            kept[what] = make()
        return kept[what]

    def of_another_mask(self) -> "Tiles":
        """The same tiles, but for what was made of a key mask.

        >>> tiles = Tiles()
        >>> tiles.once("both", int), tiles.once("of a mask", int, of_mask=True)
        (0, 0)
        >>> found = tiles.of_another_mask()
        >>> found.once("both", str), found.once("of a mask", str, of_mask=True)
        (0, '')
        """
        found = copy(self)
        found.masked = {}
        return found


class KernelRequest(NamedTuple):
    """What is asked of a kernel: all that decides whether it can do it.

    `capability` is that of a CUDA device; `packed` says that there are documents, of which some
    kernels take a call each; `named` is True where the kernel was asked for by name, which lets
    it run where it is never the fastest.
    """

    device: str
    dtype: torch.dtype
    softclamp: bool = False
    d: int = 64
    d_v: int = 64
    capability: tuple[int, int] | None = None
    window: bool = False
    key_mask: bool = False
    unusual_scale: bool = False  # zero, negative, or zero in float32
    deterministic: bool = False
    alibi: bool = False
    mask_mod: bool = False
    dropout: bool = False
    packed: bool = False
    named: bool = False

    @classmethod
    def of(
        cls,
        q: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        alibi_slopes: Tensor | None = None,
        dropout: float = 0.0,
        packed: bool = False,
        **others: object,
    ) -> "KernelRequest":
        """What tensors like these and options ask for, torch.use_deterministic_algorithms too.

        `others` are window, key_mask, softclamp and mask_mod, None where they are not given.
        """
        return cls(
            q.device.type, q.dtype, d=q.shape[-1], d_v=v.shape[-1],
            capability=torch.cuda.get_device_capability(q.device) if q.is_cuda else None,
            unusual_scale=scale is not None and scale < torch.finfo(torch.float32).tiny,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            alibi=alibi_slopes is not None, dropout=dropout > 0, packed=packed,
            **{name: value is not None for name, value in others.items()},
        )  # fmt: skip


class Dependency(NamedTuple):
    """What must be installed for a kernel, from which version on, and how."""

    name: str
    module: str
    min_version: str
    built: bool = False  # where it is installed, with the torch that is there

    @property
    def command(self) -> str:
        """What installs it."""
        command = f'pip install "{self.name}>={self.min_version}"'
        return f"{command} --no-build-isolation" if self.built else command


class Capabilities(NamedTuple):
    """What a kernel can do. None stands for everything."""

    devices: tuple[str, ...] | None = None
    dtypes: tuple[torch.dtype, ...] | None = None
    min_capability: tuple[int, int] | None = None  # compute capability
    max_capability: tuple[int, int] | None = None
    max_head_dim: int | None = None  # head size
    head_dim_multiple: int = 1  # of which head sizes must be
    one_head_dim: bool = False  # d and d_v are the same
    varlen: bool = False  # does many tiles in a few calls: the first choice for documents
    preemptible: bool = False  # backward, a call that has begun gives way to one of higher priority
    fuses_merge: bool = (
        False  # by itself: for few tokens one call of all keys is faster than several
    )
    features: frozenset[str] = FEATURES
    package: Dependency | None = None


class Kernel(Protocol):
    """Attention on the visible tiles of one block. A module with these is a kernel.

    A row that sees no key leaves its out and lse as they were, and has no gradient.
    """

    CAN: Capabilities

    def forward(
        self,
        q: Tensor,
        keys: KVBlock,
        tiles: Sequence[Tile],
        terms: ScoreMods,
        result: OutputAccumulator,
    ) -> None:
        """Merge attention to these keys into `result`."""

    def backward(
        self, saved: Residuals, keys: KVBlock, tiles: Sequence[Tile], terms: ScoreMods, grads: Grads
    ) -> None:
        """Add the gradients of these tiles to `grads`."""


class Transport(Protocol):
    """How keys reach this rank, and how their gradients go home.

    All ranks make the same exchanges in the same order, whatever they hold.
    """

    @property
    def keeps(self) -> bool:
        """Whether others' keys come, and stay where they are until the last call has ended."""

    @property
    def overtaken(self) -> bool:
        """Whether backward own keys come in one block, whose call the others' overtake."""

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can hold what it does."""

    def follow_stream(self) -> Hashable:
        """Before a graph: let the current stream wait for calls on other ones that used what is
        shared, and say what that is now."""

    def comes(self, own: Segments, back: bool) -> Iterator[Segments]:
        """The positions of what `stream`, or `stream_back`, brings."""

    def stream(self, keys: KVBlock) -> Iterator[KVBlock]:
        """Own keys, then all others that anyone needs, those that come next under way."""

    def stream_back(
        self, own_keys: KVBlock, own: tuple[GradAccumulator, GradAccumulator]
    ) -> Iterator[tuple[KVBlock, tuple[GradAccumulator, GradAccumulator]]]:
        """The same, each with (dk, dv) to add to; the owner's own get what every rank added.

        `own` are those of own keys, complete when the stream has ended.
        """


def _of(t: Tensor | None, which: slice) -> Tensor | None:
    return None if t is None else t[which]


def sink_weights(sinks: Tensor, lse: Tensor) -> Tensor:
    """[b, h, n]: what each row gives of its weight to the sink of its head [h]."""
    p = (sinks.to(lse.dtype).unsqueeze(1) - lse).exp()
    return p.masked_fill_(lse == -torch.inf, 0.0)


def grad_of_sinks(sinks: Tensor, saved: Residuals) -> Tensor:
    """[h], from the queries here. A sink has no value, so its d(score) is -p * delta."""
    return -(sink_weights(sinks, saved.lse) * saved.delta).sum(dim=(0, 2)).to(sinks.dtype)


def tangent_of_delta(saved: Residuals, along: Residuals) -> Tensor:
    """[b, h, n], `along` being the tangents of what was saved."""
    found = sum_of_products(along.dout, saved.out) + sum_of_products(saved.dout, along.out)
    return found if along.dlse is None else found - along.dlse
