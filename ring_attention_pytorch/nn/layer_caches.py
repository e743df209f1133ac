"""The caches of a model's layers during generation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from einops import rearrange
from torch import Tensor

from ring_attention_pytorch.geometry.layouts import all_segments
from ring_attention_pytorch.inference.attention import ring_attn_with_cache
from ring_attention_pytorch.inference.cache import RingCache
from ring_attention_pytorch.inference.model_cache import model_cache
from ring_attention_pytorch.nn.attention import RingAttention
from ring_attention_pytorch.nn.recurrent import LayerState, RecurrentLayer
from ring_attention_pytorch.nn.rotary import apply_rotary_pos_emb
from ring_attention_pytorch.plan.option_types import LayoutName
from ring_attention_pytorch.plan.plan_cache import PlanCache
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.recurrent.plan import RunPlan
from ring_attention_pytorch.recurrent.runs import Runs


class Reading(NamedTuple):
    """Settings of a generation that are the same for all layers and tokens."""

    ring: Ring
    samples: int
    capacity: int  # most tokens per sample
    dtype: torch.dtype  # of queries, keys and values
    device: torch.device
    kernel: str | None = None  # of attention to cached tokens
    starts: Sequence[int] | None = None  # per sample: tokens before this one are padding
    cache_dtype: torch.dtype | None = None  # of cached keys and values; None is `dtype`

    def cache(
        self, windows: Sequence[int | None], heads: int, dim: int, capacity: int
    ) -> RingCache:
        """Make a cache for layers with these windows; `capacity` is in tokens per sample."""
        return model_cache(
            windows, self.samples, heads, dim, capacity=capacity, group=self.ring,
            device=self.device, dtype=self.cache_dtype or self.dtype,
        )  # fmt: skip


@dataclass(frozen=True)
class TokenChunk:
    """Tokens that are read at once: a part of the prompt, or one token."""

    at: Tensor  # [n], positions
    angles: Tensor | None  # [n, d]
    layout: LayoutName | None  # layout of the shards; None: the same tokens on all ranks
    length: int  # tokens of all ranks
    plans: PlanCache[Any] = field(default_factory=PlanCache)  # of attention, shared by layers


class LayerCache(Protocol):
    """The cache of one layer."""

    @property
    def length(self) -> int | Tensor:
        """Number of tokens read."""
        ...

    def attend(self, x: Tensor, chunk: TokenChunk) -> Tensor:
        """Read tokens `[b, n, dim]`; return the layer's result for them."""
        ...


def caches_of(layers: Sequence[Any], reading: Reading) -> list[LayerCache]:
    """Make the cache of each layer; layers of attention without summaries share a `RingCache`."""
    makers = [_maker(layer) for layer in layers]
    sharing = [layer for layer, maker in zip(layers, makers) if maker is None]
    shared = iter(token_caches(sharing, reading))
    caches = []
    for maker in makers:
        caches.append(next(shared) if maker is None else maker(reading))
    return caches


def _maker(layer: Any) -> Callable[[Reading], LayerCache] | None:
    """Return the function that makes a layer's own cache; None for attention that shares one."""
    if isinstance(layer, RecurrentLayer):
        return partial(StateCache, layer)
    return None if layer.summaries is None else partial(layer.summaries.cache, layer)


class StateCache:
    """A recurrent layer, and its state after the tokens read so far, whole on every rank."""

    def __init__(self, layer: RecurrentLayer, reading: Reading) -> None:
        self.layer, self.reading = layer, reading
        self.length: int = 0
        self.state: LayerState | None = None
        self._steps: PlanCache[RunPlan] = PlanCache()

    def attend(self, x: Tensor, chunk: TokenChunk) -> Tensor:
        """Read a chunk of the prompt, or new tokens: each rank by itself, as all have them."""
        mask = None
        if chunk.layout is None:
            plan = self._steps.of(x.shape, partial(_plan, x, chunk, Ring.alone()))
        else:
            plan = chunk.plans.of("runs", partial(_plan, x, chunk, self.reading.ring))
            if self.reading.starts is not None:
                starts = torch.as_tensor(self.reading.starts, device=x.device)
                mask = chunk.at >= starts[:, None]
        out, self.state = self.layer.read(x, mask, plan, self.state)
        self.length += chunk.length
        return out


def _plan(x: Tensor, chunk: TokenChunk, ring: Ring) -> RunPlan:
    segments = all_segments(chunk.layout or "contiguous", ring.size, chunk.length)
    return RunPlan(ring, Runs.of(segments, None, len(x)), x.device)


def token_caches(layers: Sequence[RingAttention], reading: Reading) -> list["TokenCache"]:
    """Make one `RingCache` for all layers, and a view of it for each."""
    if not layers:
        return []
    heads, dim = layers[0].heads_here()[1], layers[0].dim_head
    cache = reading.cache([attn.window for attn in layers], heads, dim, reading.capacity)
    if reading.starts is not None:
        cache.hide_before(reading.starts)
    return [TokenCache(attn, cache, i, reading.kernel) for i, attn in enumerate(layers)]


class TokenCache(NamedTuple):
    """One layer's keys and values: all of them over the ring, or with a window the last ones."""

    attn: RingAttention
    cache: RingCache
    layer: int
    kernel: str | None

    @property
    def length(self) -> Tensor:
        return self.cache.lengths_of[self.layer, 0]

    def attend(self, x: Tensor, chunk: TokenChunk) -> Tensor:
        attn = self.attn
        q, k, v = attn.project(x, None)
        dtype = v.dtype
        if (angles := chunk.angles) is not None:
            q, k = apply_rotary_pos_emb(angles, q), apply_rotary_pos_emb(angles, k)
        q, k, v = (t.to(self.cache.taken_as(dtype)) for t in (q, k, v))
        out = ring_attn_with_cache(
            q, k, v, self.cache, layer=self.layer, window=attn.window, softclamp=attn.softclamp,
            layout=chunk.layout, kernel=self.kernel if chunk.layout is None else None,
        )  # fmt: skip
        assert isinstance(out, Tensor)  # lse was not asked for
        return attn.to_out(rearrange(out, "b n h d -> b n (h d)").to(dtype))
