"""The plans of attention with summaries: two `RingPlan`s, near and far; the pooling of cells."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ring_attention_pytorch.arguments import checked
from ring_attention_pytorch.comm.collectives import exchange_rows
from ring_attention_pytorch.geometry.layouts import count, segment_positions
from ring_attention_pytorch.plan.placement import attention_ring, current
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.ranks.agreement import agree, report_to_group, typed
from ring_attention_pytorch.ranks.ring import Caller, Group, Ring
from ring_attention_pytorch.summaries.cells import (
    Cells,
    Grouped,
    Places,
    first_cells,
    packed_cells,
    rows_of,
    shares,
    without_gaps,
)
from ring_attention_pytorch.summaries.edge import Edge
from ring_attention_pytorch.summaries.select import Selection

# options that the near and the far plan share; documents and masks differ between them
_BOTH = ("scale", "softclamp", "kernel", "transport", "memory", "bucket_size", "check")
_NEAR = ("key_mask", "documents", "cu_seqlens", "layout", "also")


@dataclass(frozen=True, eq=False)
class Deal:
    """The tokens that this rank pools, and the queries that it folds into rows; in `[b * n]`."""

    tokens: Tensor  # [cells with tokens on this rank, most tokens]: tokens of each cell's block
    places: Tensor  # their places in the block
    real: Tensor  # bool, True for a token whose key is visible, False for an empty slot
    sends: tuple[slice, ...]  # for each rank, which of these cells it summarises
    lands: tuple[Tensor, ...]  # for each rank, which cells of `mine` it has tokens of
    mine: slice  # cells that this rank summarises
    ends: tuple[Tensor, Tensor]  # their last tokens' positions in sequence and document
    queries: Tensor  # tokens that see a summary
    slots: Tensor  # their places in [rows here * width]
    rows: Tensor  # the last cell that each row here sees, ascending
    width: int  # queries in a row, the same on all ranks

    @classmethod
    def make(
        cls,
        rule: Cells,
        places: Places,
        held: Sequence[Tensor],
        ring: Ring,
        key_mask: Tensor | None,
        device: torch.device,
    ) -> "Deal":
        """Make it from every rank's tokens, without communication."""
        bounds = first_cells(places.borders[-1], ring.size)
        begin, end = bounds[ring.rank : ring.rank + 2]
        cell, token, place = shares(rule, held[ring.rank])
        pooled = Grouped.by(cell)
        tokens, at, real = _padded(pooled, token, place)
        sends = [_between(pooled.groups, *bounds[r : r + 2]) for r in range(ring.size)]
        lands = []
        for theirs in held:
            touched = shares(rule, theirs)[0].unique()
            lands.append(touched[_between(touched, begin, end)] - begin)
        seen, query = rows_of(rule, held[ring.rank])
        folded = Grouped.by(seen)
        rows = without_gaps(folded.groups, ring.size)
        width = max(1, *(Grouped.by(rows_of(rule, theirs)[0]).width for theirs in held))
        slots = torch.searchsorted(rows, folded.groups)[folded.rows] * width + folded.slots
        in_sequence, in_document = places.ends(rule.stride)
        ends = in_sequence[begin:end].to(device), in_document[begin:end].to(device)
        tokens, at, real = tokens.to(device), at.to(device), real.to(device)
        if key_mask is not None:
            real = real & key_mask.flatten()[tokens]
        return cls(
            tokens, at, real, tuple(sends), tuple(land.to(device) for land in lands),
            slice(begin, end), ends, query[folded.items].to(device), slots.to(device), rows, width,
        )  # fmt: skip

    def visible(self, ring: Ring) -> Tensor:
        """Return a mask of the cells of `mine` that have a visible token: bool `[cells]`."""
        found, caller = self.real.any(dim=1).to(torch.uint8), Caller(ring, "visible cells", 0)
        arrived = exchange_rows([found[sent] for sent in self.sends], self.lands, caller)
        seen = torch.zeros(self.mine.stop - self.mine.start, dtype=torch.bool, device=found.device)
        for part, land in zip(arrived, self.lands):
            seen[land] |= part.bool()
        return seen


def _between(ascending: Tensor, begin: int, end: int) -> slice:
    start, stop = torch.searchsorted(ascending, torch.tensor((begin, end))).tolist()
    return slice(start, stop)


def _padded(pooled: Grouped, token: Tensor, place: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens and places by cell, `[cells, most tokens]`, and the mask of filled slots."""
    shape = len(pooled.groups), max(1, pooled.width)
    tokens, places = torch.zeros(2, *shape, dtype=torch.long)
    real = torch.zeros(shape, dtype=torch.bool)
    at = pooled.rows, pooled.slots
    tokens[at], places[at], real[at] = token[pooled.items], place[pooled.items], True
    return tokens, places, real


class SummaryPlan:
    """The `RingPlan`s of near and of far attention, the edge between them, and the chosen cells.

    Make it once per batch with `SummaryPlan.make` and pass it to every layer.
    """

    def __init__(
        self,
        near: RingPlan,
        rule: Cells,
        edge: Edge | None,
        deal: Deal | Any = None,
        far: RingPlan | None = None,
        selection: Selection | None = None,
    ) -> None:
        self.near: RingPlan = near
        self.rule: Cells = rule
        self.edge: Edge | None = edge  # None if all windows end with a cell
        self.deal: Deal | Any = deal  # None, and so is `far`, if no query sees a summary
        self.far: RingPlan | None = far
        self.selection: Selection | None = selection  # None if nothing is selected

    @classmethod
    @typed(report_to_group("summary attention", ring_of=attention_ring), apart=True)
    def make(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        window: int,
        stride: int,
        block: int | None = None,
        distance: int | None = None,
        group: Group = None,
        **options: Any,
    ) -> "SummaryPlan":
        """Make a plan for tensors like these; values of q, k and v don't matter.

        All ranks of the ring must call this together.

        Args:
            q: `[b, n, h, d]`, like this rank's queries; k, v: like its keys and values.
            window: a query sees this many tokens before it exactly, and on to the start of the
                cell in which the window ends.
            stride: tokens of a cell; each cell has one summary.
            block: tokens that a summary is made of, up to the cell's end; None is `stride`.
            distance: how far back summaries are seen: window plus a multiple of stride. None sees
                all.
            group: the ring, as for `ring_attn`.
            select: number of cells before the window that each query group also reads exactly,
                chosen by their summaries; 0 is none.
            options: of `ring_attn`: key_mask, documents, cu_seqlens, layout, scale, softclamp,
                kernel, transport, memory, bucket_size, check; and `also`, further values by name
                that must be the same on all ranks.

        Raises:
            ValueError: an argument is invalid or differs between ranks; same text on all ranks.

        >>> q = torch.randn(1, 40, 2, 4)
        >>> plan = SummaryPlan.make(q, q, q, window=8, stride=4)
        >>> plan.far.signature
        batch=1, n=7, m=7, heads=8, key heads=2, d=4, d_v=4, dtype=torch.float32, device=cpu
        """
        ring = attention_ring(group)
        block = stride if block is None else block
        rule = Cells(window, stride, block, distance, options.pop("select", 0))
        same = {"window, stride, block, distance, select": list(rule)}
        agree(ring, "summary attention", same, check=partial(_check, rule, options))
        near = RingPlan.make(
            q, k, v, causal=True, window=window, group=ring, ulysses=1, **options
        )  # fmt: skip
        total = sum(map(count, near.query_segments))
        places = Places.of(rule, near.packing, q.shape[0], total)
        held = [places.held(segment_positions(s)) for s in near.query_segments]
        key_mask = options.get("key_mask")
        edge = Edge.make(rule, held, ring, key_mask, q.device)
        if places.borders[-1] == 0 and not ring.several:  # other rings may have summaries
            return cls(near, rule, edge)
        deal = Deal.make(rule, places, held, ring, key_mask, q.device)
        far = _far_plan(near, rule, deal, places.borders, (q, k, v), options)
        selection = None
        if rule.select:
            selection = Selection.make(rule, places.borders[-1], held, ring, q.device)
            selection = replace(selection, key_mask=near.key_mask, summaries=far.key_mask)
        return cls(near, rule, edge, deal, far, selection)

    @property
    def ring(self) -> Ring:
        """The ring of all these plans."""
        return self.near.ring

    @checked
    def summary_positions(self, *, in_documents: bool = False) -> Tensor:
        """Return the position of each summary on this rank, int64 `[m]`.

        It is the position of the cell's last token, in the sequence or in its document.
        """
        if self.deal is None:
            return torch.empty(0, dtype=torch.long, device=self.near.device)
        return self.deal.ends[in_documents]


def _far_plan(
    near: RingPlan,
    rule: Cells,
    deal: Deal,
    borders: list[int],
    qkv: tuple[Tensor, Tensor, Tensor],
    options: Mapping[str, Any],
) -> RingPlan:
    """Make the plan of causal attention of rows to cells, one short sequence with documents."""
    q, k, v = qkv
    ring = near.ring
    given = {name: options[name] for name in _BOTH if name in options}
    if near.key_mask is not None:
        given["key_mask"] = deal.visible(ring)[None]
    if len(borders) > 2 or ring.several:
        given["documents"] = packed_cells(borders)
    cells = deal.mine.stop - deal.mine.start
    likes = []
    for t, n, heads in ((q, len(deal.rows), deal.width), (k, cells, 1), (v, cells, 1)):
        like = torch.empty((), dtype=t.dtype, device=t.device, requires_grad=t.requires_grad)
        likes.append(like.expand(1, n, t.shape[2] * heads, t.shape[3]))
    return RingPlan.make(
        *likes, causal=True, window=None if rule.span is None else rule.span - 1, cross=True,
        query_positions=deal.rows, key_positions=torch.arange(deal.mine.start, deal.mine.stop),
        group=ring, ulysses=1, **given,
    )  # fmt: skip


def _check(rule: Cells, options: Mapping[str, Any]) -> None:
    """Raise ValueError if this rank's arguments are invalid."""
    unknown = [name for name in options if name not in (*_BOTH, *_NEAR)]
    if unknown:
        raise ValueError(f"there is no option {', '.join(unknown)}; see SummaryPlan.make")
    if current() is not None:
        raise ValueError("the block of a batch has no summaries yet; leave `with batch:` out")
    rule.check()
