"""A chunk of a prompt that is sharded over ranks: attention to the cache and to the chunk.

All cached tokens precede the chunk, which therefore needs no mask on the cache, in any layout of
pages. Cached keys stay; queries and results are sent, overlapped with compute:

    compute on this rank                            in flight
    own queries to the chunk's own keys             q, k and v to all ranks, one message each
    own queries to own cached keys
    each other rank's queries to own cached keys    results, to the queries' ranks
    own queries to the chunk's other keys
    LSE merge of all, append the chunk

Over several machines cached keys are sent instead of queries and results, as long as they are
fewer bytes (`chunk_costs.keys_travel`).

A layer that keeps only its window has it on every rank: own queries see it as keys before the
chunk, and only the chunk's keys are sent. If scores depend on positions elsewhere (a window or
ALiBi where all tokens are kept, padding), the whole chunk is computed as in decoding.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor

from ring_attention_pytorch.comm.collectives import start_gather, start_messages
from ring_attention_pytorch.comm.messages import Form, Part
from ring_attention_pytorch.geometry.layouts import Layout, positions
from ring_attention_pytorch.geometry.segments import Segment, segment_positions
from ring_attention_pytorch.geometry.tiles import Tile
from ring_attention_pytorch.inference.cache import RingCache
from ring_attention_pytorch.inference.chunk_costs import ChunkSizes, keys_travel
from ring_attention_pytorch.inference.partial import Scores
from ring_attention_pytorch.kernels import choose
from ring_attention_pytorch.plan.option_types import KernelOption, LayoutOption
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime.accumulate import OutputAccumulator
from ring_attention_pytorch.runtime.interfaces import KernelRequest, KVBlock
from ring_attention_pytorch.schedule.pieces import all_together

QKV = tuple[Tensor, Tensor, Tensor]
Found = tuple[Tensor, Tensor]  # out `[b, n, h, d_v]` and lse `[b, h, n]`


class PromptChunk(NamedTuple):
    """A sharded chunk: its layout, and the number of its tokens on each rank."""

    ring: Ring
    layout: LayoutOption
    counts: tuple[int, ...]

    def positions(self, rank: int) -> Tensor:
        """Return the positions in the chunk of a rank's tokens, `[n]`."""
        length = sum(self.counts)
        return positions(self.layout, rank=rank, ring_size=self.ring.size, length=length)

    def in_order(self, parts: list[Tensor]) -> Tensor:
        """Concatenate all ranks' tokens `[b, n, ...]` in the order of the chunk."""
        whole = torch.cat(parts, dim=1)
        order = _order(self.layout, self.ring.size, sum(self.counts), whole.device)
        return whole[:, order]

    def gather(self, *tensors: Tensor) -> Callable[[], list[list[Tensor]]]:
        """Send tensors `[b, n, ...]` to all ranks; return a function that waits for theirs."""
        ring, me, device = self.ring, self.ring.rank, tensors[0].device
        if ring.size == 1:
            return lambda: [[*tensors]]
        forms = [Form.of(tensors, n) for n in self.counts]
        parts = [form.empty(device) for form in forms]
        forms[me].pack(tensors, parts[me])
        every = [form.open(part) for form, part in zip(forms, parts)]
        arrive = start_gather(parts, ring, ring.machines)

        def wait() -> list[list[Tensor]]:
            arrive()
            return every

        return wait

    def send_home(self, found: Found, places: int) -> Callable[[], Found]:
        """Send a result to the rank `places` ahead, whose queries it is for.

        Return a function that waits for the result from the rank `places` behind.
        """
        ring, me = self.ring, self.ring.rank
        ahead, behind = (me + places) % ring.size, (me - places) % ring.size
        theirs, mine = form_of(found, self.counts[ahead]), form_of(found, self.counts[me])
        message = theirs.pack(found, theirs.empty(found[0].device))
        came = mine.empty(message.device)
        transfer = start_messages(ring, [(ahead, message)], [(behind, came)])

        def wait() -> Found:
            transfer.wait()
            out, lse = mine.open(came)
            return out, lse

        return wait

    def results(self, queries: Sequence[Tensor], attend: "Attend") -> "Wait":
        """Send results home to the other ranks; `queries` has the queries of each rank.

        `attend` is attention to own cached keys. Return a function that waits for the others'
        results for own queries. There are fewer where some are merged.
        """
        ring, me = self.ring, self.ring.rank
        arriving = []
        for places in range(1, ring.size):
            asked = queries[(me + places) % ring.size]
            arriving.append(self.send_home(attend(asked), places))
        return lambda: [wait() for wait in arriving]


Attend = Callable[[Tensor], Found]
Wait = Callable[[], list[Found]]  # returns results for own queries


def form_of(found: Found, n: int) -> Form:
    """Return the form of results for n queries."""
    out, lse = found
    b, _, h, d_v = out.shape
    return Form.of_parts((Part((b, n, h, d_v), out.dtype), Part((b, h, n), lse.dtype)))


@lru_cache(maxsize=8)
def _order(layout: Layout, ranks: int, length: int, device: torch.device) -> Tensor:
    each = [positions(layout, rank=r, ring_size=ranks, length=length) for r in range(ranks)]
    return torch.cat(each).argsort().to(device)


class CachedKeys(NamedTuple):
    """This rank's cached keys and values, copied out of pages: groups of samples of one length."""

    samples: list[tuple[slice, Tensor, Tensor]]
    plan: RingPlan

    @classmethod
    def of(cls, cache: RingCache, layer: int, plan: RingPlan, dtype: torch.dtype) -> "CachedKeys":
        """Copy them. Kernel and score terms are the same as for the chunk itself, in `plan`."""
        lengths = cache.lengths_in(layer)
        alike = len({*lengths}) == 1
        step = len(lengths) if alike else 1
        samples = []
        for first in range(0, len(lengths), step):
            which = slice(first, first + step)
            held = cache.pages.held(cache.ring.rank, lengths[first])
            k, v = cache.pools.local_of_all(which, held, layer)
            samples.append((which, k.to(dtype), v.to(dtype)))
        return cls(samples, plan)

    def gather(
        self, cache: RingCache, layer: int, chunk: PromptChunk
    ) -> "Callable[[], CachedKeys]":
        """Send these keys to all ranks of the chunk; return a function that waits for theirs."""
        lengths, pages, waits = cache.lengths_in(layer), cache.pages, []
        plan = self.plan  # without these keys, which the caller may drop meanwhile
        for which, k, v in self.samples:
            length = lengths[which.start]
            counts = tuple(pages.held(rank, length) for rank in range(chunk.ring.size))
            sent = [k] if cache.tied else [k, v]
            waits.append((which, chunk._replace(counts=counts).gather(*sent)))

        def wait() -> CachedKeys:
            samples = []
            for which, arrive in waits:
                every = arrive()
                del every[chunk.ring.rank]
                k, *values = (torch.cat(each, dim=1) for each in zip(*every))
                v = values[0] if values else k[..., : cache.value_dim]
                samples.append((which, k, v))
            return CachedKeys(samples, plan)

        return wait

    def attend(self, q: Tensor) -> Found:
        """Return attention of queries `[b, n, h, d]` to these keys, without a mask."""
        outs, lses = zip(*[self._of_samples(q[which], k, v) for which, k, v in self.samples])
        if len(outs) == 1:
            return outs[0], lses[0]
        return torch.cat(outs), torch.cat(lses)

    def _of_samples(self, q: Tensor, k: Tensor, v: Tensor) -> Found:
        result = OutputAccumulator(q, v.shape[-1], calls=1)
        if q.shape[1] and k.shape[1]:
            everything = Tile(slice(0, q.shape[1]), slice(0, k.shape[1]), None, None)
            block = KVBlock(k, v, None, ())
            self.plan.kernel.forward(q, block, [everything], self.plan.terms, result)
        return result.finalize()


def plan_chunk(
    qkv: QKV,
    cache: RingCache,
    layout: LayoutOption,
    scores: Scores,
    sinks: Tensor | None,
    slopes: Tensor | None,
) -> RingPlan:
    """Plan a chunk's attention to itself, with the kernel of the highest throughput.

    The same kernel attends to the whole cache. By default a plan for a short chunk could choose
    the kernel with the fewest launches.
    """
    q, k, v = qkv
    scale, softclamp, window = scores
    slopes = None if slopes is None else slopes.detach()
    request = KernelRequest.of(
        q, v, scale=scale, softclamp=softclamp, window=window, alibi_slopes=slopes
    )
    fastest = choose(None, request)
    return RingPlan.make(
        q, k, v, causal=True, layout=layout, scale=scale, softclamp=softclamp, sinks=sinks,
        window=window, alibi_slopes=slopes,
        kernel=cast(KernelOption, fastest.name), group=cache.ring,
        transport="ring",  # none is used: all ranks get the chunk's keys, to store them
        ulysses=1,
    )  # fmt: skip


def prefill(
    qkv: QKV, cache: RingCache, layer: int, chunk: PromptChunk, sinks: Tensor | None, plan: RingPlan
) -> Found:
    """Attend to the cache and the chunk, then append it; out `[b, n, h, d_v]`, lse `[b, h, n]`.

    `plan` is the plan of the chunk's attention to itself.
    """
    q, k, v = qkv
    k, v = cache.rounded(k), cache.rounded(v)
    result, all_rows = OutputAccumulator(q, v.shape[-1]), slice(0, q.shape[1])
    with cache.ring.call("attention of a chunk to a cache", plan.number, None):
        sent = _sent(q, cache, layer, chunk)
        gathered = chunk.gather(
            k, *([] if cache.tied else [v]), *([q] if sent == "queries" else [])
        )
        cached = None if sent is None else CachedKeys.of(cache, layer, plan, q.dtype)
        fetched = cached.gather(cache, layer, chunk) if cached and sent == "keys" else None
        _attend_chunk(plan, q, plan.keys(k, v), result)
        for which, block in _windows(cache, layer, plan, q.dtype):
            _attend_chunk(plan, q[which], block, result.samples(which))
        if cached is not None:
            result.add(all_rows, *cached.attend(q))
        every = gathered()  # k, v and q of each rank
        elsewhere: Wait = list
        if fetched is not None:
            elsewhere = partial(_results, fetched, q)
        elif cached is not None:
            elsewhere = chunk.results([each[-1] for each in every], cached.attend)
        del cached  # copies, which memory need not hold any longer
        keys = [each[0] for each in every]
        values = [t[..., : cache.value_dim] for t in keys] if cache.tied else [t[1] for t in every]
        _attend_chunk(plan, q, _others(plan, keys, values), result)
        for found in elsewhere():
            result.add(all_rows, *found)
        if sinks is not None:
            result.add_sinks(sinks)
        out, lse = result.finalize()
        cache.append(chunk.in_order(keys), None if cache.tied else chunk.in_order(values), layer)
    return out, lse


def _sent(
    q: Tensor, cache: RingCache, layer: int, chunk: PromptChunk
) -> Literal["queries", "keys"] | None:
    """Return whether queries or cached keys are sent; None if no rank has keys that others lack."""
    cached = sum(cache.lengths_in(layer))
    if not cached or cache.memory(layer).window is not None:
        return None
    sizes = ChunkSizes.of(cache, q.shape[2], sum(chunk.counts), q.dtype)
    return "keys" if keys_travel(sizes, cached, cache.ring.machines) else "queries"


def _results(fetched: Callable[[], CachedKeys], q: Tensor) -> list[Found]:
    """Wait for the other ranks' cached keys, and attend to them."""
    return [fetched().attend(q)]


def _windows(
    cache: RingCache, layer: int, plan: RingPlan, dtype: torch.dtype
) -> Iterator[tuple[slice, KVBlock]]:
    """Yield samples, and the keys in a layer's window, at positions before the chunk's.

    None if the layer keeps all tokens. Segments have the stride of the queries.
    """
    pools, window, lengths = cache.memory(layer), plan.visible.window, cache.lengths_in(layer)
    if pools.window is None or window is None:
        return
    stride = max(segment.stride for of_rank in plan.blocks.queries for segment in of_rank)
    held = [pools.local(i, layer, length)[:2] for i, length in enumerate(lengths)]
    seen = [min(length, window) for length in lengths]
    step = len(seen) if len({*seen}) == 1 else 1
    for first in range(0, len(seen), step):
        n, which = seen[first], slice(first, first + step)
        starts = range(-n, min(n, stride) - n)
        segments = tuple(Segment(start, stride, -(start // stride)) for start in starts)
        order = segment_positions(segments, cache.device) + n
        keys, values = [], []
        for k, v in held[which]:
            keys.append(k[len(k) - n :][order].to(dtype))
            values.append(v[len(v) - n :][order].to(dtype))
        yield which, KVBlock(torch.stack(keys), torch.stack(values), None, segments)


def _attend_chunk(plan: RingPlan, q: Tensor, keys: KVBlock, result: OutputAccumulator) -> None:
    """Attend to some of the chunk's keys."""
    for samples, tiles in plan.tiles(keys.segments):
        if tiles:
            of_samples = keys.samples(samples), tiles, plan.terms, result.samples(samples)
            plan.kernel.forward(q[samples], *of_samples)


def _others(plan: RingPlan, keys: Sequence[Tensor], values: Sequence[Tensor]) -> KVBlock:
    """Join the chunk's keys of other ranks that own queries see, in the order of positions."""
    rank = plan.ring.rank
    k, v, segments = [keys[rank][:, :0]], [values[rank][:, :0]], []  # there may be no others
    for owner, first, segment in all_together(plan.blocks).pieces[rank]:
        if owner != rank:
            cols = slice(first, first + segment.length)
            k.append(keys[owner][:, cols])
            v.append(values[owner][:, cols])
            segments.append(segment)
    return KVBlock(torch.cat(k, 1), torch.cat(v, 1), None, tuple(segments))
