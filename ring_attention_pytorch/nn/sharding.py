"""Differentiable sharding of whole sequences, and its inverse; only needed tokens are sent.

Backward differentiates the sum of all ranks' results (`comm/collectives.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ring_attention_pytorch.arguments import checked, checks_of
from ring_attention_pytorch.comm.collectives import all_gather_along, all_to_all
from ring_attention_pytorch.geometry.balance import deal
from ring_attention_pytorch.geometry.documents import BatchDocuments, Borders, check_documents
from ring_attention_pytorch.geometry.layouts import (
    Layout,
    Segments,
    all_segments,
    count,
    resolve_layout,
    segment_positions,
)
from ring_attention_pytorch.plan.known_shards import (
    Made,
    check_known_shards,
    check_whole,
    made_as,
    remember,
)
from ring_attention_pytorch.plan.packing import gather_packings
from ring_attention_pytorch.plan.placement import attention_ring, current, note_whole
from ring_attention_pytorch.ranks.agreement import (
    Check,
    Report,
    agree,
    error_of,
    report_to_group,
    typed,
)
from ring_attention_pytorch.ranks.ring import Caller, Group, Ring, as_ring
from ring_attention_pytorch.tensor_kinds import check_plain, has_values


@checked
def shard_sequence(
    x: Tensor, *, dim: int = 1, layout: Layout = "contiguous", group: Group = None
) -> Tensor:
    """Return this rank's shard of a sequence that is whole on every rank of the ring.

    Args:
        x: any tensor whose dimension `dim` is the sequence: ids, labels, masks, embeddings.
        layout: "contiguous", "striped", "zigzag" or a result of `balanced`.
        group: the ring; None is the default group, or this process alone.

    Returns:
        x at this rank's positions, in the layout's order. Nothing is sent.

    Raises:
        ValueError: the layout is unknown or was made for another sequence, or x has no such dim.

    >>> shard_sequence(torch.arange(4)[None])
    tensor([[0, 1, 2, 3]])
    """
    ring = as_ring(group)
    with checks_of("shard_sequence"):
        _check_dim(x, dim)
        dim = dim % x.ndim
        check_whole(ring, {"x": x}, dim)
        segments = all_segments(layout, ring.size, x.shape[dim])[ring.rank]
    shard = x.index_select(dim, segment_positions(segments, x.device))
    if (known := made_as(x)) is not None and not known.whole:  # of groups within groups
        return shard
    return remember(shard, Made(tuple(ring.ranks), ring.size, layout, x.shape[dim], dim))


@typed(report_to_group("unshard_sequence"), apart=True)
def unshard_sequence(
    x: Tensor, *, length: int, dim: int = 1, layout: Layout = "contiguous", group: Group = None
) -> Tensor:
    """Gather the whole sequence, on every rank of the ring, from the ranks' parts.

    Args:
        x: this rank's part, as returned by `shard_sequence` or a module.
        length: tokens of the whole sequence.
        dim, layout, group: as for `shard_sequence`.

    Returns:
        The whole sequence. Backward sums all ranks' gradients of a part, on the part's owner.

    Raises:
        ValueError: a part's length doesn't fit the layout, or other sizes differ; on every rank.

    >>> unshard_sequence(torch.arange(4)[None], length=4)
    tensor([[0, 1, 2, 3]])
    """
    ring = as_ring(group)
    same = {"length": length, "dim": dim, "layout": str(layout), "dtype": x.dtype}
    same |= _grad_mode(x) | {"device": x.device.type}
    if (error := error_of(partial(_check_part, x, length, dim, layout, ring))) is None:
        dim = dim % x.ndim
        same["the rest of x's shape"] = [*x.shape[:dim], *x.shape[dim + 1 :]]
    agree(ring, "unshard_sequence", same, check=error)
    segments = all_segments(layout, ring.size, length)
    note_whole("unshard_sequence")
    caller = Caller(ring, "unshard_sequence", 0)
    parts = all_gather_along(dim, x, map(count, segments), caller)
    made = Made(tuple(ring.ranks), ring.size, layout, length, dim, whole=True)
    return remember(_in_order(parts, segments, dim), made)


def _check_part(x: Tensor, length: int, dim: int, layout: Layout, ring: Ring) -> None:
    """Raise ValueError unless x is this rank's part of a sequence."""
    if length < 0:
        raise ValueError(f"length must be at least 0, got {length}")
    lengths = [count(s) for s in all_segments(layout, ring.size, length)]
    _check_dim(x, dim)
    if ring.size > 1 and not has_values(x):
        raise ValueError(f"x must have values to be sent, got a {type(x).__name__} on {x.device}")
    if x.shape[dim] != lengths[ring.rank]:
        raise ValueError(
            f"layout={layout!r} puts {lengths} of {length} tokens on the ranks, "
            f"rank {ring.rank} has {x.shape[dim]}"
        )
    check_known_shards(ring, {"x": x}, layout, dim % x.ndim)


@dataclass(frozen=True)
class AutoShard:
    """A sharding of every rank's own batch of whole sequences over rings of consecutive ranks.

    A ring concatenates its ranks' batches in rank order. Each rank holds the same positions of
    all these samples.
    """

    ring: Ring
    layout: Layout
    length: int
    batch_sizes: tuple[int, ...]
    packing: BatchDocuments | None = None  # the documents of all samples of the ring

    @classmethod
    def make(
        cls,
        x: Tensor,
        *,
        ring_seq_size: int,
        layout: Layout,
        group: Group,
        ring_size: int | None,
        same: Mapping[str, Any],
        packing: BatchDocuments | None = None,
    ) -> "AutoShard":
        """Choose rings for x `[b, n, ...]`; all ranks of the group call this and agree on it.

        `same` are further values that must be equal on all ranks, `packing` the documents of this
        rank's samples.

        Raises:
            ValueError: n differs within a ring, or other values between ranks; on every rank.
        """
        everyone = as_ring(group)
        if everyone.size == 1:
            ring_size = None  # with one process, a ring of any size is that process
        check = partial(_check_rings, everyone, ring_size)
        agreed = dict(same, ring_seq_size=ring_seq_size, ring_size=ring_size, layout=str(layout))
        agreed.update(dtype=x.dtype, device=x.device.type, width=list(x.shape[2:]))
        agreed.update(_grad_mode(x))
        b, n = x.shape[:2]
        own = {"b": b, "n": n}
        packed = {"documents": None if packing is None else "given"}
        notes = agree(everyone, "automatic sharding", agreed, own, everywhere=packed, check=check)
        lengths = [note["n"] for note in notes]
        size = ring_size or smallest_ring(max(lengths), ring_seq_size, everyone.size)
        for first in range(0, len(lengths), size):
            if len(set(lengths[first : first + size])) > 1:
                raise ValueError(
                    "automatic sharding: the ranks of one ring must bring equal lengths, got "
                    f"{lengths} with rings of {size}; pad them and pass a mask"
                )
        ring = everyone if size == everyone.size else Ring(everyone.group, size)
        first = everyone.rank // size * size
        batch_sizes = tuple(note["b"] for note in notes[first : first + size])
        if packing is not None:
            packing = gather_packings(ring, packing)
        return cls(ring, layout, n, batch_sizes, packing)

    @property
    def segments(self) -> tuple[Segments, ...]:
        return all_segments(self.layout, self.ring.size, self.length)

    def positions(self, device: torch.device | None = None) -> Tensor:
        """Return this rank's positions, int64 `[n]`."""
        return segment_positions(self.segments[self.ring.rank], device)

    def like(self, x: Tensor) -> "AutoShard":
        """Make the sharding of a context x `[b, m, ...]` of the same samples: contiguous parts."""
        b, length, *width = x.shape
        samples = self.batch_sizes[self.ring.rank]

        def check() -> None:
            if b != samples:
                raise ValueError(f"context must be of {samples} samples as x is, got {b}")

        same = {"context length": length, "dtype": x.dtype, "width": width}
        same |= _grad_mode(x)
        agree(self.ring, "automatic sharding of the context", same, check=check)
        return AutoShard(self.ring, "contiguous", length, self.batch_sizes)

    def shard(self, x: Tensor) -> Tensor:
        """Shard this rank's batch `[b, N, ...]`; return its shard `[B, n, ...]` of the ring's."""
        pieces = [x[:, segment_positions(s, x.device)] for s in self.segments]
        part = pieces[self.ring.rank].shape[1:]
        shapes = [(b, *part) for b in self.batch_sizes]
        received = all_to_all(pieces, shapes, Caller(self.ring, "automatic sharding", 0))
        return torch.cat(received)

    def unshard(self, x: Tensor) -> Tensor:
        """Undo `shard`: turn parts `[B, n, ...]` into this rank's whole samples `[b, N, ...]`."""
        b = self.batch_sizes[self.ring.rank]
        width = x.shape[2:]
        shapes = [(b, count(s), *width) for s in self.segments]
        pieces = list(x.split(self.batch_sizes))
        parts = all_to_all(pieces, shapes, Caller(self.ring, "undoing automatic sharding", 0))
        return _in_order(torch.cat(parts, dim=1), self.segments, dim=1)


@dataclass(frozen=True)
class ShardConfig:
    """The ring options of a module, checked and resolved: how its tokens are sharded."""

    ring_attn: bool
    auto: bool
    ring_seq_size: int
    layout: Layout
    group: Group
    causal: bool
    free: bool  # the user named no layout: a faster one can be chosen

    @classmethod
    def make(
        cls,
        ring_attn: bool,
        *,
        auto: bool | None = False,
        causal: bool = False,
        ring_seq_size: int = 1,
        layout: Layout | None = None,
        striped: bool = False,
        group: Group = None,
    ) -> "ShardConfig":
        """Resolve options; raise ValueError if they need ring_attn or contradict one another."""
        auto = ring_attn if auto is None else auto
        layout = resolve_layout(layout, striped)
        for name, given in {"auto_shard_seq": auto, "a layout": layout, "a group": group}.items():
            if given and not ring_attn:
                raise ValueError(f"{name} needs ring_attn=True: nothing is spread without a ring")
        if ring_seq_size < 1:
            raise ValueError(f"ring_seq_size must be at least 1, got {ring_seq_size}")
        free = auto and layout is None
        if layout is None:
            layout = "zigzag" if auto and causal else "contiguous"
        return cls(ring_attn, auto, ring_seq_size, layout, group, causal, free)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardConfig":
        """Return this very object: it is frozen, and process groups can't be copied."""
        return self

    def of_layers(self) -> dict[str, Any]:
        """Return the options for layers inside the module, which get sharded tokens."""
        layout = self.layout if self.ring_attn else None
        return dict(
            ring_attn=self.ring_attn, layout=layout, group=self.group, causal=self.causal
        )  # fmt: skip

    def on(self, off: bool) -> bool:
        """Return True if a call runs over the ring; `off` disables it for this call."""
        return self.ring_attn and not off

    @property
    def layout_here(self) -> Layout:
        """Layout of a call: the module's own, or if it names none the enclosing batch block's."""
        placement = current()
        if placement is None or self.layout != "contiguous":
            return self.layout
        return placement.layout

    def ring(self, on: bool, ring_size: int | None) -> Ring:
        """Return the ring of a call, or if it is off a ring of this process alone."""
        if on:
            return attention_ring(self.group, ring_size)
        if ring_size is not None:
            raise ValueError(f"ring_size={ring_size} was given while the ring is off")
        return Ring.alone()

    def check(self, check: Check, on: bool, ring_size: int | None, caller: str) -> None:
        """Run a check; if it fails, raise its error on all ranks in place of the agreement."""
        if (error := error_of(check)) is None:
            return
        if on and self.auto:
            agree(as_ring(self.group), "automatic sharding", {}, check=error)
        agree(self.ring(on, ring_size), caller, {}, check=error)

    def shard(
        self,
        x: Tensor,
        ring_size: int | None,
        same: Mapping[str, Any],
        packing: BatchDocuments | None = None,
        window: int | None = None,
    ) -> AutoShard:
        """Choose the automatic sharding of whole sequences x; balance it if there are documents."""
        shards = AutoShard.make(
            x, ring_seq_size=self.ring_seq_size, layout=self.layout, group=self.group,
            ring_size=ring_size, same=same, packing=packing,
        )  # fmt: skip
        if not (self.free and shards.packing):
            return shards
        layout = deal(shards.packing, shards.ring.size, self.causal, window)
        return replace(shards, layout=layout)


def report_to_plan(given: Any) -> Callable[[ValueError], None]:
    """Return a function that writes a failure report for the ranks of a plan, or of several."""
    plan = next(iter(given), None) if isinstance(given, Sequence) else given
    ring = getattr(plan, "ring", None)
    return (ring if isinstance(ring, Ring) else Ring.alone()).report_failure


def report_to_group_of_module(caller: str) -> Report:
    """Make the `report` of `typed` for methods of modules with a `ShardConfig`.

    `caller` is the name under which these methods agree with other ranks. With a plan they don't:
    then a failure report is written for ranks that will wait.
    """

    def report(given: dict[str, Any], error: ValueError) -> None:
        plan, plans = given.get("plan"), given.get("plans")
        if plan is not None or plans is not None:
            report_to_plan(plans if plan is None else plan)(error)
            return
        module: Any = given.get("self")
        size = given.get("ring_size")
        if not hasattr(module, "spread"):  # the method of the class, called without a module
            return
        off = given.get("force_ring_reduce_off") is True
        on = module.spread.on(off or getattr(module, "force_regular_attn", False))
        if not on or type(size) is not int:
            size = None
        module.spread.check(error, on, size, caller)

    return report


def check_packed(
    x: Tensor, documents: Tensor | None, cu_seqlens: Borders | None, *, able: bool, whole: bool
) -> None:
    """Raise ValueError if documents don't fit a module's tokens x.

    `able`: the call supports documents; `whole`: x are whole sequences, not shards.
    """
    if documents is None and cu_seqlens is None:
        return
    if not able:
        raise ValueError(
            "documents and cu_seqlens are for tokens among themselves, by a ring's kernels"
        )
    check_documents(documents, cu_seqlens, x.shape, x.shape[1] if whole else None)


def check_mask(name: str, mask: Tensor | None, x: Tensor) -> None:
    """Raise ValueError unless mask is a bool mask of tokens x `[b, n, ...]`, or None."""
    shape = list(x.shape[:2])
    if mask is None:
        return
    if mask.device != x.device:
        raise ValueError(f"{name} must be on {x.device} with its tokens, got {mask.device}")
    if mask.dtype != torch.bool or list(mask.shape) != shape:
        raise ValueError(
            f"{name} must be bool {shape}, True where a token may be seen, "
            f"got {mask.dtype} {list(mask.shape)}"
        )


def _check_rings(everyone: Ring, ring_size: int | None) -> None:
    """Raise ValueError if the group can't be split into rings of this size."""
    if current() is not None:
        raise ValueError(
            "the tokens of the batch whose block this is are sharded already; make the module "
            "with auto_shard_seq=False"
        )
    if ring_size is not None and (ring_size < 1 or everyone.size % ring_size):
        raise ValueError(
            f"ring_size must divide the group's {everyone.size} ranks, got {ring_size}"
        )


def smallest_ring(length: int, ring_seq_size: int, world: int) -> int:
    """Return the least divisor of `world` whose ranks can hold the sequence, or `world` itself.

    >>> [smallest_ring(n, ring_seq_size=512, world=12) for n in (0, 512, 513, 2000, 10**6)]
    [1, 1, 2, 4, 12]
    """
    for size in range(1, world):
        if world % size == 0 and size * ring_seq_size >= length:
            return size
    return world


def _grad_mode(x: Tensor) -> dict[str, Any]:
    """Return values that ranks must agree on, so that all of them run backward, or none does."""
    grad = torch.is_grad_enabled()
    requires_grad = grad and x.requires_grad
    return {"grad mode": grad, "requires_grad": requires_grad}


def _check_dim(x: Tensor, dim: int) -> None:
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"x {list(x.shape)} has no dimension {dim}")
    check_plain("x", x)


def _in_order(x: Tensor, segments: tuple[Segments, ...], dim: int) -> Tensor:
    """Sort x along dim from the order of ranks to the order of positions."""
    positions = torch.cat([segment_positions(s) for s in segments])
    if bool((positions.diff() > 0).all()):
        return x
    order = positions.argsort()
    return x.index_select(dim, order.to(x.device))
