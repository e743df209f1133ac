"""Light attention of all tokens in a local window, plus heavy attention of routed tokens (CoLT5).

Ainslie et al. 2023, "CoLT5: Faster Long-Range Transformers with Conditional Computation",
https://arxiv.org/abs/2303.09752. Names and parameters match CoLT5-attention.
"""

from collections.abc import Hashable
from typing import Any

import torch
from einops import einsum, rearrange, repeat
from torch import Tensor, nn

from ring_attention_pytorch.arguments import check_least, checked
from ring_attention_pytorch.functional import ring_attn as attend
from ring_attention_pytorch.nn.attention import RingAttention
from ring_attention_pytorch.nn.checks import check_kernel
from ring_attention_pytorch.nn.norm import RMSNorm
from ring_attention_pytorch.nn.rotary import RingRotaryEmbedding, apply_rotary_pos_emb
from ring_attention_pytorch.nn.sharding import ShardConfig, report_to_group_of_module
from ring_attention_pytorch.plan.option_types import KernelOption, LayoutName
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.ranks.agreement import typed
from ring_attention_pytorch.ranks.ring import Group
from ring_attention_pytorch.routing.plan import RoutingPlan
from ring_attention_pytorch.routing.router import (
    CoordinateDescentRouter,
    Routed,
    Tokens,
    router_options,
)
from ring_attention_pytorch.routing.soft_topk import check_count
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype
from ring_attention_pytorch.runtime.uncopied import replaced


class HeavyAttention(nn.Module):
    """An attention layer of routed queries to r sets of routed keys, each for heads / r heads.

    Every query also sees a learned null key and value, merged on the rank of the query.
    """

    def __init__(
        self,
        dim: int,
        dim_head: int,
        heads: int,
        routes: int,
        *,
        kernel: KernelOption | None,
        rotary: bool = False,
        multiply_queries: bool = False,
        multiply_keys: bool = False,
    ):
        super().__init__()
        self.heads: int = heads
        self.dim_head: int = dim_head
        self.routes: int = routes
        self.kernel = kernel
        self.multiply_queries: bool = multiply_queries
        self.multiply_keys: bool = multiply_keys
        inner = heads * dim_head
        self.norm: RMSNorm = RMSNorm(dim)
        self.to_q: nn.Linear = nn.Linear(dim, inner, bias=False)
        self.to_kv: nn.Linear = nn.Linear(dim, 2 * inner, bias=False)
        self.null_kv: nn.Parameter = nn.Parameter(torch.randn(2, heads, dim_head))
        self.to_out: nn.Linear = nn.Linear(inner, dim, bias=False)
        self.rotary_embed: RingRotaryEmbedding | None = (
            RingRotaryEmbedding(dim_head) if rotary else None
        )

    def queries(self, tokens: Tensor, positions: Tensor, gates: Tensor | None) -> Tensor:
        """Compute the queries `[b, K, h, d]` of tokens `[b, K, dim]`."""
        q = rearrange(self.to_q(self.norm(tokens)), "b k (h d) -> b k h d", h=self.heads)
        if self.multiply_queries and gates is not None:
            q = q * gates[..., None, None].to(q.dtype)
        return self._rotate(q, positions)

    def routed_queries(self, routed: Routed) -> Tensor:
        """Compute the queries `[b, K, h, d]` of tokens routed by a router with one route."""
        tokens, gates = routed.tokens.squeeze(1), routed.gates.squeeze(1)
        return self.queries(tokens, routed.positions.squeeze(1), gates)

    def keys(self, routed: Routed) -> tuple[Tensor, Tensor]:
        """Compute k and v `[b, K, h, d]` of routed tokens; values are multiplied by gates."""
        weight = rearrange(self.to_kv.weight, "(two r e) d -> r (two e) d", two=2, r=self.routes)
        both = torch.einsum("brkd,red->brke", self.norm(routed.tokens), weight)
        k, v = rearrange(both, "b r k (two h d) -> two b r k h d", two=2, d=self.dim_head)
        gates = rearrange(routed.gates, "b r k -> b r k 1 1").to(v.dtype)
        if self.multiply_keys:
            k = k * gates
        k, v = self._rotate(k, routed.positions), v * gates
        joined = "b r k h d -> b k (r h) d"
        return rearrange(k, joined), rearrange(v, joined)

    def attend_routed(self, queries: Routed, keys: Routed, plan: RoutingPlan) -> Tensor:
        """Compute attention of routed queries to routed keys, as `[b, K, h * d]`."""
        q = self.routed_queries(queries)
        k, v = self.keys(keys)
        counts = (queries.way.counts, keys.way.counts)
        return self.attend(q, k, v, keys.real, plan, counts)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, plan: RoutingPlan,
        counts: Hashable, causal: bool = False,
    ) -> Tensor:  # fmt: skip
        """Compute attention of q `[b, K, h, d]`, over the plan's ring, as `[b, K, h * d]`.

        `seen`, bool `[b, M]`, is the key mask. `counts` are the numbers of queries and keys of all
        ranks. The attention plan's cache key has these instead of this rank's shapes, so that all
        ranks find a cached plan or none does.
        """
        dtype = q.dtype
        key = ("heavy", causal, counts, q.shape[2:], k.shape[2:], dtype, self.kernel)
        options: dict[str, Any] = dict(
            causal=causal, cross=not causal, kernel=self.kernel, layout="striped", ulysses=1
        )
        made = plan.attention.of(
            key, lambda: RingPlan.make(q, k, v, key_mask=seen, group=plan.ring, **options)
        )
        out, lse = attend(q, k, v, plan=replaced(made, key_mask=seen), return_lse=True)
        return self.with_null(q, out, lse)

    def with_null(self, q: Tensor, out: Tensor, lse: Tensor) -> Tensor:
        """Merge the null key into out `[b, K, h, d]`, lse `[b, h, K]`: `[b, K, h * d]`.

        As in `rowwise.merge_`, its weight is the sigmoid of its score minus lse. Every query sees
        it, so no weight is NaN.
        """
        wide = accumulation_dtype(q.dtype)
        null_k, null_v = self.null_kv.to(wide)
        with torch.autocast(q.device.type, enabled=False):
            score = einsum(q.to(wide), null_k, "b k h d, h d -> b h k")
        score = score * self.dim_head**-0.5
        weight = rearrange((score - lse).sigmoid(), "b h k -> b k h 1")
        out = out.to(wide) * (1 - weight)
        out = out + null_v * weight
        return rearrange(out.to(q.dtype), "b k h d -> b k (h d)")

    def _rotate(self, t: Tensor, positions: Tensor) -> Tensor:
        """Rotate t `[..., K, h, d]` by its tokens' positions `[..., K]` in the sequence."""
        if self.rotary_embed is None:
            return t
        angles = self.rotary_embed(positions.flatten().clamp(min=0))
        flat = t.reshape(1, -1, *t.shape[-2:])
        return apply_rotary_pos_emb(angles, flat).view(t.shape)


def base_for(x: Tensor, null: Tensor | None) -> Tensor:
    """Return the heavy branch's result for unrouted tokens, shaped like x: null token, or 0."""
    if null is None:
        return torch.zeros_like(x)
    b, n, _ = x.shape
    return repeat(null.to(x.dtype), "d -> b n d", b=b, n=n)


def light_attention(attn: RingAttention, x: Tensor, plan: RoutingPlan) -> Tensor:
    """Compute the light branch for this rank's tokens x."""
    key = ("light", attn.causal, attn.window, attn.heads, attn.dim_head, attn.kernel, x.dtype)
    made = plan.attention.of(key, lambda: attn.plan_over(plan.ring, x, plan.mask))
    return attn(x, plan=made)


def check_attention_options(
    counts: dict[str, Tokens | Any], routes: int, heads: int, use_flash_attn: bool,
    kernel: str | None, /, **sizes: int
) -> None:  # fmt: skip
    """Raise ValueError for invalid options of routed attention."""
    check_least(1, **sizes)
    for name, k in counts.items():
        check_count(name, k)
    if routes > 0 and heads % routes:
        raise ValueError(f"heads={heads} must be a multiple of the {routes} routed sets of keys")
    check_kernel(kernel, None, regular=False, dropout=0.0)
    if use_flash_attn and kernel == "eager":
        raise ValueError("use_flash_attn=True asks for a kernel that kernel='eager' is not")


class ConditionalRoutedAttention(nn.Module):
    """An attention layer: a local window for all tokens, plus attention among a few routed ones.

    Args:
        dim: model width.
        num_heavy_tokens_q, num_heavy_tokens_kv: queries and keys of each sample that are routed;
            a float is a share of its real tokens.
        num_routed_kv: number of sets of routed keys; heavy heads are split evenly among them.
        has_light_attn: add a light branch.
        light_dim_head, light_heads: size and number of its heads.
        light_window_size: a token sees half of this before it and half after it.
        heavy_dim_head, heavy_heads: size and number of the heavy branch's heads.
        router_straight_through, router_kwargs, use_triton: options of `CoordinateDescentRouter`.
        multiply_keys_by_score, multiply_queries_by_score: multiply keys or queries by gates too,
            and not only values and outputs.
        use_null_q_tokens: the heavy branch's result for tokens that are not routed as queries is
            a learned token; if False, 0.
        use_flash_attn: has no effect: the fastest kernel runs anyway; not with kernel="eager".
        rotary_emb: rotate by positions in the sequence, in both branches.
        ring_attn: x is this rank's part of a sequence over a ring.
        layout, group: the layout of that sequence, and its ring.
        kernel: as for `ring_attn`.

    Raises:
        ValueError: arguments are invalid or contradict one another.

    >>> attn = ConditionalRoutedAttention(
    ...     16, num_heavy_tokens_q=4, num_heavy_tokens_kv=4, light_window_size=4, heavy_heads=2
    ... )
    >>> attn(torch.randn(1, 20, 16)).shape
    torch.Size([1, 20, 16])
    """

    causal = False  # True if later tokens change neither results nor routing

    @checked
    def __init__(
        self,
        dim: int,
        *,
        num_heavy_tokens_q: Tokens,
        num_heavy_tokens_kv: Tokens,
        num_routed_kv: int = 1,
        has_light_attn: bool = True,
        light_dim_head: int = 64,
        light_heads: int = 8,
        light_window_size: int = 128,
        heavy_dim_head: int = 64,
        heavy_heads: int = 8,
        router_straight_through: bool = True,
        router_kwargs: dict[Any, Any] | None = None,
        multiply_keys_by_score: bool = False,
        multiply_queries_by_score: bool = False,
        use_triton: bool = False,
        use_null_q_tokens: bool = True,
        use_flash_attn: bool = False,
        rotary_emb: bool = False,
        ring_attn: bool = False,
        layout: LayoutName | None = None,
        group: Group = None,
        kernel: KernelOption | None = None,
    ):
        super().__init__()
        numbers = dict(
            num_heavy_tokens_q=num_heavy_tokens_q, num_heavy_tokens_kv=num_heavy_tokens_kv
        )
        check_attention_options(
            numbers, num_routed_kv, heavy_heads, use_flash_attn, kernel, dim=dim,
            num_routed_kv=num_routed_kv, heavy_heads=heavy_heads, heavy_dim_head=heavy_dim_head,
            light_heads=light_heads, light_dim_head=light_dim_head,
            light_window_size=light_window_size,
        )  # fmt: skip
        self.num_heavy_tokens_q: Tokens = num_heavy_tokens_q
        self.num_heavy_tokens_kv: Tokens = num_heavy_tokens_kv
        over: dict[str, Any] = dict(ring_attn=ring_attn, layout=layout, group=group)
        self.spread: ShardConfig = ShardConfig.make(**over)
        self.light_attn: RingAttention | None = None
        if has_light_attn:
            self.light_attn = RingAttention(
                dim, dim_head=light_dim_head, heads=light_heads, causal=self.causal,
                max_lookback_seq_len=light_window_size if self.causal else light_window_size // 2,
                rotary_embed=rotary_emb, kernel=kernel, transport="gather" if ring_attn else None,
                **over,
            )  # fmt: skip
        options = router_options(router_kwargs, router_straight_through, use_triton) | over
        self.q_router: CoordinateDescentRouter = CoordinateDescentRouter(dim, **options)
        self.kv_router: CoordinateDescentRouter = CoordinateDescentRouter(
            dim, num_routing_tokens=num_routed_kv, **options
        )
        self.heavy_attn: HeavyAttention = HeavyAttention(
            dim, heavy_dim_head, heavy_heads, num_routed_kv, kernel=kernel, rotary=rotary_emb,
            multiply_queries=multiply_queries_by_score, multiply_keys=multiply_keys_by_score,
        )  # fmt: skip
        self.null_q_token: nn.Parameter | None = (
            nn.Parameter(torch.randn(dim)) if use_null_q_tokens else None
        )

    @typed(report_to_group_of_module("ConditionalRoutedAttention"))
    def forward(
        self,
        x: Tensor,
        *,
        num_heavy_tokens_q: Tokens | None = None,
        num_heavy_tokens_kv: Tokens | None = None,
        mask: Tensor | None = None,
        plan: RoutingPlan | None = None,
    ) -> Tensor:
        """Compute the sum of both branches.

        Args:
            x: `[b, n, dim]`, this rank's tokens.
            num_heavy_tokens_q, num_heavy_tokens_kv: override the module's numbers in this call.
            mask: bool `[b, n]`, True where a token is real; only real ones are seen and routed.
            plan: the plan of this batch, made with the mask; pass no mask with it.

        Returns:
            `[b, n, dim]`, of the tokens x.

        Raises:
            ValueError: an argument is invalid, or differs between ranks; on every rank.
        """
        plan, k_q, k_kv = self._agree(
            "ConditionalRoutedAttention", x, mask, plan, num_heavy_tokens_q, num_heavy_tokens_kv
        )
        chosen = self.q_router.choose(x, plan, k_q)
        queries = Routed.gather(x, chosen, plan)
        chosen = self.kv_router.choose(x, plan, k_kv)
        keys = Routed.gather(x, chosen, plan)
        out = self.heavy_attn.attend_routed(queries, keys, plan)
        return self._sum(x, queries, out, plan)

    def _agree(
        self,
        caller: str,
        x: Tensor,
        mask: Tensor | None,
        plan: RoutingPlan | None,
        k_q: Tokens | None,
        k_kv: Tokens | None,
        **also: Any,
    ) -> tuple[RoutingPlan, Tokens, Tokens]:
        """Agree on a call over all ranks; return its plan and its numbers of queries and keys.

        `also` are further values that must be the same on all ranks.
        """
        if k_q is None:
            k_q = self.num_heavy_tokens_q
        if k_kv is None:
            k_kv = self.num_heavy_tokens_kv

        def check() -> None:
            check_count("num_heavy_tokens_q", k_q)
            self.q_router.check(x)
            check_count("num_heavy_tokens_kv", k_kv)

        also = {"num_heavy_tokens_q": k_q, "num_heavy_tokens_kv": k_kv, **also}
        plan = RoutingPlan.of(plan, x, mask, self.spread, caller, also, check)
        return plan, k_q, k_kv

    def _sum(self, x: Tensor, queries: Routed, out: Tensor, plan: RoutingPlan) -> Tensor:
        """Sum both branches; `out` is the heavy attention of the routed queries."""
        heavy = queries.home(self.heavy_attn.to_out(out), base_for(x, self.null_q_token))
        if self.light_attn is None:
            return heavy
        return heavy + light_attention(self.light_attn, x, plan)
