"""Multi-head latent attention as a module."""

from functools import partial
from typing import Any, Unpack

import torch
from einops import rearrange
from torch import Tensor, nn

from ring_attention_pytorch.arguments import check_least, checked, checks_of
from ring_attention_pytorch.inference.attention import report_to_cache
from ring_attention_pytorch.inference.cache import RingCache
from ring_attention_pytorch.latent.attention import CodedPlanOptions, mla_plan, mla_ring_attn
from ring_attention_pytorch.latent.calls import report
from ring_attention_pytorch.latent.decoding import mla_attn_with_cache
from ring_attention_pytorch.nn.checks import check_tokens, dtype_refusal
from ring_attention_pytorch.nn.norm import RMSNorm
from ring_attention_pytorch.nn.rotary import THETA, RingRotaryEmbedding, apply_rotary_pos_emb
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.ranks.agreement import (
    report_to_group,
    report_to_ring_of,
    reporting,
    typed,
)

Projected = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class RingLatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-AI 2024) of a sequence that is spread over ranks.

    Ranks exchange a latent of `rank` numbers and a rotated key of `d_rope` for each token.

    Args:
        dim: model width.
        heads: of queries, and of expanded keys and values.
        rank: of the latent.
        d_nope, d_rope, d_v: head sizes: of the part without rotation, of the rotated part (even),
            and of values.
        query_rank: of a latent of queries; None projects them at once.
        theta: of the rotary embedding.

    Raises:
        ValueError: a number is out of range.

    >>> layer, x = RingLatentAttention(16, heads=2, rank=8, d_nope=4, d_rope=2, d_v=4), None
    >>> x = torch.randn(1, 9, 16)
    >>> layer(x, plan=layer.make_plan(x, causal=True)).shape
    torch.Size([1, 9, 16])
    """

    @checked
    def __init__(
        self,
        dim: int,
        *,
        heads: int = 8,
        rank: int = 128,
        d_nope: int = 64,
        d_rope: int = 32,
        d_v: int = 64,
        query_rank: int | None = None,
        theta: int | float = THETA,
    ):
        super().__init__()
        sizes = dict(dim=dim, heads=heads, rank=rank, d_nope=d_nope, d_rope=d_rope, d_v=d_v)
        with checks_of("RingLatentAttention"):
            check_least(1, **sizes, query_rank=1 if query_rank is None else query_rank)
        self.heads, self.rank, self.d_nope, self.d_rope, self.d_v = heads, rank, d_nope, d_rope, d_v
        self.norm: RMSNorm = RMSNorm(dim)
        self.rotary: RingRotaryEmbedding = RingRotaryEmbedding(d_rope, theta=theta)
        width = heads * (d_nope + d_rope)
        self.to_q: nn.Module = nn.Linear(dim, width, bias=False)
        if query_rank is not None:
            down = nn.Linear(dim, query_rank, bias=False)
            up = nn.Linear(query_rank, width, bias=False)
            self.to_q = nn.Sequential(down, RMSNorm(query_rank), up)
        self.to_latent: nn.Linear = nn.Linear(dim, rank + d_rope, bias=False)
        self.latent_norm: RMSNorm = RMSNorm(rank)
        self.up: nn.Parameter = nn.Parameter(torch.randn(heads, d_nope + d_v, rank) * rank**-0.5)
        self.to_out: nn.Linear = nn.Linear(heads * d_v, dim, bias=False)

    @typed(report)
    def make_plan(self, x: Tensor, **options: Unpack[CodedPlanOptions]) -> RingPlan:
        """Make a plan for tokens like these `[b, n, dim]`; all layers of the same sizes share it.

        Args:
            x: this rank's tokens; values don't matter.
            options: as for `mla_plan`.

        Raises:
            ValueError: x has another width; else as `mla_plan`; on all ranks.
        """
        with reporting(partial(report, {**options})):
            self._check(x)
        b, n, h, one = *x.shape[:2], self.heads, x.new_empty(())
        return mla_plan(
            one.expand(b, n, h, self.d_nope),
            one.expand(b, n, h, self.d_rope),
            one.expand(b, n, self.rank),
            one.expand(b, n, self.d_rope),
            one.expand(h, self.d_nope + self.d_v, self.rank),
            **options,
        )

    @typed(report_to_ring_of("plan"))
    def forward(self, x: Tensor, *, plan: RingPlan) -> Tensor:
        """Compute the layer for this rank's tokens.

        Args:
            x: `[b, n, dim]`.
            plan: from `make_plan`.

        Returns:
            `[b, n, dim]`.

        Raises:
            ValueError: x doesn't fit the plan.
        """
        with reporting(plan.ring.report_failure):
            self._check(x, *plan.signature[:2])
            given = self._projected(x, plan.positions(x.device, in_documents=True))
        return self.to_out(mla_ring_attn(*given, plan=plan).flatten(2))

    @typed(report_to_cache)
    @torch.no_grad()
    def decode(self, x: Tensor, cache: RingCache, layer: int = 0) -> Tensor:
        """Append tokens to a cache of latents, and compute the layer for them; no gradients.

        Attention is computed in the cache's dtype.

        Args:
            x: `[sequences, n, dim]`, the same on every rank.
            cache: from `make_cache`, or another one of latents (`mla_attn_with_cache`).
            layer: the layer of the cache.

        Returns:
            `[sequences, n, dim]`, the same on every rank.

        Raises:
            ValueError: the cache is another, or has no room; on every rank.
        """
        with reporting(partial(report_to_cache, {"cache": cache, "x": x, "layer": layer})):
            self._check(x, cache.sequences)
            with checks_of("RingLatentAttention"):
                cache.check_layer(layer)
            begins = (cache.lengths_of[layer] - cache.starts).unsqueeze(1)
            places = begins + torch.arange(x.shape[1], device=x.device)
            given = self._projected(x, places)
        taken = cache.taken_as(x.dtype)
        q_nope, q_rope, latent, k_rope, up = (t.to(taken) for t in given)
        out = mla_attn_with_cache(q_nope, q_rope, latent, k_rope, up, cache, layer=layer)
        return self.to_out(out.flatten(2).to(x.dtype))

    @typed(report_to_group("RingCache"))
    def make_cache(self, sequences: int, **options: Any) -> RingCache:
        """Make a cache of this layer's latents, or of several like it; each is held once.

        Args:
            sequences, options: as for `RingCache`; its dtype and device are the layer's by default.

        Raises:
            ValueError: as `RingCache`; on every rank.
        """
        like = dict(dtype=self.up.dtype, device=self.up.device, tied=True)
        sizes = 1, self.rank + self.d_rope
        return RingCache(sequences, *sizes, value_dim=self.rank, **{**like, **options})

    def _check(self, x: Tensor, *sizes: int) -> None:
        """Raise ValueError unless x is `[b, n, dim]` with values, for these weights and sizes."""
        with checks_of("RingLatentAttention"):
            check_tokens("x", x, self.norm.gamma.shape[0])
            if x.shape[: len(sizes)] != sizes:
                wanted = ", ".join(map(str, sizes))
                raise ValueError(
                    f"x must be [{wanted}, ...], as the plan or cache is, got {list(x.shape)}"
                )
            if (why := dtype_refusal(x, self.to_latent)) is not None:
                raise ValueError(why)
            if x.device != self.up.device:
                raise ValueError(f"x must be on {self.up.device}, as weights are, got {x.device}")

    def _projected(self, x: Tensor, places: Tensor) -> Projected:
        """Return q_nope, q_rope, latent, k_rope and `up`, of tokens at these places."""
        normed, angles = self.norm(x), self.rotary(places)
        q = rearrange(self.to_q(normed), "b n (h d) -> b n h d", h=self.heads)
        q_nope, q_rope = q.split((self.d_nope, self.d_rope), dim=-1)
        latent, k_rope = self.to_latent(normed).split((self.rank, self.d_rope), dim=-1)
        k_rope = apply_rotary_pos_emb(angles, rearrange(k_rope, "b n d -> b n 1 d"))[:, :, 0]
        q_rope = apply_rotary_pos_emb(angles, q_rope)
        return q_nope, q_rope, self.latent_norm(latent), k_rope, self.up
