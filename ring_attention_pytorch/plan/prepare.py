"""The steps of making a plan, after ranks have agreed: tokens, heads, transport."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from ring_attention_pytorch.comm.transports import make_one_stream, make_transport, owners_at_once
from ring_attention_pytorch.comm.ulysses import Ulysses
from ring_attention_pytorch.geometry.documents import check_end
from ring_attention_pytorch.geometry.layouts import all_segments
from ring_attention_pytorch.geometry.segments import Segments
from ring_attention_pytorch.geometry.tiles import Mask
from ring_attention_pytorch.plan.checks import check_lengths, segments_of_two
from ring_attention_pytorch.plan.masks import check_repeats, gather_positions
from ring_attention_pytorch.plan.options import Options
from ring_attention_pytorch.plan.over_machines import (
    degree_over_machines,
    shape_of,
    transport_over_machines,
)
from ring_attention_pytorch.plan.placement import OwnMask, own_mask
from ring_attention_pytorch.plan.proposal import Proposal
from ring_attention_pytorch.ranks.agreement import raise_together
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime.dropout import Dropout
from ring_attention_pytorch.runtime.interfaces import ScoreMods, SelectedKernel, Transport
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype
from ring_attention_pytorch.schedule.cost import choose_transport, seconds_by
from ring_attention_pytorch.schedule.hardware import (
    H200,
    Hardware,
    hardware,
    share_one_host,
    with_another,
)
from ring_attention_pytorch.schedule.pieces import KVShape, Workload
from ring_attention_pytorch.schedule.policy import (
    calls_of_documents_pay,
    documents_are_short,
    is_small,
    launches_decide,
    steps_are_short,
)

_WORTH_CALLS = 0.95  # share of the time of few calls below which a call for each document is made


def place_tokens(
    ring: Ring, options: Options, visible: Mask, notes: list[dict[str, int]]
) -> tuple[tuple[Segments, ...], tuple[Segments, ...]]:
    """Return the positions that each rank holds, of queries and of keys.

    Raises:
        ValueError: lengths are not the layout's, or positions can't be used; on all ranks alike.
    """
    queries = [note["n"] for note in notes]
    keys = [note["m"] for note in notes]
    cross = options.cross
    if cross is None:
        cross = queries != keys or options.placed
    drops = options.dropout > 0
    counted = drops or options.alibi_slopes is not None or options.mask_mod is not None

    def check() -> None:
        check_lengths(
            (queries, keys), options.layout, visible, cross,
            packed=options.packed, placed=options.placed, counted=counted,
        )  # fmt: skip
        if options.cu_seqlens is not None:
            check_end(options.cu_seqlens, sum(queries))

    raise_together(ring, "ring attention", check=check)
    if options.placed:
        placed = gather_positions(ring, (options.query_positions, options.key_positions))
        no_repeats = partial(check_repeats, placed) if drops else None
        raise_together(ring, "ring attention", no_repeats)
        return placed[0], placed[1]
    if cross:
        return segments_of_two(options.layout, queries, keys, counted)
    segments = all_segments(options.layout, ring.size, sum(queries))
    return segments, segments


class Heads(NamedTuple):
    """The blocks, heads and mask that ranks work on, after the all-to-all if there is one."""

    shards: Workload  # before it
    blocks: Workload
    terms: ScoreMods
    key_mask: Tensor | None
    own_mask: OwnMask
    ulysses: Ulysses | None


def swap_heads(ring: Ring, mine: Proposal, blocks: Workload, seed: int) -> Heads:
    """Apply the all-to-all, if any, to the plan's tokens, heads and mask."""
    options = mine.options
    q, k, v = mine.shaped
    slopes = options.alibi_slopes
    if slopes is not None:  # a copy: the caller may reuse its memory
        slopes = slopes.to(accumulation_dtype(q.dtype), copy=True)
    terms = ScoreMods(
        mine.scale,
        options.softclamp,
        options.bucket_size,
        slopes,
        options.mask_mod,
        Dropout(options.dropout, seed) if options.dropout else None,
    )
    own = own_mask(options.key_mask)
    degree = degree_over_machines(options, blocks, ring.machines, (q, k, v), mine.codec)
    if not 1 < degree <= ring.size:
        return Heads(blocks, blocks, terms, own.values, own, None)
    d_v = v.shape[3] if mine.codec is None else mine.codec.d_v
    ulysses, queries, keys = Ulysses.make(ring, degree, blocks[:2], q, k, v, d_v)
    shards, blocks = blocks, blocks._replace(queries=queries, keys=keys)
    key_mask = None if own.values is None else ulysses.whole_mask(own.values)
    return Heads(shards, blocks, ulysses.of_heads(terms), key_mask, own, ulysses)


class TransportChoice(NamedTuple):
    """The basis of a plan's choice of kernel and transport, and the alternative transport."""

    name: str
    machine: Hardware
    memory: int | None
    at_once: int  # owners whose keys a gather fetches together
    shape: KVShape
    overlapping_transport: Transport | None  # the transport that overlaps, if it is another
    concurrent: bool  # so little to compute that calls go side by side
    # predicted seconds of each kernel that documents could get, forward and backward
    by_kernel: Mapping[str, float] = MappingProxyType({})


def settle_transport(
    ring: Ring, mine: Proposal, heads: Heads, notes: list[dict[str, int]], same_mask: bool
) -> tuple[SelectedKernel, Transport, TransportChoice]:
    """Choose the kernel, choose and make the transport; `same_mask`: all samples have one.

    Unless a kernel is named, short documents, short steps of positions and long documents may get
    another, and few tokens the one with the fewest launches.
    """
    options, blocks = mine.options, heads.blocks
    q, k, v = mine.shaped
    degree = ring.size // len(blocks.keys)  # of Ulysses
    shape = shape_of(q, k, v, degree, mine.codec)
    name, memory = options.transport, options.memory
    if name is None and memory is None:
        memory = min(note["room"] for note in notes)
    at_once = owners_at_once(memory, blocks, shape)
    machine = _machine_of(mine.kernel, notes, q, ring.machines)
    if name is None:
        name = transport_over_machines(blocks, ring.machines[::degree], shape)
    if name is None:
        known = machine.every(degree) if q.is_cuda else None  # a CPU's speeds are not
        name = choose_transport(blocks, shape, at_once, known)
    kernel, machine, by_kernel = _of_documents(
        mine, blocks, shape, machine,
        lambda each: seconds_by(name, blocks, shape, at_once, each.every(degree)),
    )  # fmt: skip
    near, light = machine.every(degree), mine.fewest_launches
    if light is not None and not launches_decide(blocks, shape, near):
        light = None
    low_priority = same_mask and kernel.traits.preemptible
    low_priority = low_priority and is_small(blocks, shape, near, undivided=True)
    if heads.ulysses is not None:
        ring = heads.ulysses.ring
    overlapping = make_transport(name, ring, blocks, at_once, shape, q.device, near, low_priority)
    traits = kernel.traits if light is None else light.traits
    one_stream = make_one_stream(
        overlapping, blocks, shape, q.device, near, traits.square, traits.keys_first
    )
    if light is not None and one_stream is not None:
        machine = with_another(_with_calls_of(light, machine), kernel.name, light.name, q.shape[-1])
        kernel = light
    concurrent = overlapping.schedule.own_low_priority or is_small(blocks, shape, near)
    concurrent = concurrent and same_mask and mine.codec is None  # decoded keys are freed after it
    other = None if one_stream is None else overlapping
    chosen = TransportChoice(name, machine, memory, at_once, shape, other, concurrent, by_kernel)
    return kernel, one_stream or overlapping, chosen


def _of_documents(
    mine: Proposal,
    blocks: Workload,
    shape: KVShape,
    machine: Hardware,
    seconds: Callable[[Hardware], float],
) -> tuple[SelectedKernel, Hardware, dict[str, float]]:
    """Return the kernel that suits the documents, its machine, and the seconds of each candidate.

    Short steps of positions count as short documents. The candidates are the kernel with few calls
    for all documents, and a faster one with a call for each; there are none unless the latter can
    pay. Without documents or steps nothing changes.
    """
    kernel, short, long = mine.kernel, mine.for_short, mine.for_long
    if short is not None and (documents_are_short(blocks, shape) or steps_are_short(blocks)):
        return short, _with_calls_of(short, machine), {}
    if long is None:
        return kernel, machine, {}
    head_size = mine.shaped[0].shape[-1]
    fast = _with_calls_of(long, with_another(machine, kernel.name, long.name, head_size))
    if not calls_of_documents_pay(blocks, shape, fast, machine):
        return kernel, machine, {}
    taken, taken_by_long = seconds(machine), seconds(fast)
    by_kernel = {kernel.name: taken, long.name: taken_by_long}
    if taken_by_long < _WORTH_CALLS * taken:
        return long, fast, by_kernel
    return kernel, machine, by_kernel


def _machine_of(
    kernel: SelectedKernel, notes: list[dict[str, int]], like: Tensor, machines: tuple[int, ...]
) -> Hardware:
    """Return the hardware of all ranks, from their notes: the slowest of their devices."""
    if not like.is_cuda:
        return H200
    domain = share_one_host(machines)
    device = min(note["device"] for note in notes)
    machine = hardware(kernel.name, device, domain, like.shape[-1])
    return _with_calls_of(kernel, machine)


def _with_calls_of(kernel: SelectedKernel, machine: Hardware) -> Hardware:
    """Return a machine with the traits of a kernel's calls; its speeds stay."""
    traits = kernel.traits
    return machine._replace(one_call=traits.fuses_merge, keys_first=traits.keys_first)
