"""What a ring attention does, decided before it starts and agreed by all ranks."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from ring_attention_pytorch.comm.agreement import (
    agree,
    in_the_same_call,
    raise_together,
    told_by_group,
    typed,
)
from ring_attention_pytorch.comm.ring import Group, Ring, as_ring
from ring_attention_pytorch.comm.transports import make_together, make_transport, owners_at_once
from ring_attention_pytorch.comm.ulysses import Ulysses, job_of
from ring_attention_pytorch.geometry.documents import BatchDocuments, Borders, end_problem
from ring_attention_pytorch.geometry.layouts import (
    Layout,
    Segments,
    all_segments,
    segment_positions,
)
from ring_attention_pytorch.geometry.tiles import Mask, tiles
from ring_attention_pytorch.kernels import SelectedKernel
from ring_attention_pytorch.plan.calibrate import select_transport
from ring_attention_pytorch.plan.checks import (
    Signature,
    checks_of,
    lengths_problem,
    qkv_problem,
    segments_of_two,
)
from ring_attention_pytorch.plan.masks import (
    Prefix,
    by_sample,
    copied,
    gather_positions,
    positions_seen,
    repeats_problem,
    seen_by_any,
)
from ring_attention_pytorch.plan.packing import whole_packing
from ring_attention_pytorch.plan.proposal import Asked, Proposal
from ring_attention_pytorch.runtime.dropout import Dropout
from ring_attention_pytorch.runtime.graphs import Graphs, Tensors, can_be_captured, with_graphs
from ring_attention_pytorch.runtime.interfaces import KVBlock, MaskMod, ScoreMods, Tiles, Transport
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype
from ring_attention_pytorch.runtime.scores import per_head_problem
from ring_attention_pytorch.runtime.torch_func import outside_transforms
from ring_attention_pytorch.schedule.cost import Hardware
from ring_attention_pytorch.schedule.pieces import KVShape, Workload, is_short


@dataclass(frozen=True)
class RingPlan:
    """All of a ring attention that depends on ranks, lengths and masks, and not on values.

    Make it once per batch with `RingPlan.make` and hand it to every layer: making it is where
    ranks compare notes; calls that are given a plan exchange nothing but keys and gradients.
    """

    ring: Ring
    query_segments: tuple[Segments, ...]
    visible: Mask
    layout: Layout
    terms: ScoreMods
    kernel: SelectedKernel
    transport: Transport
    transport_name: str
    memory: int | None
    at_once: int  # owners whose keys a gather brings together
    job: KVShape
    machine: Hardware  # what was measured, where that decided
    blocks: Workload  # of the ranks that the transport connects
    ulysses: Ulysses | None
    key_mask: Tensor | None
    signature: Signature
    device: torch.device
    samples: list[tuple[slice, Mask]]  # that see alike
    short: bool  # so little to compute that calls go side by side
    packing: BatchDocuments | None = None  # the documents of each sample
    overlapped: Transport | None = None  # the transport that overlaps, if it is another
    repeats: bool = False  # whether positions of keys were given, which may repeat
    always: bool = False  # whether ranks compare notes in each call, and not here only
    number: int = field(default=0, compare=False)  # by which its ranks know it
    graphs: Graphs | None = field(default=None, init=False, compare=False, repr=False)
    # worked out when asked for, and shared with plans that are this one but for dropout
    _tiles: dict[Segments, list] = field(default_factory=dict, compare=False, repr=False)
    _calls: dict[bool, int] = field(default_factory=dict, compare=False, repr=False)
    _of_mask: dict[Segments, list] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    @classmethod
    @outside_transforms
    @typed(told_by_group("ring attention"))
    def make(  # noqa: PLR0913 - a public entry point
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        window: int | None = None,
        key_mask: Tensor | None = None,
        scale: float | int | None = None,
        softclamp: float | int | None = None,
        layout: Layout = "contiguous",
        group: Group = None,
        kernel: str | None = None,
        transport: str | None = None,
        ulysses: int = 1,
        memory: int | None = None,
        bucket_size: int = 1024,
        cross: bool | None = None,
        documents: Tensor | BatchDocuments | None = None,
        cu_seqlens: Borders | None = None,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        key_bias: Tensor | None = None,
        mask_mod: MaskMod | None = None,
        prefix: Prefix = None,
        query_positions: Tensor | None = None,
        key_positions: Tensor | None = None,
        dropout: float | int = 0.0,
        dropout_seed: int | None = None,
        check: str | None = None,
        also: Mapping[str, Any] | None = None,
    ) -> "RingPlan":
        """The plan for tensors like these; of q, k, v and sinks their values don't matter.

        Parameters are those of `ring_attn`, and `also`: what else all ranks must have the same,
        by name. All ranks of the ring must call this together.

        Returns:
            A plan for any number of calls with tensors of these shapes, dtype and device.

        Raises:
            ValueError: the same on all ranks, whichever rank gave what can't be.

        >>> q = torch.randn(1, 6, 2, 4)
        >>> plan = RingPlan.make(q, q, q, causal=True)
        >>> plan.positions().tolist()
        [0, 1, 2, 3, 4, 5]
        """
        ring = as_ring(group)
        asked = Asked(
            causal, window, key_mask, scale, softclamp, layout, kernel, transport, ulysses, memory,
            bucket_size, cross, documents, cu_seqlens, sinks, alibi_slopes, key_bias, mask_mod,
            prefix, query_positions, key_positions, dropout, dropout_seed, checks_of(check),
        )  # fmt: skip
        mine = Proposal.of(q, k, v, asked, ring.size, also or {})
        lengths = agree(ring, "ring attention", mine.same, mine.own, mine.problem, mine.everywhere)
        if scale is None:
            asked = replace(asked, scale=q.shape[-1] ** -0.5)
        with ring.call("making a plan"):
            return cls._agreed(ring, asked, mine, lengths)

    @classmethod
    def _agreed(
        cls, ring: Ring, asked: Asked, mine: Proposal, lengths: list[dict[str, int]]
    ) -> "RingPlan":
        """The plan for what was asked for, once all ranks know every rank's lengths."""
        (q, k, v), chosen = mine.shaped, mine.kernel
        visible = Mask(asked.causal, asked.window)
        query_segments, key_segments = _placed(ring, asked, visible, lengths)
        packing = whole_packing(ring, asked.documents, asked.cu_seqlens, query_segments, q.shape[0])
        samples = by_sample(visible, packing, asked.prefix, len(q))
        seen = seen_by_any(samples, visible, asked.prefix is not None)
        blocks, swap, over = Workload(query_segments, key_segments, *seen), None, ring
        key_mask = copied(asked.key_mask, torch.bool)
        terms = _terms(asked, q, lengths[0]["seed"])
        if 1 < asked.ulysses <= ring.size:
            swap, *landed = Ulysses.make(ring, asked.ulysses, blocks[:2], q, k, v)
            blocks, over = Workload(*landed, *seen), swap.ring
            key_mask = None if key_mask is None else swap.whole_mask(key_mask)
            terms = swap.of_heads(terms)
        job, memory = job_of(q, k, v, swap), asked.memory
        if asked.transport is None and memory is None:
            memory = min(own["room"] for own in lengths)
        at_once = owners_at_once(memory, blocks, job)
        transport, machine = select_transport(
            asked.transport, ring, chosen, blocks, job, at_once, q
        )
        yields = len(samples) == 1 and chosen.preemptible and is_short(blocks, job, undivided=True)
        made = make_transport(transport, over, blocks, at_once, job, q.device, yields)
        few = make_together(made, blocks, job)
        return cls(
            ring=ring,
            query_segments=query_segments,
            visible=visible,
            layout=asked.layout,
            terms=terms,
            kernel=chosen,
            transport=few or made,
            transport_name=transport,
            at_once=at_once,
            job=job,
            memory=memory,
            blocks=blocks,
            ulysses=swap,
            key_mask=key_mask,
            machine=machine,
            signature=Signature.of(q, k, v),
            device=q.device,
            samples=samples,
            short=len(samples) == 1 and (made.overtaken or is_short(blocks, job)),
            packing=packing,
            overlapped=few and made,
            repeats=asked.placed,
            always=asked.check is not None,
            number=ring.steps.notes,
        )

    def positions(
        self, device: torch.device | None = None, *, in_documents: bool = False
    ) -> Tensor:
        """The global positions of this rank's queries, int64 `[n]`.

        With in_documents they restart with each document: `[b, n]` where samples differ.
        """
        mine = self.query_segments[self.ring.rank]
        if not (in_documents and self.packing):
            return segment_positions(mine, device)
        found = [documents.positions(mine) for documents in self.packing]
        return (found[0] if len({*self.packing}) == 1 else torch.stack(found)).to(device)

    def for_layer(self, number: int) -> "RingPlan":
        """This plan, but dropout draws otherwise for each number; without dropout, this plan.

        Nothing is exchanged or made anew. Layers that share a plan would drop alike.
        """
        if self.terms.dropout is None:
            return self
        terms = self.terms._replace(dropout=self.terms.dropout.for_layer(number))
        if self.graphs is None:
            return replace(self, terms=terms)
        return self.graphs.of_layer(number, lambda: replace(self, terms=terms).in_graphs())

    def in_graphs(self) -> "RingPlan":
        """This plan, but calls are captured as CUDA graphs by the second one, and replayed.

        For few tokens a GPU, where Python takes longer than the kernels. Layers may share it: what
        a call is given is copied to where a graph has it; that memory stays. Nothing is exchanged.

        Raises:
            ValueError: tensors are not on CUDA, or keys travel in messages.
        """
        if not can_be_captured(self):
            raise ValueError(
                "CUDA graphs need tensors on CUDA, keys in memory that GPUs share, no messages; "
                f"got {self.device.type}, {type(self.transport).__name__}; leave in_graphs() out"
            )
        return with_graphs(self)

    def by(self, transport: Transport) -> "RingPlan":
        """This plan with another transport: other calls, and others of them that may overlap."""
        return replace(self, transport=transport, _tiles={}, _calls={})

    def run(
        self, direction: str, function: Callable[..., Tensors], *given: Tensor | None
    ) -> Tensors:
        """What a function of the plan and of tensors gives, by way of a graph if there are any."""
        run = function if self.graphs is None else partial(self.graphs.run, function)
        with self.call(direction):
            return run(self, *given)

    def call(self, direction: str) -> AbstractContextManager[None]:
        """A block that all ranks are in at the same time, or hear that they are not."""
        block = self.ring.call(f"ring attention, {direction}", self.number)
        return in_the_same_call(self.ring, block) if self.always else block

    def keys(self, k: Tensor, v: Tensor) -> KVBlock:
        """This rank's keys, heads swapped if they are, as the transport wants them."""
        return KVBlock(k, v, self.key_mask, self.blocks.keys[self.place], own=True)

    def tiles(self, keys: Segments) -> list[tuple[slice, Tiles]]:
        """Samples that see alike, and the tiles that their queries here see of these keys."""
        if keys not in self._tiles:
            self._tiles[keys] = [(at, self._of_block(keys, at, seen)) for at, seen in self.samples]
        if self.key_mask is None:
            return self._tiles[keys]
        if self.repeats or keys not in self._of_mask:  # others' keys, or another plan's mask
            shared = self._tiles[keys]
            self._of_mask[keys] = [(at, found.of_another_mask()) for at, found in shared]
        return self._of_mask[keys]

    def calls(self, back: bool) -> int | None:
        """Of the kernel, in that direction, that bring anything; None where samples differ."""
        if len(self.samples) > 1:
            return None
        if back not in self._calls:
            blocks = self.transport.comes(self.blocks.keys[self.place], back)
            self._calls[back] = sum(bool(self.tiles(keys)[0][1]) for keys in blocks)
        return self._calls[back]

    @cached_property
    def transport_of_pairs(self) -> Transport:
        """That of keys beside their tangents, twice as wide; all ranks make it together."""
        job, over = self.job._replace(d=2 * self.job.d, d_v=2 * self.job.d_v), self.transport.ring
        at_once = owners_at_once(self.memory, self.blocks, job)
        return make_transport(self.transport_name, over, self.blocks, at_once, job, self.device)

    @property
    def alone(self) -> bool:
        """Whether one call of the kernel is all there is to do."""
        return len(self.blocks.queries) == 1 == len(self.samples)

    @property
    def degree(self) -> int:
        """How many neighbours swap heads for sequence."""
        return 1 if self.ulysses is None else self.ulysses.together.size

    @property
    def place(self) -> int:
        """This rank's among those that the transport connects, the rows of `blocks`."""
        return (self.ring if self.ulysses is None else self.ulysses.ring).rank

    def _of_block(self, keys: Segments, some: slice, seen: Mask) -> Tiles:
        sides = self.blocks.queries[self.place], keys
        found = Tiles(tiles(*sides, seen))
        found.first = some.start or 0
        found.concurrent = self.short and self.transport.keeps
        if self.terms.alibi is not None or self.terms.mask_mod is not None:
            found.rows_at, found.cols_at = (
                positions_seen(side, seen).to(self.device, torch.int32) for side in sides
            )
        if self.terms.dropout is not None:
            found.row_numbers, found.col_numbers = (
                segment_positions(side).to(self.device, torch.int32) for side in sides
            )
        return found

    def check(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> None:
        """Raise ValueError where the plan was made for other tensors than these."""
        problem = qkv_problem(q, k, v, None) or per_head_problem("sinks", q, sinks)
        if problem is None and (given := Signature.of(q, k, v)) != self.signature:
            problem = f"the plan was made for {self.signature!r}; got {given!r}; make one for these"
        if problem is not None:
            raise ValueError(f"ring attention: {problem}")


def _placed(
    ring: Ring, asked: Asked, visible: Mask, lengths: list[dict[str, int]]
) -> tuple[tuple[Segments, ...], tuple[Segments, ...]]:
    """Which positions each rank holds of queries and of keys.

    Raises:
        ValueError: lengths are not the layout's, or positions can't be; on all ranks alike.
    """
    queries, keys = ([own[what] for own in lengths] for what in "nm")
    cross = asked.cross
    if cross is None:
        cross = queries != keys or asked.placed
    dropped = asked.dropout > 0
    counted = dropped or asked.alibi_slopes is not None or asked.mask_mod is not None
    problem = lengths_problem(
        (queries, keys), asked.layout, visible, cross,
        packed=asked.packed, placed=asked.placed, counted=counted,
    ) or end_problem(asked.cu_seqlens, sum(queries))  # fmt: skip
    raise_together(ring, "ring attention", problem)
    if asked.placed:
        both = gather_positions(ring, (asked.query_positions, asked.key_positions))
        raise_together(ring, "ring attention", repeats_problem(both) if dropped else None)
        return both
    if cross:
        return segments_of_two(asked.layout, queries, keys, counted)
    found = all_segments(asked.layout, ring.size, sum(queries))
    return found, found


def _terms(asked: Asked, q: Tensor, seed: int) -> ScoreMods:
    """What a score is, and what becomes of it."""
    return ScoreMods(
        asked.scale,
        asked.softclamp,
        asked.bucket_size,
        copied(asked.alibi_slopes, accumulation_dtype(q.dtype)),
        asked.mask_mod,
        Dropout(asked.dropout, seed) if asked.dropout else None,
    )
