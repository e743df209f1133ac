"""The steps of making a plan, after ranks have agreed: tokens, heads, transport."""

from functools import partial
from typing import NamedTuple

from torch import Tensor

from ring_attention_pytorch.comm.transports import make_one_stream, make_transport, owners_at_once
from ring_attention_pytorch.comm.ulysses import Ulysses
from ring_attention_pytorch.geometry.documents import check_end
from ring_attention_pytorch.geometry.layouts import all_segments
from ring_attention_pytorch.geometry.segments import Segments
from ring_attention_pytorch.geometry.tiles import Mask
from ring_attention_pytorch.kernels import SelectedKernel
from ring_attention_pytorch.plan.calibrate import calibrated
from ring_attention_pytorch.plan.checks import check_lengths, segments_of_two
from ring_attention_pytorch.plan.masks import check_repeats, gather_positions
from ring_attention_pytorch.plan.options import Options
from ring_attention_pytorch.plan.placement import OwnMask, own_mask
from ring_attention_pytorch.plan.proposal import Proposal
from ring_attention_pytorch.ranks.agreement import raise_together
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime.dropout import Dropout
from ring_attention_pytorch.runtime.interfaces import ScoreMods, Transport
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype, wire_dtype
from ring_attention_pytorch.schedule.cost import choose_transport
from ring_attention_pytorch.schedule.hardware import (
    H200,
    Hardware,
    hardware,
    share_one_host,
    with_another,
)
from ring_attention_pytorch.schedule.pieces import KVShape, Workload
from ring_attention_pytorch.schedule.policy import documents_are_short, is_small, launches_decide


def place_tokens(
    ring: Ring, options: Options, visible: Mask, lengths: list[dict[str, int]]
) -> tuple[tuple[Segments, ...], tuple[Segments, ...]]:
    """Return the positions that each rank holds, of queries and of keys.

    Raises:
        ValueError: lengths are not the layout's, or positions can't be used; on all ranks alike.
    """
    queries = [rank["n"] for rank in lengths]
    keys = [rank["m"] for rank in lengths]
    cross = options.cross
    if cross is None:
        cross = queries != keys or options.placed
    dropped = options.dropout > 0
    counted = dropped or options.alibi_slopes is not None or options.mask_mod is not None

    def check() -> None:
        check_lengths(
            (queries, keys), options.layout, visible, cross,
            packed=options.packed, placed=options.placed, counted=counted,
        )  # fmt: skip
        if options.cu_seqlens is not None:
            check_end(options.cu_seqlens, sum(queries))

    raise_together(ring, "ring attention", check=check)
    if options.placed:
        both = gather_positions(ring, (options.query_positions, options.key_positions))
        raise_together(
            ring, "ring attention", check=partial(check_repeats, both) if dropped else None
        )
        return both[0], both[1]
    if cross:
        return segments_of_two(options.layout, queries, keys, counted)
    segments = all_segments(options.layout, ring.size, sum(queries))
    return segments, segments


class Heads(NamedTuple):
    """The blocks, heads and mask that ranks work on, after the all-to-all if there is one."""

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
    if not 1 < options.ulysses <= ring.size:
        return Heads(blocks, terms, own.values, own, None)
    ulysses, queries, keys = Ulysses.make(ring, options.ulysses, blocks[:2], q, k, v)
    blocks = blocks._replace(queries=queries, keys=keys)
    key_mask = None if own.values is None else ulysses.whole_mask(own.values)
    return Heads(blocks, ulysses.of_heads(terms), key_mask, own, ulysses)


class TransportChoice(NamedTuple):
    """The basis of a plan's choice of kernel and transport, and the alternative transport."""

    name: str
    machine: Hardware  # with measured speeds, if these decided
    memory: int | None
    at_once: int  # owners whose keys a gather fetches together
    shape: KVShape
    overlapping_transport: Transport | None  # the transport that overlaps, if it is another
    concurrent: bool  # so little to compute that calls go side by side


def settle_transport(
    ring: Ring, mine: Proposal, heads: Heads, lengths: list[dict[str, int]], same_mask: bool
) -> tuple[SelectedKernel, Transport, TransportChoice]:
    """Choose the kernel, choose and make the transport; `same_mask`: all samples have one.

    Unless a kernel is named, short documents may get another, and few tokens the one with the
    fewest launches.
    """
    options, kernel, blocks, ulysses = mine.options, mine.kernel, heads.blocks, heads.ulysses
    q, k, v = mine.shaped
    shape = _shape_of(q, k, v, ulysses)
    memory, named = options.memory, options.transport
    if named is None and memory is None:
        memory = min(rank["room"] for rank in lengths)
    at_once = owners_at_once(memory, blocks, shape)
    degree = ring.size // len(blocks.keys)  # of Ulysses
    machine = _machine_of(kernel, lengths, q)
    if options.calibrate:
        hosts = [rank["host"] for rank in lengths]
        machine = calibrated(machine, ring, degree, kernel, shape, q, hosts)
    near = machine.every(degree)
    name = named or choose_transport(blocks, shape, at_once, near if q.is_cuda else None)
    light, short = mine.fewest_launches, mine.for_short
    if short is not None and documents_are_short(blocks, shape):
        kernel, light = short, None
        machine = _with_calls_of(kernel, machine)
        near = machine.every(degree)
    if ulysses is not None:
        ring = ulysses.ring
    small = is_small(blocks, shape, near)
    low_priority = same_mask and kernel.traits.preemptible
    own_low_priority = low_priority and is_small(blocks, shape, near, undivided=True)
    overlapping = make_transport(
        name, ring, blocks, at_once, shape, q.device, near, own_low_priority
    )
    if light is not None and not launches_decide(blocks, shape, near):
        light = None
    few = (light or kernel).traits
    traits = few.square, few.keys_first
    together = make_one_stream(overlapping, blocks, shape, q.device, near, *traits)
    if light is not None and together is not None:
        machine = with_another(_with_calls_of(light, machine), kernel.name, light.name)
        kernel = light
    concurrent = same_mask and (overlapping.schedule.own_low_priority or small)
    other = together and overlapping
    chosen = TransportChoice(name, machine, memory, at_once, shape, other, concurrent)
    return kernel, together or overlapping, chosen


def _shape_of(q: Tensor, k: Tensor, v: Tensor, swap: Ulysses | None) -> KVShape:
    """Return the shapes that a transport works for, after the all-to-all if there is one."""
    (b, _, heads, d), key_heads = q.shape, k.shape[2]
    if swap is not None:
        heads, key_heads = (len(spread.heads[0]) for spread in (swap.queries, swap.keys))
    wide = wire_dtype(q.dtype) != q.dtype
    return KVShape(b, heads, key_heads, d, v.shape[3], q.dtype.itemsize, wide)


def _machine_of(kernel: SelectedKernel, ranks: list[dict[str, int]], like: Tensor) -> Hardware:
    """Return the machine of all ranks, from their notes: the slowest of their devices."""
    if not like.is_cuda:
        return H200
    domain = share_one_host([rank["host"] for rank in ranks])
    machine = hardware(kernel.name, min(rank["device"] for rank in ranks), domain)
    return _with_calls_of(kernel, machine)


def _with_calls_of(kernel: SelectedKernel, machine: Hardware) -> Hardware:
    """Return a machine with the traits of a kernel's calls; its speeds stay."""
    traits = kernel.traits
    return machine._replace(one_call=traits.fuses_merge, keys_first=traits.keys_first)
