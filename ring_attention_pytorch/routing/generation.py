"""Generation by causal routed blocks, with keys sharded over the ranks.

Tokens are read in pieces that never cross the end of a window:

    windows      | 0 1 2 3 | 4 5 6 7 | 8 9 ..
    pieces         0 1 2 3   4 5 6 7   8   9    at 8, tokens 4 to 8 are kept

Routing a token needs its own window and the one before, so each layer keeps their tokens on all
ranks. A window's heavy keys are chosen when it is full, and appended to a cache that has only
chosen keys. All ranks compute the same, except for attention to their share of the keys.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from ring_attention_pytorch.inference.attention import ring_attn_with_cache
from ring_attention_pytorch.nn.layer_caches import Reading, TokenChunk, token_caches
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.routing.attention import base_for
from ring_attention_pytorch.routing.autoregressive import (
    ConditionalRoutedAutoregressiveAttention as RoutedAttention,
)
from ring_attention_pytorch.routing.feedforward import ConditionalRoutedFeedForward
from ring_attention_pytorch.routing.plan import RoutingPlan
from ring_attention_pytorch.routing.router import CoordinateDescentRouter, Routed, Tokens
from ring_attention_pytorch.routing.selection import slots


class Recent:
    """The tokens `[b, n, dim]` of the last window, full or not, and of the one before."""

    def __init__(self, size: int) -> None:
        self.size, self.tokens, self.length = size, torch.empty(0), 0

    def add(self, x: Tensor) -> None:
        """Add tokens that are all in one window."""
        kept = self.tokens if self.length else x[:, :0]
        self.tokens = torch.cat((kept[:, self.size :] if self._full else kept, x), 1)
        self.length += x.shape[1]

    @property
    def _full(self) -> bool:
        return self.length > 0 and self.tokens.shape[1] == 2 * self.size

    @property
    def window(self) -> Tensor | None:
        """The tokens of the last window if it is full; if not, None."""
        return None if self.length % self.size else self.tokens[:, -self.size :]


class Picked(NamedTuple):
    """The routed tokens `[b, K, dim]` of a piece, their places in it and their gates."""

    tokens: Tensor
    places: Tensor  # [b, K]
    gates: Tensor  # [b, K]
    real: Tensor  # bool [b, K], False for empty slots

    @classmethod
    def of(cls, x: Tensor, recent: Recent, router: CoordinateDescentRouter, k: Tokens) -> "Picked":
        """Choose among the tokens x, which were the last to be added to `recent`."""
        n, plan = x.shape[1], RoutingPlan.make(recent.tokens, group=Ring.alone())
        found = router.choose(recent.tokens, plan, k, size=recent.size, causal=True)
        places = found.positions[:, 0] - (plan.length - n)
        places = places.sort(dim=-1, descending=True).values[:, :n]
        real, places = places >= 0, places.clamp(min=0)
        gates = found.gates[:, 0, -n:].gather(1, places)
        at = places.unsqueeze(-1).expand(-1, -1, x.shape[2])
        return cls(x.gather(1, at), places, gates, real)

    def home(self, y: Tensor, base: Tensor) -> Tensor:
        """Return base `[b, n, dim]` with y `[b, K, dim]`, times gates, at the tokens' places."""
        gated = (y * self.gates.unsqueeze(-1).to(y.dtype)).to(base.dtype)
        n = base.shape[1]
        places = self.places.masked_fill(~self.real, n).unsqueeze(-1).expand_as(gated)
        beside = torch.cat((base, base[:, :1]), 1)  # empty slots write there
        return beside.scatter(1, places, gated)[:, :n]


class CachedRoutedTransformer:
    """A causal `ConditionalRoutedTransformer` with the caches of its layers."""

    def __init__(self, model: Any, reading: Reading) -> None:
        self.model, self.kernel, self.length = model, reading.kernel, 0
        attentions = [block.conditional_attn for block in model.layers]
        first, room = attentions[0], reading.capacity
        self.window, heavy = first.window, first.heavy_attn
        chosen = max(1, room // self.window * slots(first.num_heavy_tokens_kv, self.window))
        self.heavy = reading.cache([None] * len(attentions), heavy.heads, heavy.dim_head, chosen)
        self.light = token_caches([attn.light_attn for attn in attentions], reading)
        self.recent = [(Recent(self.window), Recent(self.window)) for _ in model.layers]

    def prefill(self, ids: Tensor) -> None:
        rest = self.window - self.length % self.window
        for piece in (ids[:, :rest], *ids[:, rest:].split(self.window, dim=1)):
            if piece.shape[1]:
                self.hidden(piece)

    def hidden(self, ids: Tensor) -> Tensor:
        """Read ids `[b, n]`, all in one window; return the last one's hidden state."""
        at = torch.arange(ids.shape[1], device=ids.device) + self.length
        tokens = self.model.token_emb(ids)
        for layer, block in enumerate(self.model.layers):
            of_attention, of_ff = self.recent[layer]
            tokens = tokens + self._attend(block.conditional_attn, tokens, at, of_attention, layer)
            tokens = tokens + feed_forward(block.conditional_ff, tokens, of_ff)
        self.length += ids.shape[1]
        return tokens[:, -1]

    def _attend(
        self, attn: RoutedAttention, x: Tensor, at: Tensor, recent: Recent, layer: int
    ) -> Tensor:
        recent.add(x)
        picked = Picked.of(x, recent, attn.q_router, attn.num_heavy_tokens_q)
        heavy, light = attn.heavy_attn, attn.light_attn
        q = heavy.queries(picked.tokens, at[picked.places], picked.gates)
        # all queries see all of these keys, so they can be heads of one token
        rows = rearrange(q, "b k h d -> b 1 (h k) d")
        rows = rows.to(self.heavy.taken_as(rows.dtype))
        out, lse = ring_attn_with_cache(
            rows, None, None, self.heavy, layer=layer, kernel=self.kernel, return_lse=True
        )
        out = rearrange(out, "b 1 (h k) d -> b k h d", h=heavy.heads)
        out = heavy.with_null(q, out, rearrange(lse, "b (h k) 1 -> b h k", h=heavy.heads))
        found = picked.home(heavy.to_out(out), base_for(x, attn.null_q_token))
        if (window := recent.window) is not None:
            self._append_keys(attn, window, recent.length - self.window, layer)
        assert light is not None  # causal ones have it
        angles = None if light.rotary_embed is None else light.rotary_embed(at)
        return found + self.light[layer].attend(x, TokenChunk(at, angles, None, x.shape[1]))

    def _append_keys(self, attn: RoutedAttention, window: Tensor, start: int, layer: int) -> None:
        """Choose the heavy keys of a full window that starts at `start`, and append them."""
        plan = RoutingPlan.make(window, group=Ring.alone())
        chosen = attn.kv_router.choose(window, plan, attn.num_heavy_tokens_kv, size=self.window)
        routed = Routed.gather(window, chosen, plan)
        way = replace(routed.way, positions=routed.positions + start)
        k, v = attn.heavy_attn.keys(routed._replace(way=way))
        if k.shape[1]:
            k, v = (t.to(self.heavy.taken_as(v.dtype)) for t in (k, v))
            self.heavy.append(k, v, layer)


def feed_forward(ff: ConditionalRoutedFeedForward, x: Tensor, recent: Recent) -> Tensor:
    """Compute a causal routed feed-forward for tokens x, which follow the `recent` tokens."""
    recent.add(x)
    picked = Picked.of(x, recent, ff.router, ff.num_heavy_tokens)
    return ff.light_ff(x) + picked.home(ff.heavy_ff(picked.tokens), base_for(x, None))
