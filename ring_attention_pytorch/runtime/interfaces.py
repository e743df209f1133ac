"""Interfaces of layouts, kernels and transports. Shapes, everywhere:

    b batch   n queries held here   m keys of one owner   h query heads   h_kv key heads
    q [b, n, h, d]   k [b, m, h_kv, d]   v [b, m, h_kv, d_v]
    out, dout [b, n, h, d_v]   lse, dlse, delta [b, h, n]

`lse` is the natural logarithm of the sum of exponentials. Running results (out, lse, dq, dk, dv)
have `accumulation_dtype`: at least float32, and float64 for float64.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ring_attention_pytorch.geometry.segments import Segments
from ring_attention_pytorch.geometry.tiles import Tile
from ring_attention_pytorch.runtime.accumulate import Deferred, GradAccumulator, OutputAccumulator
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
    """Keys and values in memory together, on which a kernel computes; `own`: this rank's keys."""

    k: Tensor
    v: Tensor
    key_mask: Tensor | None  # bool [b, m], True = may be seen
    segments: Segments
    own: bool = False

    def without_unseen(self, reached: Tensor | None = None) -> "KVBlock":
        """Return the block with zeros in place of the keys and values that no query may see.

        Those are hidden by `key_mask` or not `reached`, bool `[1, m]`. They can be NaN, as in
        padding, and probability 0 times NaN is NaN, in forward and in backward.
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

    `alibi` [h] subtracts the head's slope times the distance of the positions in `Tiles`.
    `mask_mod(sample, head, query position, key position)` returns True for a visible pair.
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
    """Residuals of the queries for a backward pass; dlse is None if lse has no gradient."""

    q: Tensor
    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None

    @cached_property
    def delta(self) -> Tensor:
        """The row sum of dout * out, minus dlse: d(score) = p * (dout.v - delta), [b, h, n].

        With dropout dout.v has the mask and factor of dropout, as v has in out. Computed once, on
        first use.
        """
        delta = sum_of_products(self.dout, self.out)
        return delta if self.dlse is None else delta - self.dlse

    def samples(self, which: slice) -> "Residuals":
        """Return the residuals of some samples."""
        if which == slice(None):
            return self
        given = (self.q, self.out, self.lse, self.dout, self.dlse)
        return Residuals(*(_of(t, which) for t in given))

    def heads(self, which: slice | None) -> "Residuals":
        """Return the residuals of some heads, with their delta; None is all of them."""
        if which is None:
            return self
        q, out, dout = (t[:, :, which] for t in (self.q, self.out, self.dout))
        dlse = None if self.dlse is None else self.dlse[:, which]
        found = Residuals(q, out, self.lse[:, which], dout, dlse)
        vars(found)["delta"] = self.delta[:, which]  # computed once, for all heads
        return found


class Grads(NamedTuple):
    """Accumulators of the gradients of this rank's queries, and of these keys and values.

    A kernel that has finished dk and dv can put off dq (`dq.deferred`, if given), so that dk and dv
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
    """The tiles of a block, with a cache for tables that a kernel makes from them.

    `rows_at` and `cols_at` are the positions of the block's queries and keys, int32 `[n]` and
    `[m]`, if `ScoreMods` need them; `first` is its first sample's number. Dropout draws by
    `row_numbers` and `col_numbers`, int32 and distinct; positions repeat between documents.
    `concurrent` allows a kernel that returns parts to compute them on side streams.

    Plans that differ only in their key mask share `made`; each has its own `masked`.
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
        """Return `make()`, cached by the key `what`; `of_mask` if it depends on the key mask."""
        kept = self.masked if of_mask else self.made
        if what not in kept:
            kept[what] = make()
        return kept[what]

    def of_another_mask(self) -> "Tiles":
        """Return the same tiles without the cached values that depend on a key mask.

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

    `capability` is the compute capability of a CUDA device. `packed`: there are documents, each of
    which takes a call of some kernels. `named`: the user named the kernel, so it can run even where
    it is never the fastest.
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
        """Return the request of these tensors, options and torch.use_deterministic_algorithms.

        `others` are window, key_mask, softclamp and mask_mod, None if not given.
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
    """A package that a kernel needs: its name, its oldest version, and how to install it."""

    name: str
    module: str
    min_version: str
    built: bool = False  # compiled at installation, with the installed torch

    @property
    def command(self) -> str:
        """The pip command that installs the package."""
        command = f'pip install "{self.name}>={self.min_version}"'
        return f"{command} --no-build-isolation" if self.built else command


class Traits(NamedTuple):
    """Traits of a kernel's calls, for schedules; they don't decide which cases it can do."""

    preemptible: bool = False  # a backward call that has begun gives way to one of higher priority
    square: bool = False  # causal tiles must have their diagonal begin at the top left
    # merges by itself: for few tokens one call of all keys is faster than several
    fuses_merge: bool = False
    keys_first: bool = False  # backward makes dk and dv first, and puts off dq by `dq.deferred`
    # runs only PyTorch's operations and `opaque` functions, so a tape can record its calls
    taped: bool = False

    def with_backward(self, other: "Traits") -> "Traits":
        """Return the traits of this kernel's forward with another kernel's backward."""
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
    head_dims: Sequence[int] | None = None  # the only ones
    unequal_head_dims: Sequence[tuple[int, int]] | None = None  # d and d_v that differ; None: any
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


class SelectedKernel(NamedTuple):
    """A kernel with its name, or the forward of one with the backward of another.

    `codec` is a `runtime.codec.Codec`, if keys are encoded: `runtime.codec.DecodingKernel`.
    """

    name: str
    forward: Callable[..., None]
    backward: Callable[..., None]
    traits: Traits
    codec: Any = None

    def begin(self, params: Sequence[Tensor]) -> Any:
        """Return the kernel for one call, with the codec's parameters if there is one."""
        return self

    def grads(self) -> tuple[Tensor, ...]:
        """Return the gradients of parameters: there are none."""
        return ()


class Transport(Protocol):
    """The interface of a transport: fetches keys for this rank, and sends gradients to owners.

    All ranks make the same exchanges in the same order, even if they have no tokens.
    """

    @property
    def fabric(self) -> Any:
        """The `comm.fabric.Fabric` that moves the bytes, with its ring of ranks."""
        ...

    @property
    def keeps(self) -> bool:
        """True if others' keys stay in memory, unchanged, until the last kernel call has ended."""
        ...

    @property
    def schedule(self) -> Schedule:
        """The programs of all ranks, which `stream` and `stream_back` run."""
        ...

    def stream(self, own_keys: KVBlock) -> Iterator[KVBlock]:
        """Yield own keys, then others' keys part by part, while the next transfer is in flight."""
        ...

    def stream_back(
        self,
        own_keys: KVBlock,
        own: tuple[GradAccumulator, GradAccumulator],
        deferred: Deferred | None = None,
    ) -> Iterator[tuple[KVBlock, tuple[GradAccumulator, GradAccumulator]]]:
        """Yield the blocks of `stream`, each with the accumulators (dk, dv) of its gradients.

        `own` are the accumulators of own keys. They receive every rank's gradients, and are
        complete when the stream has ended. Work that a kernel puts off by `deferred` runs before
        the next wait; the last block's can still be left when the stream ends.
        """
        ...


def _of(t: Tensor | None, which: slice) -> Any:
    return None if t is None else t[which]


def sink_weights(sinks: Tensor, lse: Tensor) -> Tensor:
    """Return the weight [b, h, n] that each row gives to the sink of its head; sinks are [h]."""
    p = (sinks.to(lse.dtype).unsqueeze(1) - lse).exp()
    return p.masked_fill_(lse == -torch.inf, 0.0)


def grad_of_sinks(sinks: Tensor, saved: Residuals) -> Tensor:
    """Return the gradient [h] of sinks from this rank's queries.

    A sink has no value, so its d(score) is -p * delta.
    """
    total = (sink_weights(sinks, saved.lse) * saved.delta).sum(dim=(0, 2))
    return -total.to(sinks.dtype)
