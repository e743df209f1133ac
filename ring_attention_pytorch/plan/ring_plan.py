"""The plan of a ring attention: all decisions, made before the call and agreed by all ranks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar, Unpack

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ring_attention_pytorch.arguments import checked, known_device
from ring_attention_pytorch.comm.ulysses import Ulysses
from ring_attention_pytorch.geometry.documents import BatchDocuments
from ring_attention_pytorch.geometry.layouts import Layout
from ring_attention_pytorch.geometry.segments import Segments, segment_positions
from ring_attention_pytorch.geometry.tiles import Mask, tiles
from ring_attention_pytorch.plan.checks import Expected, Signature, check_tensors, like_autocast
from ring_attention_pytorch.plan.first_calls import Own, Worked
from ring_attention_pytorch.plan.known_shards import (
    check_known_shards,
    digest_of_shard,
    known_shards,
)
from ring_attention_pytorch.plan.masks import Seen, by_sample, positions_seen, reached, seen_by_any
from ring_attention_pytorch.plan.option_types import PlanOptions
from ring_attention_pytorch.plan.packing import whole_packing
from ring_attention_pytorch.plan.placement import OwnMask, attention_ring, block_of, opened
from ring_attention_pytorch.plan.plan_cache import find, keep
from ring_attention_pytorch.plan.prepare import (
    TransportChoice,
    place_tokens,
    settle_transport,
    swap_heads,
)
from ring_attention_pytorch.plan.proposal import Proposal
from ring_attention_pytorch.ranks.agreement import agree, check_same_call, report_to_group, typed
from ring_attention_pytorch.ranks.ring import Group, Ring
from ring_attention_pytorch.runtime.codec import Codec, DecodingKernel
from ring_attention_pytorch.runtime.dropout import Dropout
from ring_attention_pytorch.runtime.handles import check_layer, handle_of_layer, new_handle
from ring_attention_pytorch.runtime.interfaces import (
    KVBlock,
    ScoreMods,
    SelectedKernel,
    Tiles,
    Transport,
)
from ring_attention_pytorch.runtime.observe import Record, spanned, switch, watched
from ring_attention_pytorch.runtime.statistics import Statistics, statistics_of
from ring_attention_pytorch.runtime.streams import reset_side_streams
from ring_attention_pytorch.runtime.tape import Tapes
from ring_attention_pytorch.runtime.uncopied import replaced, uncopied
from ring_attention_pytorch.schedule.pieces import Workload
from ring_attention_pytorch.schedule.steps import Schedule

_LAYERS = 256  # layers whose plans a plan caches
_Results = TypeVar("_Results", bound=tuple[Any, ...])


class Agreed(NamedTuple):
    """The name of a plan's calls, the same on all ranks, and when ranks exchange notes."""

    number: int = 0  # the ranks' number for this plan
    of_layer: str = ""  # " of layer 3", as calls of that layer are named
    always: bool = False  # exchange notes in each call, not only for the plan


@uncopied
@dataclass(frozen=True)
class RingPlan:
    """All of a ring attention that depends on ranks, lengths and masks, and not on values.

    Make it once per batch with `RingPlan.make` and pass it to every layer. Ranks exchange notes
    when it is made. Calls with a plan exchange nothing but keys and gradients.
    """

    ring: Ring
    query_segments: tuple[Segments, ...]
    layout: Layout
    expected: Expected
    seen: Seen
    terms: ScoreMods
    kernel: SelectedKernel
    transport: Transport
    chosen: TransportChoice  # the basis of the choice of transport, and the alternative
    shards: Workload  # of all ranks
    blocks: Workload  # of the ranks that the transport connects
    ulysses: Ulysses | None
    key_mask: Tensor | None
    own_mask: OwnMask  # as it was given, before any all-to-all
    agreed: Agreed = field(default=Agreed(), compare=False)
    shared: "RingPlan | None" = field(default=None, compare=False, repr=False)  # of keys on all
    handle: int = field(init=False, compare=False, repr=False)  # its number in traced graphs
    tapes: Tapes | None = field(init=False, compare=False, repr=False)  # None: can't be recorded
    # a CUDA graph can capture calls: nothing in them waits for the host
    capturable: bool = field(init=False, compare=False, repr=False)
    _shared: Worked = field(default_factory=Worked, compare=False, repr=False)
    _own: Own = field(default_factory=Own, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "handle", new_handle(self))
        fabric = self.transport.fabric
        taped = fabric.taped and self.kernel.traits.taped and self.terms.mask_mod is None
        object.__setattr__(self, "tapes", Tapes(fabric.follow_stream) if taped else None)
        on_gpu = self.expected.device.type == "cuda" and self.codec is None
        object.__setattr__(self, "capturable", on_gpu and not fabric.sends_messages)

    @classmethod
    @typed(report_to_group("ring attention", ring_of=attention_ring), apart=True)
    def make(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        group: Group = None,
        also: Mapping[str, Any] | None = None,
        codec: Codec | None = None,
        **options: Unpack[PlanOptions],
    ) -> "RingPlan":
        """Make a plan for tensors like these; values of q, k, v and sinks don't matter.

        All ranks of the ring must call this together.

        Args:
            q, k, v, group: as for `ring_attn`.
            also: other values, by name, that all ranks must have the same.
            codec: how keys and values are encoded while they travel; then k and v are encoded.
                `mla_plan` and `tied_plan` give one.
            options: the options of `ring_attn`, by name (`plan.options.Options`).

        Returns:
            A plan for any number of calls with tensors of these shapes, dtype and device.

        Raises:
            ValueError: arguments are invalid; the same text on all ranks, whichever rank gave them.

        >>> q = torch.randn(1, 6, 2, 4)
        >>> plan = RingPlan.make(q, q, q, causal=True)
        >>> plan.positions().tolist()
        [0, 1, 2, 3, 4, 5]
        """
        # within a transform of torch.func new tensors are wrapped, and have no memory to send
        with torch._C._DisableFuncTorch(), spanned("ring attention, plan", q.device):
            ring, qkv, also = attention_ring(group), (q, k, v), dict(also or {})
            if codec is not None:
                also["codec"] = str(codec)
            found = find(ring, qkv, options, also, codec)
            if found.agreed is not None:
                return found.agreed
            key, mine, cached, error, *_ = found
            own = {**mine.own, "plan": 0 if cached is None else cached.agreed.number}
            notes = agree(ring, "ring attention", mine.must_match, own, error)
            plan: Any = cached
            if cached is None or any(note["plan"] != own["plan"] for note in notes):
                if cached is not None:  # another rank has not found it
                    mine = mine._replace(shaped=tuple(map(like_autocast, qkv)))
                with ring.call("making a plan", ring.steps.notes, None):
                    plan = cls._agreed(ring, mine, notes)
                if key is not None:
                    keep(key, mine, plan)
            if found.block is not None:  # later layers in the block don't agree any more
                found.block.plans[found.key_in_block] = plan
                ring.steps.passed_by.add("ring attention")
            return plan

    @classmethod
    def _agreed(cls, ring: Ring, mine: Proposal, notes: list[dict[str, int]]) -> "RingPlan":
        """Make the plan that all ranks agreed on; `notes` are the `own` numbers of each."""
        (q, k, v), options = mine.shaped, mine.options
        visible = Mask(options.causal, options.window)
        segments = place_tokens(ring, options, visible, notes)
        packing = None
        if options.packed:
            packing = whole_packing(
                ring, options.documents, options.cu_seqlens, segments[0], len(q)
            )
        samples = by_sample(visible, packing, options.prefix, len(q))
        masks = seen_by_any(samples, visible, options.prefix is not None)
        heads = swap_heads(ring, mine, Workload(*segments, *masks), notes[0]["seed"])
        kernel, transport, chosen = settle_transport(ring, mine, heads, notes, len(samples) == 1)
        within_reach = reached(heads.blocks, transport.fabric.ring.rank, q.device)
        signature = Signature.of(q, k, v, codec=mine.codec)
        return cls(
            ring=ring,
            query_segments=segments[0],
            layout=options.layout,
            expected=Expected(signature, options.sinks is not None, q.device),
            seen=Seen(visible, samples, packing, options.placed, within_reach),
            kernel=kernel if mine.codec is None else DecodingKernel(*kernel[:-1], mine.codec),
            transport=transport,
            chosen=chosen,
            agreed=Agreed(ring.steps.notes, always=options.check is not None),
            shared=mine.shared and cls._agreed(Ring.alone(), mine.shared, [{**mine.shared.own}]),
            **heads._asdict(),
        )

    @checked
    def positions(
        self, device: torch.device | str | int | None = None, *, in_documents: bool = False
    ) -> Tensor:
        """Return the global positions of this rank's queries, int64 `[n]`.

        With `in_documents` they restart with each document: `[b, n]` if samples differ.

        Raises:
            ValueError: PyTorch knows no such device.
        """
        device = known_device(device)
        segments = self.query_segments[self.ring.rank]
        if not (in_documents and self.packing):
            return segment_positions(segments, device)
        by_sample = [documents.positions(segments) for documents in self.packing]
        if len(set(self.packing)) == 1:
            return by_sample[0].to(device)
        return torch.stack(by_sample).to(device)

    @checked
    def for_layer(self, number: int) -> "RingPlan":
        """Return this plan with other dropout for each number; without dropout, the plan itself.

        Nothing is exchanged, and plans of the last 256 numbers are cached. Layers that share a plan
        would drop the same probabilities. All ranks of the ring must give a call the same number,
        which is in its messages.

        Raises:
            ValueError: the number is negative, or 2 ** 32 - 1 or more.
        """
        check_layer(number)
        dropout = self.terms.dropout
        if dropout is None:
            return self
        if is_compiling():
            return _TracedLayer(self, number)
        make = partial(self._of_layer, number, dropout.for_layer(number))
        return self._own.layers.of(number, make, _LAYERS)

    def _of_layer(self, number: int, dropout: Dropout) -> "RingPlan":
        terms, name = self.terms._replace(dropout=dropout), f" of layer {number}"
        swap = self.ulysses and replace(self.ulysses, of_layer=name)
        return replaced(self, terms=terms, ulysses=swap, agreed=self.agreed._replace(of_layer=name))

    def warm_up(self, *qkv: Tensor, sinks: Tensor | None = None) -> None:
        """Make now all that first calls would make, so that the first step is a normal one.

        Kernels are compiled, tapes recorded, and the barriers of shared memory passed. It makes
        some calls, forward and backward, or only forward if gradients are off. All ranks of the
        ring must call this together.

        Args:
            qkv: tensors with the strides of later ones; values don't matter and are not changed;
                contiguous ones by default, as shared keys are. Calls with other strides are
                recorded anew.
            sinks: `[h]`, if calls have them.

        Raises:
            ValueError: tensors do not fit the plan, or ranks differ; the same text on all ranks.

        >>> q = torch.randn(1, 6, 2, 4)
        >>> RingPlan.make(q, q, q, causal=True).warm_up()
        """
        from ring_attention_pytorch.warm_up import warm_up  # a layer above attention

        warm_up(self, qkv, sinks)

    def by(self, transport: Transport) -> "RingPlan":
        """Return this plan with another transport, whose calls overlap differently."""
        return replaced(self, transport=transport, _shared=Worked())

    def run(
        self,
        direction: str,
        function: Callable[..., _Results],
        q: Tensor,
        *others: Tensor | None,
        back_of: int | None,
    ) -> _Results:
        """Run a function of the plan, of queries and other tensors, by a tape if there is one.

        `back_of` is as for `Ring.call`. If plans are checked `always`, all ranks raise if their
        calls differ, or if all of them have the same queries.
        """
        number, of_layer, always = self.agreed
        with self.ring.call(f"ring attention{of_layer}, {direction}", number, back_of):
            if always:
                check_same_call(self.ring, digest_of_shard(q) if back_of is None else None)
            try:
                if switch.on:
                    return watched(self, direction, function, (q, *others))
                if self.tapes is None:
                    return function(self, q, *others)
                return self.tapes.run(function, self, q, *others)
            except BaseException:
                reset_side_streams(q.device)
                raise

    @checked
    def statistics(self) -> Statistics:
        """Return bytes, waits and seconds of each hop of the last call, on this rank.

        On GPUs it waits until that call is done.

        Raises:
            ValueError: no call of this plan was inside `with observe():`.
        """
        return statistics_of(self.records)

    def keys(self, k: Tensor, v: Tensor) -> KVBlock:
        """Make the KV block that the transport needs of this rank's keys, after any all-to-all.

        Keys that no query may see are 0 in it, so that no kernel reads NaN there.
        """
        keys = KVBlock(k, v, self.key_mask, self.blocks.keys[self.place], own=True)
        if self.key_mask is None and self.seen.reached is None:
            return keys
        return keys.without_unseen(self.seen.reached)

    def tiles(self, keys: Segments) -> list[tuple[slice, Tiles]]:
        """List samples with the same mask, and the tiles of own queries and these keys."""
        known = self._shared.tiles
        if keys not in known:
            known[keys] = [(at, self._tiles(keys, at, mask)) for at, mask in self.seen.samples]
        if self.key_mask is None:
            return known[keys]
        own = self._own.tiles
        if self.seen.repeats or keys not in own:  # peers' keys, or another plan's mask
            own[keys] = [(samples, made.of_another_mask()) for samples, made in known[keys]]
        return own[keys]

    def calls(self, back: bool) -> int | None:
        """Count kernel calls in that direction that have tiles; None where samples differ."""
        if len(self.seen.samples) > 1:
            return None
        known = self._shared.calls
        if back not in known:
            blocks = self.schedule.positions(back, self.place)
            known[back] = sum(bool(self.tiles(keys)[0][1]) for keys in blocks)
        return known[back]

    @property
    def codec(self) -> Codec | None:
        """The codec by which keys are encoded while they travel; None if they are not."""
        return self.kernel.codec

    @cached_property
    def d_v(self) -> int:
        """The head size of values, decoded ones if there is a codec."""
        return self.signature[6]

    @property
    def signature(self) -> Signature:
        """Shapes, dtype and kind of device of the tensors that the plan is for."""
        return self.expected.signature

    @property
    def device(self) -> torch.device:
        """The device of the tensors that the plan is for."""
        return self.expected.device

    @property
    def visible(self) -> Mask:
        """The mask of causal and window, which documents and prefixes cut further."""
        return self.seen.visible

    @property
    def packing(self) -> BatchDocuments | None:
        """The documents of each sample; None if there are none."""
        return self.seen.packing

    @property
    def number(self) -> int:
        """The number that the ring's ranks have for this plan."""
        return self.agreed.number

    @property
    def records(self) -> dict[str, Record]:
        """The records of the last observed calls, by direction."""
        return self._own.records

    @property
    def schedule(self) -> Schedule:
        """The programs of all ranks in a call, forward and backward."""
        return self.transport.schedule

    @cached_property
    def alone(self) -> bool:
        """True if a call consists of one call of the kernel."""
        return len(self.blocks.queries) == 1 == len(self.seen.samples)

    @property
    def degree(self) -> int:
        """The number of neighbours in the all-to-all of Ulysses; 1 without it."""
        return 1 if self.ulysses is None else self.ulysses.together.size

    @cached_property
    def place(self) -> int:
        """This rank's place in the rows of `blocks`, the ranks that the transport connects."""
        return self.transport.fabric.ring.rank

    @cached_property
    def _layout_of_shards(self) -> Layout | None:
        """The layout that shards must have; None if results don't depend on it."""
        plain = all(mask == Mask() for _, mask in self.seen.samples)
        by_place = not plain or self.terms.alibi is not None or self.terms.mask_mod is not None
        return self.layout if by_place and not self.seen.repeats else None

    def _tiles(self, keys: Segments, samples: slice, mask: Mask) -> Tiles:
        queries = self.blocks.queries[self.place]
        block = Tiles(tiles(queries, keys, mask))
        block.first = samples.start or 0
        block.concurrent = self.chosen.concurrent and self.transport.keeps
        if self.terms.alibi is not None or self.terms.mask_mod is not None:
            block.rows_at = positions_seen(queries, mask).to(self.device, torch.int32)
            block.cols_at = positions_seen(keys, mask).to(self.device, torch.int32)
        if self.terms.dropout is not None:
            block.row_numbers = segment_positions(queries).to(self.device, torch.int32)
            block.col_numbers = segment_positions(keys).to(self.device, torch.int32)
        return block

    def check(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None = None,
        codec: Codec | None = None,
    ) -> bool:
        """Raise ValueError if the plan was made for other tensors than these.

        Returns:
            True if these are plain tensors, whose memory holds their values; others must be
            `resolved` first.
        """
        block, passed = block_of(q) if opened else None, self._shared.passed
        if block is not None and block in self._shared.placements:
            block = None
        key = (
            q.shape, q.dtype, q.device, q.layout, k.shape, k.dtype, k.device, k.layout,
            v.shape, v.dtype, v.device, v.layout,
            None if sinks is None else (sinks.shape, sinks.dtype, sinks.device, sinks.layout),
            codec,
        )  # fmt: skip
        plain = type(q) is type(k) is type(v) is Tensor and sinks is None
        plain = plain and not (q.is_neg() or k.is_neg() or v.is_neg())
        if block is None and key in passed and not known_shards:
            return plain
        try:
            check_known_shards(self.ring, {"q": q, "k": k, "v": v}, self._layout_of_shards)
            if block is None and key in passed:
                return plain
            if block is not None:
                block.check_plan(self)
            if key not in passed:
                check_tensors(self.expected, (q, k, v), sinks, codec)
        except ValueError as error:
            self.ring.report_failure(error)  # ranks may wait for this one
            raise ValueError(f"ring attention: {error}") from None
        if block is not None:
            self._shared.placements.add(block)
        passed.add(key)
        return plain


class _TracedLayer(RingPlan):
    """A layer's plan in traced code: the attributes that modules read, and the layer's handle."""

    # torch 2.11 hands a frozen dataclass its defaults, whatever its __init__ takes
    def __init__(self, plan: RingPlan, number: int, **_defaults: object) -> None:
        for name in (
            "ring", "layout", "seen", "terms", "kernel", "chosen", "ulysses", "capturable",
        ):  # fmt: skip
            object.__setattr__(self, name, getattr(plan, name))
        object.__setattr__(self, "handle", handle_of_layer(plan.handle, number))
