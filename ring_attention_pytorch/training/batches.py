"""Shard batches of whole sequences, and decide all that needs the sequence whole.

the batch, the same on all ranks of a ring      input_ids, labels, cu_seqlens ...
    │ shard_batch
this rank's tokens                              input_ids, position_ids, shift_labels ...
and where they are                              layout, documents, key mask: `with batch:`
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ring_attention_pytorch.arguments import check_least, checked, known_device
from ring_attention_pytorch.geometry.balance import deal
from ring_attention_pytorch.geometry.documents import BatchDocuments, check_documents
from ring_attention_pytorch.geometry.layouts import (
    Layout,
    all_segments,
    check_layout,
    count,
    segment_positions,
)
from ring_attention_pytorch.nn.loss import next_tokens
from ring_attention_pytorch.nn.sharding import unshard_sequence
from ring_attention_pytorch.plan.known_shards import Made, check_whole, remember
from ring_attention_pytorch.plan.packing import local_packing
from ring_attention_pytorch.plan.placement import Placement, current
from ring_attention_pytorch.ranks.agreement import Report, agree, error_of, report_to_group, typed
from ring_attention_pytorch.ranks.ring import Group, Ring, as_ring
from ring_attention_pytorch.runtime.digests import digest
from ring_attention_pytorch.tensor_kinds import check_plain
from ring_attention_pytorch.training.comparison import (
    WORDS,
    Digest,
    UnreadDigest,
    compare_now,
    digest_of_batch,
    leave_to_block,
)
from ring_attention_pytorch.training.labels import documents_of_positions, next_of_whole

AUTO = "auto"
_TOKENS = ("input_ids", "inputs_embeds")
_MASKS = ("attention_mask", "key_mask")
_MADE = ("shift_labels", "num_items_in_batch")
_READ = (*_MASKS, "documents", "cu_seqlens", "position_ids", "labels", "loss_weights")


def report_to_ring_of_batch(caller: str, name: str = "batch") -> Report:
    """Return the `report` for `typed`, for functions whose argument `name` is a batch.

    It reports an error to the batch's ring, as `caller`; without a batch, to the block's ring.
    With neither, to the default group: if the ring is another group, its other ranks wait.
    """

    def report(given: dict[str, Any], error: ValueError) -> None:
        batch, placement = given.get(name), current()
        ring = batch.ring if isinstance(batch, ShardedBatch) else None
        if ring is None:
            ring = as_ring(None) if placement is None else placement.ring
        agree(ring, caller, {}, check=error)

    return report


@dataclass(frozen=True, eq=False)
class ShardedBatch(MutableMapping[str, Any]):
    """A rank's part of a batch: its tensors by name, and where its tokens are.

    A mapping of the batch's tensors, each cut to this rank's tokens: `batch["input_ids"]`. Tensors
    can be replaced. It always has "position_ids", int64 `[b, n]` or with rows `[3, b, n]`. With
    labels it has "shift_labels" `[b, n]`, the label that each token predicts. The names are the
    ones that Hugging Face's losses take.

    Inside `with batch:` attention takes layout, documents and mask from it. Call backward() inside,
    too, if anything is checkpointed.

    Attributes:
        layout, length: which rank has which tokens, and the number of tokens.
        rank, ring_size: this rank's place in the ring, and the ring's number of ranks.
        packing: the documents of each sample; None if each is one.
        key_mask: bool `[b, n]`, True for tokens that can be seen; None if all can.
        num_items: the number of real labels in the whole batch, a 0-d tensor; None without labels.
        in_place: the labels of the tokens themselves, `[b, n]`; None without labels, or with
            labels that were already shifted.
        positions_given: whether the batch had positions; otherwise they were counted.
        ignore_index: the label of tokens that predict nothing.
        group: the ring; None is the default group.
        state: where its `SequenceShardedDataset` continues after this batch, for
            `load_state_dict`; None for other batches.
    """

    tensors: MutableMapping[str, Any]
    layout: Layout
    length: int
    rank: int
    ring_size: int
    packing: BatchDocuments | None = None
    key_mask: Tensor | None = None
    num_items: Tensor | None = None
    in_place: Tensor | None = None
    positions_given: bool = False
    ignore_index: int = -100
    group: Group = None
    uncompared: int | None = None  # a digest that ranks have not compared yet
    digest: Digest | None = None  # the same, also after they have
    whole_mask: int | None = None  # a digest of the whole sequences' mask
    state: Mapping[str, int | None] | None = None
    _blocks: list[Placement] = field(default_factory=list, init=False, repr=False)
    # items of all rings of a group, by its ranks, once they have been summed
    items_of: dict[tuple[int, ...], Tensor] = field(default_factory=dict, init=False, repr=False)

    def __getitem__(self, name: str) -> Any:
        if name == "labels" and name not in self.tensors:
            raise KeyError("labels: this batch has them shifted, as batch.labels")
        return self.tensors[name]

    # without stacking, a DataLoader turns an immutable mapping into a plain dict
    def __setitem__(self, name: str, value: Any) -> None:
        self.tensors[name] = value

    def __delitem__(self, name: str) -> None:
        del self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    @property
    def labels(self) -> Tensor:
        """The label that each of this rank's tokens predicts, `[b, n]`."""
        return self.tensors["shift_labels"]

    @property
    def counts(self) -> list[int]:
        """The number of tokens on each rank of the ring."""
        return [count(each) for each in all_segments(self.layout, self.ring_size, self.length)]

    @property
    def ring(self) -> Ring:
        """The ring of the batch; this process alone without a process group."""
        return as_ring(self.group, self.ring_size)

    @checked
    def over(self, group: Group) -> "ShardedBatch":
        """Return this batch with the ring `group`, for a collator's batches, which have none."""
        return replace(self, group=group)

    @checked
    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> "ShardedBatch":
        """Return this batch with its tensors on a device."""
        place = known_device(device)
        return self._each(lambda t: t.to(place, non_blocking=non_blocking))

    @checked
    def pin_memory(self, device: torch.device | str | None = None) -> "ShardedBatch":
        """Return this batch in pinned memory, as DataLoader asks for it."""
        return self._each(lambda t: t.pin_memory())

    def _each(self, change: Callable[[Tensor], Tensor]) -> "ShardedBatch":
        def of(value: Any) -> Any:
            return change(value) if isinstance(value, Tensor) else value

        tensors = {name: of(value) for name, value in self.tensors.items()}
        more = {name: of(getattr(self, name)) for name in ("key_mask", "num_items", "in_place")}
        return replace(self, tensors=tensors, **more)

    def __enter__(self) -> "ShardedBatch":
        """Open the block in which attention uses this batch; all ranks of the ring do so together.

        Raises:
            ValueError: the group is not the ring that the batch was sharded for, or its ranks have
                different batches; on all ranks.
        """
        ring = self.ring
        error = error_of(partial(self._check_ring, ring))
        if self.uncompared is not None or error is not None:
            same = {**self._kinds(), WORDS: self.uncompared}
            agree(ring, "a batch", same, check=error)
            object.__setattr__(self, "uncompared", None)
        leave_to_block(ring, self.digest)
        placement = Placement(
            ring, self.layout, self.length, self.packing, self.key_mask, self.whole_mask,
            self.digest,
        )  # fmt: skip
        self._blocks.append(placement.__enter__())
        return self

    def _kinds(self) -> dict[str, object]:
        """Return the length, the layout and the tensors, which ranks compare before values."""
        tensors = [
            f"{name}: {[*t.shape[:1]]} of {t.dtype}"
            for name, t in self.tensors.items()
            if isinstance(t, Tensor)
        ]
        same = {"length": self.length, "layout": str(self.layout)}
        return {**same, "tensors (samples)": tensors}

    def _check_ring(self, ring: Ring) -> None:
        """Raise ValueError if this is not the ring that the batch was sharded for."""
        if (ring.rank, ring.size) != (self.rank, self.ring_size):
            raise ValueError(
                f"the batch was sharded for rank {self.rank} of {self.ring_size}, this is rank "
                f"{ring.rank} of {ring.size}; say the ring with batch.over(group)"
            )

    def __exit__(self, *error: Any) -> None:
        self._blocks.pop().__exit__(*error)
        if not any(error) and isinstance(self.digest, UnreadDigest):
            compare_now(self.ring, self.digest)

    @typed(report_to_ring_of_batch("unshard_sequence", "self"))
    def unshard(self, x: Tensor, *, dim: int = 1) -> Tensor:
        """Gather a tensor of each rank's tokens into whole sequences, as `unshard_sequence`."""
        how: dict[str, Any] = dict(length=self.length, layout=self.layout, group=self.ring)
        return unshard_sequence(x, dim=dim, **how)

    @typed(report_to_ring_of_batch("rolling a batch", "self"))
    def roll(self, x: Tensor, ahead: int, nothing: int) -> Tensor:
        """Fetch each token's value from the token `ahead` places later in its document.

        All ranks of the ring call this. It makes labels of later tokens: for example,
        `batch.roll(batch.labels, 1, -100)` has the label of the next token but one.

        Args:
            x: `[b, n]`, of this rank's tokens.
            ahead: at least 0.
            nothing: the value of tokens whose document ends before.

        Raises:
            ValueError: x is of another shape, or ahead is negative; on all ranks.
        """
        segments = all_segments(self.layout, self.ring_size, self.length)
        held = segment_positions(segments[self.rank])

        def check() -> None:
            if x.ndim != 2 or x.shape[1] != len(held) or ahead < 0:
                raise ValueError(
                    f"x must be [batch, {len(held)}] and ahead at least 0, got {list(x.shape)}, "
                    f"{ahead}"
                )

        same = {"ahead": ahead, "batch": len(x) if x.ndim else None, "dtype": x.dtype}
        agree(self.ring, "rolling a batch", same, check=check)
        found = next_tokens(x, segments, self.ring, nothing, ahead)
        if self.packing is None or ahead == 0:
            return found
        ends = torch.stack([_ends(documents, self.length)[held] for documents in self.packing])
        return found.masked_fill((held + ahead >= ends).to(x.device), nothing)


@typed(report_to_group("shard_batch", agreed=("rank", None)), apart=True)
def shard_batch(
    batch: Mapping[str, Any],
    *,
    layout: Layout = AUTO,
    group: Group = None,
    rank: int | None = None,
    ring_size: int | None = None,
    shift_labels: bool = True,
    ignore_index: int = -100,
    check_same: bool = True,
) -> ShardedBatch:
    """Return this rank's part of a batch of whole sequences, the same on all ranks of a ring.

    Args:
        batch: tensors by name. The tokens are "input_ids" `[b, n]` or "inputs_embeds" `[b, n, d]`.
            Optional are "labels" `[b, n]`, of the tokens themselves; "loss_weights" `[b, n]`, of
            labels; "attention_mask" or "key_mask" `[b, n]`, 0 or False for padding; documents, as
            "documents" `[b, n]`, "cu_seqlens", or "position_ids" `[b, n]` that restart at each one.
            Positions can have three rows `[3, b, n]`, for time, height and width, or four, where
            the first one restarts. Any other tensor `[b, n, ...]` is cut, too; other values are
            passed on unchanged.
        layout: as for `ring_attn`. "auto" is zigzag, or balanced if there are documents.
        group: the ring; None is the default group, or this process alone.
        rank, ring_size: the place in the ring if there is no group, as in workers that load data.
            With a group, ring_size can be less than its ranks.
        shift_labels: move each label to the token that predicts it: the one before, in its
            document. False if labels are shifted already.
        ignore_index: the label of tokens that predict nothing, such as the last of a document.
        check_same: compare a digest of the batch between the ranks: here, or without a group when
            `with batch:` begins. Values on a GPU that nothing else reads are compared without a
            wait: in the block's loss, or at the block's end; without a block in the next call in
            which the ring's ranks agree.

    Returns:
        A `ShardedBatch`. Nothing but the digest is sent.

    Raises:
        ValueError: tensors contradict one another or the layout, or ranks have different batches;
            on all ranks.

    >>> batch = shard_batch({"input_ids": torch.tensor([[4, 5, 6, 7]])}, rank=1, ring_size=2)
    >>> batch["input_ids"].tolist(), batch["position_ids"].tolist()
    ([[5, 6]], [[1, 2]])
    """
    if rank is None:
        ring = as_ring(group, ring_size)
        place, size = ring.rank, ring.size
    else:
        ring, place, size = Ring.alone(), rank, ring_size or 0
        if group is not None or not 0 <= place < size:
            raise ValueError(
                "shard_batch: rank needs a ring_size above it, and no group; "
                f"got rank={rank}, ring_size={ring_size}, group={group}"
            )
    found: list[ShardedBatch] = []

    def make() -> None:
        check_least(1, ring_size=ring_size)
        for name, t in batch.items():
            if isinstance(t, Tensor):
                if t.is_meta:
                    raise ValueError(f"{name} must have values, got a tensor on {t.device}")
                check_plain(name, t)
        check_whole(ring, batch)
        whole = _Whole.read(batch, shift_labels, ignore_index)
        chosen: Layout = layout
        if layout == AUTO:
            chosen = "zigzag"
            if whole.packing is not None:
                chosen = deal(whole.packing, size, causal=True, window=None)
        check_layout(chosen, size, whole.length)
        made = whole.shard(chosen, place, size)
        how_made = Made(tuple(ring.ranks) if rank is None else None, size, chosen, whole.length, 1)
        for name, t in made.items():
            if name in whole.cut:
                remember(t, replace(how_made, dim=t.ndim - 1 if name == "position_ids" else 1))
        mine = None
        if check_same and size > 1:
            how = chosen, shift_labels, ignore_index
            mine = digest_of_batch(batch, *how, at_once=rank is not None)
        found.append(replace(made, group=group, digest=mine))

    error = error_of(make)
    mine = found[0].digest if found else None
    now = mine.of_kinds if isinstance(mine, UnreadDigest) else mine
    kinds = {} if mine is None else found[0]._kinds()
    same = {"check_same": check_same, **kinds, WORDS: now}
    agree(ring, "shard_batch", same, check=error)
    ring.steps.unread = mine if isinstance(mine, UnreadDigest) else None
    return found[0] if rank is None else replace(found[0], uncompared=now)


@dataclass(frozen=True)
class _Whole:
    """A batch of whole sequences, parsed and checked: tensors `[b, length, ...]` by name."""

    length: int
    cut: Mapping[str, Tensor]
    kept: Mapping[str, Any]
    packing: BatchDocuments | None
    real: Tensor | None
    num_items: Tensor | None
    in_place: Tensor | None
    positions_given: bool
    ignore_index: int

    @classmethod
    def read(cls, batch: Mapping[str, Any], shift: bool, ignore_index: int) -> "_Whole":
        """Parse a batch; raise ValueError if its tensors contradict one another."""
        tokens = _tokens(batch)
        b, n = tokens.shape[:2]
        _check_tensors(batch, b, n)
        real = _real(batch)
        packing = _packing(batch, tokens, real)
        cut = {name: t for name, t in batch.items() if name in _TOKENS}
        cut["position_ids"] = _positions(batch, tokens, packing)
        num_items = in_place = None
        if (labels := batch.get("labels")) is not None:
            if real is not None:
                labels = labels.masked_fill(~real, ignore_index)
            if shift:
                in_place, labels = labels, next_of_whole(labels, packing, ignore_index)
            cut["shift_labels"], num_items = labels, (labels != ignore_index).sum()
        if (weights := batch.get("loss_weights")) is not None:
            cut["loss_weights"] = next_of_whole(weights, packing, 0) if shift else weights
        more = {name: t for name, t in batch.items() if name not in (*_TOKENS, *_READ)}
        cut |= {name: t for name, t in more.items() if _is_cut(name, t, b, n)}
        kept = {name: t for name, t in more.items() if name not in cut}
        given = batch.get("position_ids") is not None
        return cls(n, cut, kept, packing, real, num_items, in_place, given, ignore_index)

    def shard(self, layout: Layout, rank: int, ring_size: int) -> ShardedBatch:
        """Return a rank's part of the batch."""
        segments = all_segments(layout, ring_size, self.length)[rank]

        def mine(t: Tensor, dim: int = 1) -> Tensor:
            return t.index_select(dim, segment_positions(segments, t.device))

        tensors = {name: mine(t) for name, t in self.cut.items() if name != "position_ids"}
        tensors |= dict(self.kept)
        tensors["position_ids"] = mine(self.cut["position_ids"], -1)
        return ShardedBatch(
            tensors, layout, self.length, rank, ring_size, packing=self.packing,
            key_mask=None if self.real is None else mine(self.real),
            in_place=None if self.in_place is None else mine(self.in_place),
            num_items=self.num_items, positions_given=self.positions_given,
            ignore_index=self.ignore_index,
            whole_mask=None if self.real is None else digest(self.real),
        )  # fmt: skip


def _tokens(batch: Mapping[str, Any]) -> Tensor:
    found: dict[str, Any] = {n: batch[n] for n in _TOKENS if batch.get(n) is not None}
    for name, ndim in zip(_TOKENS, (2, 3)):
        t = found.get(name)
        if len(found) == 1 and isinstance(t, Tensor) and t.ndim == ndim:
            return t
    shapes = [f"{name} {_shown(getattr(value, 'shape', None))}" for name, value in found.items()]
    raise ValueError(
        'a batch has "input_ids" [b, n] or "inputs_embeds" [b, n, d], one of them; '
        f"got {', '.join(shapes or map(str, batch))}"
    )


def _check_tensors(batch: Mapping[str, Any], b: int, n: int) -> None:
    """Raise ValueError if a tensor is one that is made here, or its shape is not `[b, n]`."""
    for name in _MADE:
        if batch.get(name) is not None:
            raise ValueError(
                f"{name} is made of the whole batch's labels, and another one would be lost; "
                "leave it out, and give labels, with shift_labels=False if they are shifted"
            )
    for name in (*_MASKS, "position_ids", "labels", "loss_weights"):
        shape = getattr(batch.get(name), "shape", None)
        in_rows = name == "position_ids" and shape in ((3, b, n), (4, b, n))
        if batch.get(name) is not None and shape != (b, n) and not in_rows:
            raise ValueError(f"{name} must be [{b}, {n}] as the tokens are, got {_shown(shape)}")


def _real(batch: Mapping[str, Any]) -> Tensor | None:
    """Return which tokens are real, bool `[b, n]`; None if all are."""
    given = [batch[name] for name in _MASKS if batch.get(name) is not None]
    if len(given) > 1:
        raise ValueError("attention_mask and key_mask say the same thing; pass one of them")
    if not given:
        return None
    real = given[0] != 0
    if not bool(((given[0] == 1) | ~real).all()):
        raise ValueError("attention_mask must be 1 or True for real tokens, 0 or False for padding")
    return None if bool(real.all()) else real


def _packing(
    batch: Mapping[str, Any], tokens: Tensor, real: Tensor | None
) -> BatchDocuments | None:
    """Return the documents of each sample; None if each is one."""
    documents, borders = batch.get("documents"), batch.get("cu_seqlens")
    check_documents(documents, borders, tokens.shape, tokens.shape[1])
    if documents is None and borders is None:
        # Three rows of positions place images and videos, and don't show where documents begin.
        # With four rows, the first one does, as in transformers.
        counted = batch.get("position_ids")
        if counted is not None and counted.ndim > 2:
            counted = counted[0] if len(counted) == 4 else None
        documents = None if counted is None else documents_of_positions(counted, real)
        if documents is None:
            return None
    packing = local_packing(documents, borders, tokens)
    if packing is None or all(len(each.runs) < 2 for each in packing):
        return None
    return packing


def _positions(batch: Mapping[str, Any], tokens: Tensor, packing: BatchDocuments | None) -> Tensor:
    """Return the position of each token, int64 `[b, n]`: as given, or counted in its document."""
    b, n = tokens.shape[:2]
    if (given := batch.get("position_ids")) is not None:
        return given
    (whole,) = all_segments("contiguous", 1, n)
    if packing is None:
        return segment_positions(whole, tokens.device).expand(b, n)
    return torch.stack([documents.positions(whole) for documents in packing]).to(tokens.device)


def _is_cut(name: str, value: Any, b: int, n: int) -> bool:
    """Return whether an optional tensor has the sequence as its second dimension."""
    if not isinstance(value, Tensor):
        return False
    if tuple(value.shape[:2]) == (b, n):
        return True
    if name.startswith("cu_seq"):
        raise ValueError(f"{name} is not read; say the borders of documents as cu_seqlens")
    if n > 1 and n in value.shape:
        raise ValueError(
            f"{name} {list(value.shape)} seems to have the {n} tokens elsewhere than in its second "
            f"dimension; give it as [{b}, {n}, ...], or leave it out of the batch"
        )
    return False


def _ends(documents: Any, length: int) -> Tensor:
    """Return the end of each position's run of its document, `[length]`."""
    stops = torch.tensor([run.stop for run in documents.runs])
    return stops.repeat_interleave(stops.diff(prepend=stops.new_zeros(1)), output_size=length)


def _shown(shape: Any) -> str:
    return "no tensor" if shape is None else str(list(shape))
