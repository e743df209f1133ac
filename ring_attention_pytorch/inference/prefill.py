"""A chunk of a prompt that is spread over ranks: attention to the cache, and to the chunk itself.

All cached tokens come before all of the chunk. So the cache needs no mask, however its pages lie.
Cached keys stay, queries and results travel, each beside something that is computed:

    computed here                                   under way
    the chunk's attention to itself: `ring_attn`    q, k and v to all ranks, one message each
    each other rank's queries to the keys held here
    own queries to the keys held here               results for the others, home
    all merged by their lse, the chunk appended

Where positions count in the cached part, too, the whole chunk goes the way of decoding, which
knows them.
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


class Chunk(NamedTuple):
    """A chunk over ranks: how many of its tokens each has, and where these are in the chunk."""

    ring: Ring
    layout: LayoutOption
    counts: tuple[int, ...]

    def positions(self, rank: int) -> Tensor:
        """Return which tokens of the chunk a rank has, `[n]`."""
        length = sum(self.counts)
        return positions(self.layout, rank=rank, ring_size=self.ring.size, length=length)

    def in_order(self, parts: list[Tensor]) -> Tensor:
        """Return the tokens `[b, n, ...]` of all ranks, in the order of the chunk."""
        whole = torch.cat(parts, dim=1)
        order = _order(self.layout, self.ring.size, sum(self.counts), whole.device)
        return whole[:, order]

    def gather(self, *tensors: Tensor) -> Callable[[], list[list[Tensor]]]:
        """Send tensors `[b, n, ...]` to all ranks; the result waits, and returns those of each."""
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
        transfer = ring.exchange(_some(sends), _some(receives))

        def wait() -> list[list[Tensor]]:
            transfer.wait()
            return every

        return wait

    def send_home(self, found: Found, places: int) -> Callable[[], Found]:
        """Send what was found to the rank so many places ahead, whose queries it is for.

        The result waits for the rank so many places behind, and returns what that has found.
        """
        ring, me = self.ring, self.ring.rank
        ahead, behind = (me + places) % ring.size, (me - places) % ring.size
        theirs, mine = _form(found, self.counts[ahead]), _form(found, self.counts[me])
        message = theirs.pack(found, theirs.empty(found[0].device))
        came = mine.empty(message.device)
        transfer = ring.exchange(_some([(ahead, message)]), _some([(behind, came)]))

        def wait() -> Found:
            transfer.wait()
            out, lse = mine.open(came)
            return out, lse

        return wait


def _form(found: Found, n: int) -> Form:
    """Return the form of results for n queries."""
    out, lse = found
    b, _, h, d_v = out.shape
    return Form.of_parts((Part((b, n, h, d_v), out.dtype), Part((b, h, n), lse.dtype)))


@lru_cache(maxsize=8)
def _order(layout: Layout, ranks: int, length: int, device: torch.device) -> Tensor:
    each = [positions(layout, rank=r, ring_size=ranks, length=length) for r in range(ranks)]
    return torch.cat(each).argsort().to(device)


def _some(messages: Messages) -> list[tuple[int, Tensor]]:
    """Leave out messages of nothing, which both sides know."""
    return [(rank, t) for rank, t in messages if t.numel()]


class CachedKeys(NamedTuple):
    """The cached keys and values that lie here, out of their pages: of samples of one length."""

    samples: list[tuple[slice, Tensor, Tensor]]
    plan: RingPlan

    @classmethod
    def of(cls, cache: RingCache, layer: int, plan: RingPlan, dtype: torch.dtype) -> "CachedKeys":
        """Copy them. The kernel and the terms of scores are those of a plan of the chunk itself."""
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
        """Return attention of queries `[b, n, h, d]`, all of which see all of these keys."""
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
    """Plan a chunk's attention to itself, by the kernel that computes fastest.

    That one attends to all of the cache, too. Of a short chunk alone a plan might take another
    kernel: the one that is launched least.
    """
    q, k, v = qkv
    scale, softclamp = scores.scale, scores.softclamp
    fastest = choose(None, KernelRequest.of(q, v, scale=scale, softclamp=softclamp))
    with torch.autocast(q.device.type, enabled=False):
        return RingPlan.make(
            q, k, v, causal=True, layout=layout, scale=scale, softclamp=softclamp, sinks=sinks,
            kernel=cast(KernelOption, fastest.name), group=cache.ring,
        )  # fmt: skip


def prefill(
    qkv: QKV, cache: RingCache, layer: int, chunk: Chunk, sinks: Tensor | None, plan: RingPlan
) -> Found:
    """Attend to the cache and the chunk, then append it; out `[b, n, h, d_v]`, lse `[b, h, n]`.

    `plan` is of the chunk's attention to itself.
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
            for found in _by_all([each[2] for each in every], cached, chunk):
                result.add(all_rows, *found)
        out, lse = result.finalize()
    keys, values = (chunk.in_order([each[i] for each in every]) for i in (0, 1))
    cache.append(keys, values, layer)
    return out, lse


def _by_all(queries: Sequence[Tensor], cached: CachedKeys, chunk: Chunk) -> list[Found]:
    """Return what all ranks have found for this one's queries; `queries` are those of all."""
    ring, me = chunk.ring, chunk.ring.rank
    coming = []
    for places in range(1, ring.size):
        asked = queries[(me + places) % ring.size]
        coming.append(chunk.send_home(cached.attend(asked), places))
    return [cached.attend(queries[me]), *[wait() for wait in coming]]
