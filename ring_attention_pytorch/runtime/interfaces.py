"""Interfaces of layouts, kernels and transports. Shapes, everywhere:

    b batch   n queries held here   m keys of one owner   h query heads   h_kv key heads
    q [b, n, h, d]   k [b, m, h_kv, d]   v [b, m, h_kv, d_v]
    out, dout [b, n, h, d_v]   lse, dlse, delta [b, h, n]

`lse` is the natural logarithm of the sum of exponentials. Running results (out, lse, dq, dk, dv)
are kept as `accumulate` says, in float32 at least, in float64 for float64.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ring_attention_pytorch.geometry.segments import Segments
from ring_attention_pytorch.geometry.tiles import Tile
from ring_attention_pytorch.runtime.accumulate import GradAccumulator, OutputAccumulator
from ring_attention_pytorch.runtime.deferred import Deferred
from ring_attention_pytorch.runtime.dropout import Dropout
from ring_attention_pytorch.runtime.rowwise import sum_of_products
from ring_attention_pytorch.schedule.steps import Schedule

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# features that a kernel may lack; each is a field of `KernelRequest`
FEATURES = frozenset(
    {
        "window",
        "key_mask",
        "softclamp",
        "unusual_scale",
        "deterministic",
        "alibi",
        "mask_mod",
        "dropout",
    }
)


class KVBlock(NamedTuple):
    """A block of keys and values that travel together. `own` is true for this rank's keys."""

    k: Tensor
    v: Tensor
    key_mask: Tensor | None  # bool [b, m], True = may be seen
    segments: Segments
    own: bool = False

    def without_unseen(self, reached: Tensor | None = None) -> "KVBlock":
        """Return the block with zeros in place of the keys and values that no query may see.

        These are what `key_mask` hides, and what is not `reached`, bool `[1, m]`. NaN may be there,
        as in padding, and probability 0 times NaN is NaN, in forward and in backward.
        """
        shown = self.key_mask
        if reached is not None:
            shown = reached if shown is None else shown & reached
        if shown is None:
            return self
        zero, shown = self.k.new_zeros(()), shown[..., None, None]
        k, v = (torch.where(shown, t, zero) for t in (self.k, self.v))
        return self._replace(k=k, v=v)

    def samples(self, which: slice) -> "KVBlock":
        """Return the block of some samples."""
        if which == slice(None):
            return self
        k, v, key_mask = (_of(t, which) for t in self[:3])
        return self._replace(k=k, v=v, key_mask=key_mask)


class ScoreMods(NamedTuple):
    """Terms of a score: `scale * q.k`, then `c * tanh(score / c)` if softclamp is c.

    With `alibi` [h] a score loses its head's slope times the distance of the positions in `Tiles`.
    `mask_mod` says of (sample, head, position of query, of key) whether the key may be seen.
    `dropout` drops probabilities by the numbers in `Tiles`; lse is without it. `bucket_size`
    changes no score: it bounds the rows of a tile that are computed at once.
    """

    scale: float
    softclamp: float | None
    bucket_size: int
    alibi: Tensor | None = None
    mask_mod: MaskMod | None = None
    dropout: Dropout | None = None


@dataclass(frozen=True)
class Residuals:
    """Residuals of the queries for a backward pass; dlse is None where nothing came through lse."""

    q: Tensor
    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None

    @cached_property
    def delta(self) -> Tensor:
        """The row sum of dout * out, less dlse: d(score) = p * (dout.v - delta), [b, h, n].

        Under dropout dout.v stands for what dropout leaves of it, and so it does in out. Computed
        once, for the kernels that ask for it.
        """
        delta = sum_of_products(self.dout, self.out)
        return delta if self.dlse is None else delta - self.dlse

    def samples(self, which: slice) -> "Residuals":
        """Return the residuals of some samples."""
        if which == slice(None):
            return self
        given = (self.q, self.out, self.lse, self.dout, self.dlse)
        return Residuals(*(_of(t, which) for t in given))


class Grads(NamedTuple):
    """Accumulators of the gradients of this rank's queries, and of these keys and values.

    A kernel that has finished dk and dv may put off dq (`dq.deferred`, if given), so that dk and dv
    can start their transfer.
    """

    dq: GradAccumulator
    dk: GradAccumulator
    dv: GradAccumulator

    def samples(self, which: slice) -> "Grads":
        """Return the accumulators of some samples, in the same memory."""
        if which == slice(None):
            return self
        return Grads(*(total.samples(which) for total in self))


class Tiles(tuple[Tile, ...]):
    """The tiles of a block, with a cache for what a kernel makes of them once.

    `rows_at` and `cols_at` are the positions of the block's queries and keys, int32 `[n]` and
    `[m]`, where `ScoreMods` need them; `first` is its first sample's number. Dropout draws by
    `row_numbers` and `col_numbers`, int32 too, no two of them alike: documents share positions.
    `concurrent` allows a kernel that returns parts to compute them on side streams.

    Plans that differ in nothing but their key mask share `made`; each has a `masked` of its own.
    """

    first: int = 0
    concurrent: bool = False

    rows_at: Tensor | Any = None
    cols_at: Tensor | Any = None
    row_numbers: Tensor | Any = None
    col_numbers: Tensor | Any = None

    def __init__(self, _: Iterable[Tile] = ()) -> None:
        self.made: dict[Hashable, Any] = {}
        self.masked: dict[Hashable, Any] = {}

    def once(self, what: Hashable, make: Callable[[], Any], *, of_mask: bool = False) -> Any:
        """Return what `make` gives, made when first asked for; `of_mask` if the mask is in it."""
        kept = self.masked if of_mask else self.made
        if what not in kept:
            kept[what] = make()
        return kept[what]

    def of_another_mask(self) -> "Tiles":
        """Return the same tiles without what was made of a key mask.

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
    """A request to a kernel: everything that decides whether the kernel can do it.

    `capability` is the compute capability of a CUDA device. `packed` says that there are documents,
    each of which takes a call with some kernels. `named` is True where the kernel was asked for by
    name, which lets it run where it is never the fastest.
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
        """Return what tensors like these, options and torch.use_deterministic_algorithms ask for.

        `others` are window, key_mask, softclamp and mask_mod, None where they are not given.
        """
        return cls(
            q.device.type,
            q.dtype,
            d=q.shape[-1],
            d_v=v.shape[-1],
            capability=torch.cuda.get_device_capability(q.device) if q.is_cuda else None,
            unusual_scale=scale is not None and scale < torch.finfo(torch.float32).tiny,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            alibi=alibi_slopes is not None,
            dropout=dropout > 0,
            packed=packed,
            **{name: value is not None for name, value in others.items()},
        )


class Dependency(NamedTuple):
    """A package that a kernel needs: its name, from which version on, and how to install it."""

    name: str
    module: str
    min_version: str
    built: bool = False  # when it is installed, with the torch that is there

    @property
    def command(self) -> str:
        """The pip command that installs the package."""
        command = f'pip install "{self.name}>={self.min_version}"'
        return f"{command} --no-build-isolation" if self.built else command


class Traits(NamedTuple):
    """Traits of a kernel's calls, which decide nothing about whether it can do a case."""

    preemptible: bool = False  # a backward call that has begun gives way to one of higher priority
    square: bool = False  # of causal tiles it knows those whose diagonal begins at the top left
    # merges by itself: for few tokens one call of all keys is faster than several
    fuses_merge: bool = False
    keys_first: bool = False  # backward makes dk and dv first, and leaves dq for `dq.deferred`
    # all that it does are PyTorch's operations and `opaque` functions, so a tape can hold its calls
    taped: bool = False

    def with_backward(self, other: "Traits") -> "Traits":
        """Return the traits of the forward of this kernel with the backward of another."""
        return other._replace(
            square=self.square and other.square,
            fuses_merge=self.fuses_merge and other.fuses_merge,
            taped=self.taped and other.taped,
        )


class Capabilities(NamedTuple):
    """Capabilities of a kernel. None is no limit."""

    devices: tuple[str, ...] | None = None
    dtypes: tuple[torch.dtype, ...] | None = None
    min_capability: tuple[int, int] | None = None  # compute capability
    max_capability: tuple[int, int] | None = None
    max_head_dim: int | None = None  # head size
    head_dim_multiple: int = 1  # head sizes must be multiples of it
    one_head_dim: bool = False  # d and d_v must be the same
    varlen: bool = False  # computes many tiles in a few calls: the first choice for documents
    traits: Traits = Traits()
    features: frozenset[str] = FEATURES
    package: Dependency | None = None


class Kernel(Protocol):
    """The interface of a kernel: attention on the visible tiles of one block. Modules implement it.

    A row that sees no key leaves its out and lse as they were, and has no gradient.
    """

    CAN: Capabilities

    def forward(
        self,
        q: Tensor,
        keys: KVBlock,
        tiles: Tiles,
        terms: ScoreMods,
        result: OutputAccumulator,
    ) -> None:
        """Merge attention to these keys into `result`."""

    def backward(
        self, saved: Residuals, keys: KVBlock, tiles: Tiles, terms: ScoreMods, grads: Grads
    ) -> None:
        """Add the gradients of these tiles to `grads`."""


class Transport(Protocol):
    """The interface of a transport: it brings keys to this rank, and their gradients home.

    All ranks make the same exchanges in the same order, whatever they hold.
    """

    @property
    def fabric(self) -> Any:
        """What carries keys among which ranks, a `comm.fabric.Fabric`."""
        ...

    @property
    def keeps(self) -> bool:
        """Tell whether others' keys come, and stay where they are until the last call has ended."""
        ...

    @property
    def schedule(self) -> Schedule:
        """What all ranks do, in the order in which `stream` and `stream_back` do it."""
        ...

    def stream(self, own_keys: KVBlock) -> Iterator[KVBlock]:
        """Yield own keys, then all others that anyone needs, those that come next under way."""
        ...

    def stream_back(
        self,
        own_keys: KVBlock,
        own: tuple[GradAccumulator, GradAccumulator],
        deferred: Deferred | None = None,
    ) -> Iterator[tuple[KVBlock, tuple[GradAccumulator, GradAccumulator]]]:
        """Yield the blocks of `stream`, each with accumulators (dk, dv) to add its gradients to.

        `own` are the accumulators of own keys. They get what every rank added, and are complete
        when the stream has ended. What a kernel leaves for `deferred` is done before anything is
        waited for; of the last block it may still be left then.
        """
        ...


def _of(t: Tensor | None, which: slice) -> Any:
    return None if t is None else t[which]


def sink_weights(sinks: Tensor, lse: Tensor) -> Tensor:
    """Return the weight [b, h, n] that each row gives to the sink of its head; sinks are [h]."""
    p = (sinks.to(lse.dtype).unsqueeze(1) - lse).exp()
    return p.masked_fill_(lse == -torch.inf, 0.0)


def grad_of_sinks(sinks: Tensor, saved: Residuals, into: Tensor | None = None) -> Tensor:
    """Return the gradient [h] of sinks, from the queries here, `into` that memory if it is given.

    A sink has no value, so its d(score) is -p * delta.
    """
    total = (sink_weights(sinks, saved.lse) * saved.delta).sum(dim=(0, 2))
    return torch.neg(total.to(sinks.dtype), out=into)


def tangent_of_delta(saved: Residuals, along: Residuals) -> Tensor:
    """Return the tangent [b, h, n] of delta, `along` being the tangents of what was saved."""
    tangent = sum_of_products(along.dout, saved.out) + sum_of_products(saved.dout, along.out)
    return tangent if along.dlse is None else tangent - along.dlse
