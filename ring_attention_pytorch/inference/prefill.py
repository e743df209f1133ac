"""A chunk of a prompt that is spread over ranks: attention to the cache, and to the chunk itself.

All cached tokens come before all of the chunk. So the cache needs no mask, however its pages lie:

    1. queries go to all ranks; each attends to the keys that it holds, and sends results home
    2. the chunk attends to itself, causally, as in training: `ring_attn`
    3. both are merged by their lse, in float32 at least

What travels in 1 depends on the chunk alone. Where positions count in the cached part, too, the
whole chunk goes the way of decoding, which knows them.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ring_attention_pytorch.comm.ring import Messages, Ring
from ring_attention_pytorch.functional import ring_attn
from ring_attention_pytorch.geometry.layouts import Layout, positions
from ring_attention_pytorch.geometry.tiles import Tile
from ring_attention_pytorch.inference.cache import RingCache
from ring_attention_pytorch.inference.partial import Scores
from ring_attention_pytorch.kernels import choose
from ring_attention_pytorch.plan.option_types import LayoutOption
from ring_attention_pytorch.runtime.accumulate import OutputAccumulator
from ring_attention_pytorch.runtime.interfaces import KernelRequest, KVBlock, ScoreMods
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype, merge_

_ROWS = 1024  # that kernels take at once, if they hold scores in memory


class Chunk(NamedTuple):
    """A chunk over ranks: how many of its tokens each has, and where these are in the chunk."""

    ring: Ring
    layout: LayoutOption
    counts: tuple[int, ...]

    def positions(self, rank: int) -> Tensor:
        """Return which tokens of the chunk a rank has, `[n]`."""
        length = sum(self.counts)
        return positions(self.layout, rank=rank, ring_size=self.ring.size, length=length)

    def order(self, device: torch.device) -> Tensor:
        """Return where each token of the chunk is among those of all ranks, one after another."""
        return _order(self.layout, self.ring.size, sum(self.counts), device)

    def gathered(self, *tensors: Tensor) -> list[Tensor]:
        """Return the tensors `[b, n, ...]` of all ranks, one after another."""
        ring, me = self.ring, self.ring.rank
        every = [[t.contiguous() for t in tensors] if r == me else [] for r in range(ring.size)]
        sends: list[tuple[int, Tensor]] = []
        receives: list[tuple[int, Tensor]] = []
        for rank, n in enumerate(self.counts):
            if rank != me:
                every[rank] = [t.new_empty((t.shape[0], n, *t.shape[2:])) for t in tensors]
                sends += [(rank, t) for t in every[me]]
                receives += [(rank, t) for t in every[rank]]
        ring.exchange(_some(sends), _some(receives)).wait()
        return [torch.cat(parts, dim=1) for parts in zip(*every)]

    def sent_home(self, out: Tensor, lse: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return what all ranks have found for this one's queries, of results for all queries.

        out is `[b, n, h, d_v]` and lse `[b, h, n]`, rank after rank.
        """
        ring, me = self.ring, self.ring.rank
        outs = [t.contiguous() for t in out.split(self.counts, dim=1)]
        lses = [t.contiguous() for t in lse.split(self.counts, dim=2)]
        sends: list[tuple[int, Tensor]] = []
        receives: list[tuple[int, Tensor]] = []
        found = []
        for rank in range(ring.size):
            mine = outs[me], lses[me]
            if rank != me:
                mine = torch.empty_like(outs[me]), torch.empty_like(lses[me])
                sends += [(rank, outs[rank]), (rank, lses[rank])]
                receives += [(rank, t) for t in mine]
            found.append(mine)
        ring.exchange(_some(sends), _some(receives)).wait()
        return found


@lru_cache(maxsize=8)
def _order(layout: Layout, ranks: int, length: int, device: torch.device) -> Tensor:
    each = [positions(layout, rank=r, ring_size=ranks, length=length) for r in range(ranks)]
    return torch.cat(each).argsort().to(device)


def _some(messages: Messages) -> list[tuple[int, Tensor]]:
    """Leave out messages of nothing, which both sides know."""
    return [(rank, t) for rank, t in messages if t.numel()]


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: RingCache,
    layer: int,
    chunk: Chunk,
    scores: Scores,
) -> tuple[Tensor, Tensor]:
    """Attend to the cache and the chunk, then append it; out in a wide dtype, and lse [b, h, n]."""
    k, v = cache.rounded(k), cache.rounded(v)
    with torch.autocast(q.device.type, enabled=False):
        out, lse = ring_attn(
            q, k, v, causal=True, layout=chunk.layout, scale=scores.scale,
            softclamp=scores.softclamp, group=cache.ring, return_lse=True,
        )  # fmt: skip
        out, lse = out.to(accumulation_dtype(out.dtype)), lse.contiguous()
        with cache.ring.call("attention of a chunk to a cache"):
            whole_k, whole_v = chunk.gathered(k, v)
            if any(cache.lengths_in(layer)):
                parts = chunk.sent_home(*_to_cache(q, cache, layer, chunk, scores))
                flat = [t for part in parts for t in part]
                merge_(out, lse, *flat)
    order = chunk.order(q.device)
    cache.append(whole_k[:, order], whole_v[:, order], layer)
    return out, lse


def _to_cache(
    q: Tensor, cache: RingCache, layer: int, chunk: Chunk, scores: Scores
) -> tuple[Tensor, Tensor]:
    """Attend all ranks' queries to the keys held here, which all of them see."""
    (every,) = chunk.gathered(q)
    lengths = cache.lengths_in(layer)
    alike = len({*lengths}) == 1
    groups = [slice(0, len(lengths))] if alike else [slice(i, i + 1) for i in range(len(lengths))]
    found = [_of_samples(every[group], cache, layer, group, scores) for group in groups]
    outs, lses = zip(*found)
    return torch.cat(outs), torch.cat(lses)


def _of_samples(
    q: Tensor, cache: RingCache, layer: int, which: slice, scores: Scores
) -> tuple[Tensor, Tensor]:
    held = cache.pages.held(cache.ring.rank, cache.lengths_in(layer)[which.start])
    if not held:
        b, n, h, _ = q.shape
        wide = accumulation_dtype(q.dtype)
        nothing = q.new_full((b, h, n), -torch.inf, dtype=wide)
        return q.new_zeros((b, n, h, cache.value_dim)), nothing
    k, v = (t.to(q.dtype) for t in cache.local_of_all(which, held, layer))
    result = OutputAccumulator(q, v, calls=1)
    kernel = choose(None, KernelRequest.of(q, v, scale=scores.scale, softclamp=scores.softclamp))
    everything = Tile(slice(0, q.shape[1]), slice(0, held), None, None)
    terms = ScoreMods(scores.scale, scores.softclamp, _ROWS)
    kernel.forward(q, KVBlock(k, v, None, ()), [everything], terms, result)
    return result.finalize()
