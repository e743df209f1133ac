"""A chunk of a prompt that is sharded over ranks: attention to the cache and to the chunk.

All cached tokens precede the chunk, which therefore needs no mask on the cache, in any layout of
pages. Cached keys stay; queries and results are sent, overlapped with compute:

    compute on this rank                            in flight
    the chunk's attention to itself: `ring_attn`    q, k and v to all ranks, one message each
    each other rank's queries to own cached keys
    own queries to own cached keys                  results, to the queries' ranks
    LSE merge of all, append the chunk

If scores depend on positions in the cached part too (window, ALiBi, padding), the whole chunk is
computed as in decoding.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ring_attention_pytorch.comm.messages import Form, Part
from ring_attention_pytorch.functional import ring_attn
from ring_attention_pytorch.geometry.layouts import Layout, positions
from ring_attention_pytorch.geometry.tiles import Tile
from ring_attention_pytorch.inference.cache import RingCache
from ring_attention_pytorch.inference.partial import Scores
from ring_attention_pytorch.kernels import choose
from ring_attention_pytorch.plan.option_types import KernelOption, LayoutOption
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.ranks.ring import Messages, Ring
from ring_attention_pytorch.runtime.accumulate import OutputAccumulator
from ring_attention_pytorch.runtime.interfaces import KernelRequest, KVBlock

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
        every: list[list[Tensor]] = []
        receives: list[tuple[int, Tensor]] = []
        for rank, n in enumerate(self.counts):
            form = Form.of(tensors, n)
            if rank != me:
                receives.append((rank, form.empty(device)))
            every.append([*tensors] if rank == me else form.open(receives[-1][1]))
        sends = []
        if receives:
            form = Form.of(tensors, self.counts[me])
            message = form.pack(tensors, form.empty(device))
            sends = [(rank, message) for rank, _ in receives]
        transfer = ring.exchange(some(sends), some(receives))

        def wait() -> list[list[Tensor]]:
            transfer.wait()
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
        transfer = ring.exchange(some([(ahead, message)]), some([(behind, came)]))

        def wait() -> Found:
            transfer.wait()
            out, lse = mine.open(came)
            return out, lse

        return wait

    def results(self, queries: Sequence[Tensor], attend: "Attend") -> list[Found]:
        """Return all ranks' results for own queries; `queries` has the queries of each rank.

        `attend` is attention to own cached keys. There are fewer results where some are merged.
        """
        ring, me = self.ring, self.ring.rank
        arriving = []
        for places in range(1, ring.size):
            asked = queries[(me + places) % ring.size]
            arriving.append(self.send_home(attend(asked), places))
        return [attend(queries[me]), *[wait() for wait in arriving]]


Attend = Callable[[Tensor], Found]


def form_of(found: Found, n: int) -> Form:
    """Return the form of results for n queries."""
    out, lse = found
    b, _, h, d_v = out.shape
    return Form.of_parts((Part((b, n, h, d_v), out.dtype), Part((b, h, n), lse.dtype)))


@lru_cache(maxsize=8)
def _order(layout: Layout, ranks: int, length: int, device: torch.device) -> Tensor:
    each = [positions(layout, rank=r, ring_size=ranks, length=length) for r in range(ranks)]
    return torch.cat(each).argsort().to(device)


def some(messages: Messages) -> list[tuple[int, Tensor]]:
    """Leave out empty messages; both sides know which are empty."""
    return [(rank, t) for rank, t in messages if t.numel()]


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

    def attend(self, q: Tensor) -> Found:
        """Return attention of queries `[b, n, h, d]` to these keys, without a mask."""
        outs, lses = zip(*[self._of_samples(q[which], k, v) for which, k, v in self.samples])
        if len(outs) == 1:
            return outs[0], lses[0]
        return torch.cat(outs), torch.cat(lses)

    def _of_samples(self, q: Tensor, k: Tensor, v: Tensor) -> Found:
        result = OutputAccumulator(q, v, calls=1)
        if q.shape[1] and k.shape[1]:
            everything = Tile(slice(0, q.shape[1]), slice(0, k.shape[1]), None, None)
            block = KVBlock(k, v, None, ())
            self.plan.kernel.forward(q, block, [everything], self.plan.terms, result)
        return result.finalize()


def plan_chunk(
    qkv: QKV, cache: RingCache, layout: LayoutOption, scores: Scores, sinks: Tensor | None
) -> RingPlan:
    """Plan a chunk's attention to itself, with the kernel of the highest throughput.

    The same kernel attends to the whole cache. By default a plan for a short chunk could choose
    the kernel with the fewest launches.
    """
    q, k, v = qkv
    scale, softclamp = scores.scale, scores.softclamp
    fastest = choose(None, KernelRequest.of(q, v, scale=scale, softclamp=softclamp))
    with torch.autocast(q.device.type, enabled=False):
        return RingPlan.make(
            q, k, v, causal=True, layout=layout, scale=scale, softclamp=softclamp, sinks=sinks,
            kernel=cast(KernelOption, fastest.name), group=cache.ring,
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
    result, all_rows = OutputAccumulator(q, v), slice(0, q.shape[1])
    with (
        torch.autocast(q.device.type, enabled=False),
        cache.ring.call("attention of a chunk to a cache", plan.number),
    ):
        asks = [q] if any(cache.lengths_in(layer)) else []
        gathered = chunk.gather(k, v, *asks)
        result.add(all_rows, *ring_attn(q, k, v, sinks=sinks, plan=plan, return_lse=True))
        cached = CachedKeys.of(cache, layer, plan, q.dtype) if asks else None
        every = gathered()  # k, v and q of each rank
        if cached is not None:
            for found in chunk.results([each[2] for each in every], cached.attend):
                result.add(all_rows, *found)
        out, lse = result.finalize()
    keys, values = (chunk.in_order([each[i] for each in every]) for i in (0, 1))
    cache.append(keys, None if cache.tied else values, layer)
    return out, lse
