"""Placements: where the tokens of a batch are, known to all attention inside a block.

The model between the data and its attention knows nothing of layouts. The batch therefore stores
where its tokens are, and attention inside its block takes layout, documents and mask from it:

    with placement:                             # zigzag, documents [0, 5, 9]
        model(ids)  ->  ring_attn(q, k, v)      # is of zigzag shards, with these documents

An option that contradicts the placement is an error. So is backward in the block of another
placement, by which it would recompute checkpointed layers.
"""

import threading
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, SupportsInt
from weakref import WeakSet

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ring_attention_pytorch.geometry.documents import BatchDocuments
from ring_attention_pytorch.geometry.layouts import Layout, all_segments
from ring_attention_pytorch.geometry.segments import count
from ring_attention_pytorch.ranks.ring import Group, Ring, as_ring

opened: list[tuple[int, "Placement"]] = []  # with the threads that opened them, innermost last
# placements whose blocks have ended, while autograd has nodes that may be recomputed
_ended: WeakSet["Placement"] = WeakSet()
# set when attention ran within an autograd Function in a batch's block: it may be recomputed
_unseen: list[bool] = []


class OwnMask(NamedTuple):
    """The mask of keys that a plan was made with.

    Attributes:
        values: bool `[b, n]` of this rank's keys; None if all may be seen.
        whole: identifies the masks of whole batches; None if it is of no batch.
    """

    values: Tensor | None = None
    whole: int | None = None


@dataclass(frozen=True, eq=False)
class Placement:
    """The layout of a batch's tokens over a ring, their documents, and the key mask.

    Attributes:
        ring: the ranks that share the batch.
        layout: decides which of the `length` tokens each rank holds.
        packing: the documents of each sample; None if a sample is one.
        key_mask: bool `[b, n]` of this rank's tokens, True where one may be seen; None if all may.
        whole_mask: identifies the masks of whole batches; None if it has not been compared.
        digest: identifies whole batches, the same on all ranks; None likewise.
        wholes: results of whole sequences made in the block: means over all ranks, gathered parts.
        plans: of calls in the block without a plan, by cache key. Its ranks agreed on each when it
            was first needed here; later layers take it as if it were given.
    """

    ring: Ring
    layout: Layout
    length: int
    packing: BatchDocuments | None = None
    key_mask: Tensor | None = None
    whole_mask: int | None = None
    digest: SupportsInt | None = None
    wholes: list[str] = field(default_factory=list, repr=False)
    plans: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def held(self) -> int:
        """The number of tokens on this rank, cached for all attention calls in the block."""
        return count(all_segments(self.layout, self.ring.size, self.length)[self.ring.rank])

    def __enter__(self) -> "Placement":
        opened.append((threading.get_ident(), self))
        return self

    def __exit__(self, *_: object) -> None:
        opened.remove((threading.get_ident(), self))
        if self.plans:
            self.plans.clear()  # they keep memory
            self.ring.steps.passed_by.clear()
        _ended.add(self)

    def check_call(self, ring: Ring, n: int, given: Mapping[str, Any]) -> None:
        """Raise ValueError if a call contradicts the placement.

        Args:
            ring: the call's ring.
            n: the number of its queries on this rank.
            given: its options.
        """
        mine, held = self.ring, self.held
        if _ranks(ring) != _ranks(mine):
            raise ValueError(
                f"the batch whose block this is lies on {mine.size} ranks, attention is over "
                f"{ring.size}, or others; leave its group out, or give it the batch's"
            )
        layout = given.get("layout", "contiguous")
        if layout not in ("contiguous", self.layout):
            raise ValueError(
                f"layout={layout!r} was given in the block of a batch with {self.layout!r}"
            )
        if n != held:
            raise ValueError(
                f"this rank holds {held} of the batch's {self.length} tokens, got queries of {n}: "
                "shards are expected, not whole sequences"
            )
        for name, own in {"key_mask": self.key_mask, "documents": self.packing}.items():
            if given.get(name) is not None and given[name] is not own:
                raise ValueError(
                    f"{name} was given beside that of the batch whose block this is; leave it out"
                )
        if given.get("cu_seqlens") is not None:
            raise ValueError(
                "cu_seqlens were given beside those of the batch whose block this is; drop them"
            )

    def check_plan(self, plan: Any) -> None:
        """Raise ValueError if a plan that is used in this block has another layout."""
        self.check_ranks(plan.ring)
        lies_alike = (plan.layout, plan.packing) == (self.layout, self.packing)
        if not (lies_alike and self.has_mask(plan.own_mask)):
            raise ValueError(
                f"the plan is for {plan.layout!r}, its own documents and mask, the batch in whose "
                f"block it is used is in {self.layout!r}, or has others; make the plan inside the "
                "block"
            )

    def check_ranks(self, ring: Ring) -> None:
        """Raise ValueError if a plan that is used in this block is of other ranks."""
        if _ranks(ring) != _ranks(self.ring) and ring.size > 1:
            raise ValueError("the plan is of other ranks than the batch in whose block it is used")

    def has_mask(self, mask: OwnMask) -> bool:
        """Return whether a plan's mask equals the batch's; syncs if the plan's is of no batch."""
        if mask.values is None or self.key_mask is None:
            return mask.values is self.key_mask
        if None not in (mask.whole, self.whole_mask):
            return mask.whole == self.whole_mask
        return torch.equal(mask.values.to(self.key_mask.device), self.key_mask)

    def fits(self, q: Tensor) -> bool:
        """Return whether q has as many queries as this rank has tokens."""
        return q.ndim > 1 and q.shape[1] == self.held

    def options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return a call's options, completed with the placement's."""
        mine: dict[str, Any] = {"layout": self.layout}
        if not given.get("cross"):
            mine |= {"documents": self.packing, "key_mask": self.key_mask}
        return {**given, **mine}


def _ranks(ring: Ring) -> tuple[object, ...]:
    return ring.group, ring.first, ring.size, ring.rank


def current() -> Placement | None:
    """Return the placement whose block this runs in; None outside of any.

    Backward may run in threads of autograd. There it is the open one, if there is only one.
    """
    if not opened:
        return None
    if is_compiling():  # tracing can't ask for the thread
        return opened[-1][1]
    this_thread = threading.get_ident()
    for thread, placement in reversed(opened):
        if thread == this_thread:
            return placement
    if not in_backward():
        return None
    others = {id(placement): placement for _, placement in opened}
    return others.popitem()[1] if len(others) == 1 else None


def note_whole(name: str) -> None:
    """If this runs in a block, note there that a result of whole sequences was made."""
    if (placement := current()) is not None:
        placement.wholes.append(name)


def attention_ring(group: Group, size: int | None = None) -> Ring:
    """Return the ring of attention: of the named group, otherwise of the batch's block."""
    placement = current() if group is None and size is None else None
    return as_ring(group, size) if placement is None else placement.ring


def in_backward() -> bool:
    """Return whether autograd runs this, as when it recomputes a checkpoint."""
    return torch._C._current_graph_task_id() != -1


def _within_function() -> bool:
    """Return whether the forward of an autograd Function runs this, as in a reentrant checkpoint.

    no_grad alone leaves forward mode on; a Function turns it off.
    """
    inference = torch.is_inference_mode_enabled()
    return not (torch.is_grad_enabled() or torch._C._is_fwd_grad_enabled() or inference)


def placed(ring: Ring, q: Tensor, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a call's options, updated by the current placement's.

    Attention of this process alone, over other tokens than the batch's, takes none of them.

    Raises:
        ValueError: the call contradicts the placement, or is outside of its own block.
    """
    placement = current()
    if placement is None:
        check_recomputed()
    if placement is None:
        return given
    if ring.size == 1 and placement.ring.size > 1 and not placement.fits(q):
        return given
    if _within_function():
        _unseen[:] = [True]
    placement.check_call(ring, q.shape[1], given)
    return placement.options(given)


def check_recomputed() -> None:
    """Raise ValueError if autograd recomputes a layer outside of the block of its batch."""
    if (_ended or _unseen) and in_backward():
        raise ValueError(
            "attention is recomputed in backward outside of the block of its batch; call "
            "backward() inside `with batch:`, where forward was, or give attention a plan"
        )


def own_mask(given: Tensor | None) -> OwnMask:
    """Return a copy of the mask for a plan, because the caller may reuse its memory.

    That would silently change gradients.
    """
    values = None if given is None else given.to(torch.bool, copy=True)
    placement = current()
    if placement is None or given is not placement.key_mask:
        return OwnMask(values)
    return OwnMask(values, placement.whole_mask)


def block_of(q: Tensor) -> Placement | None:
    """Return the placement whose block a plan is called in for these queries; None if in none."""
    placement = None if in_backward() else current()
    return placement if placement is not None and placement.fits(q) else None


def check_began_here(began: Placement) -> None:
    """Raise ValueError in backward if the call began in the block of another placement."""
    this_thread = threading.get_ident()
    open_here = [placement for thread, placement in opened if thread == this_thread]
    if not open_here:  # a thread of autograd
        open_here = [placement for _, placement in opened]
    if open_here and began not in open_here:
        raise ValueError(
            "backward of one batch was called in the block of another one; call it in its own"
        )
