"""Attention of routed tokens of one sequence to routed tokens of another."""

from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from ring_attention_pytorch.arguments import checked
from ring_attention_pytorch.comm.collectives import all_to_all
from ring_attention_pytorch.nn.sharding import ShardConfig, report_to_group_of_module
from ring_attention_pytorch.plan.option_types import KernelOption, LayoutName
from ring_attention_pytorch.ranks.agreement import typed
from ring_attention_pytorch.ranks.ring import Caller, Group
from ring_attention_pytorch.routing.attention import (
    HeavyAttention,
    base_for,
    check_attention_options,
)
from ring_attention_pytorch.routing.plan import RoutingPlan
from ring_attention_pytorch.routing.router import (
    CoordinateDescentRouter,
    Routed,
    Tokens,
    router_options,
)
from ring_attention_pytorch.routing.soft_topk import check_count
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype


class ConditionalRoutedCrossAttention(nn.Module):
    """An attention layer of routed queries of x to routed keys of a context; no light branch.

    Args:
        dim: width of x and of the context.
        num_tokens_q: routed queries per sample; a float is a share of its real tokens. None takes
            all tokens as queries, without gates.
        num_tokens_kv: tokens of each sample's context that are routed as keys.
        num_sets_kv: has no effect; must be 1 or equal to kv_routing_tokens.
        dim_head, heads: size and number of the heads.
        router_straight_through, router_kwargs, use_triton: options of `CoordinateDescentRouter`.
        kv_routing_tokens: number of sets of routed keys; heads are split evenly among them.
        multiply_keys_by_score: multiply keys by gates too, and not only values.
        use_null_q_tokens: tokens that are not routed as queries get a learned token; if False, 0.
        use_flash_attn: has no effect: the fastest kernel runs anyway; not with kernel="eager".
        route_block_size: choose an equal share of the keys from each block of this many tokens of
            the context.
        route_kv_by_source: choose keys by x: their routing tokens are a projection of the mean
            token of x.
        ring_attn: x and the context are this rank's parts of sequences over a ring.
        layout, group: the layout of these sequences, and their ring.
        kernel: as for `ring_attn`.

    Raises:
        ValueError: arguments are invalid or contradict one another.

    >>> attn = ConditionalRoutedCrossAttention(16, num_tokens_q=4, num_tokens_kv=6, heads=2)
    >>> attn(torch.randn(1, 9, 16), torch.randn(1, 30, 16)).shape
    torch.Size([1, 9, 16])
    """

    @checked
    def __init__(
        self,
        dim: int,
        *,
        num_tokens_q: Tokens | None,
        num_tokens_kv: Tokens,
        num_sets_kv: int = 1,
        dim_head: int = 64,
        heads: int = 8,
        router_straight_through: bool = True,
        router_kwargs: dict[Any, Any] | None = None,
        kv_routing_tokens: int = 1,
        multiply_keys_by_score: bool = False,
        use_triton: bool = False,
        use_null_q_tokens: bool = True,
        use_flash_attn: bool = False,
        route_block_size: int | None = None,
        route_kv_by_source: bool = False,
        ring_attn: bool = False,
        layout: LayoutName | None = None,
        group: Group = None,
        kernel: KernelOption | None = None,
    ):
        super().__init__()
        check_attention_options(
            {"num_tokens_q": num_tokens_q, "num_tokens_kv": num_tokens_kv}, kv_routing_tokens,
            heads, use_flash_attn, kernel, kv_routing_tokens=kv_routing_tokens, heads=heads,
            dim=dim, dim_head=dim_head,
        )  # fmt: skip
        if num_sets_kv not in (1, kv_routing_tokens):
            raise ValueError(
                f"num_sets_kv must be 1 or kv_routing_tokens={kv_routing_tokens}, got {num_sets_kv}"
            )
        self.num_tokens_q: Tokens | None = num_tokens_q
        self.num_tokens_kv: Tokens = num_tokens_kv
        over: dict[str, Any] = dict(ring_attn=ring_attn, layout=layout, group=group)
        self.spread: ShardConfig = ShardConfig.make(**over)
        given = router_kwargs, router_straight_through, use_triton, "route_block_size"
        options = router_options(*given) | over
        self.q_router: CoordinateDescentRouter | None = None
        if num_tokens_q is not None:
            self.q_router = CoordinateDescentRouter(dim, **options)
        self.kv_router: CoordinateDescentRouter = CoordinateDescentRouter(
            dim, num_routing_tokens=kv_routing_tokens, route_block_size=route_block_size,
            learned_routing_tokens=route_kv_by_source, **options,
        )  # fmt: skip
        self.to_routing_tokens: nn.Linear | None = None
        if route_kv_by_source:
            self.to_routing_tokens = nn.Linear(dim, kv_routing_tokens * dim, bias=False)
        self.heavy_attn: HeavyAttention = HeavyAttention(
            dim, dim_head, heads, kv_routing_tokens, kernel=kernel,
            multiply_keys=multiply_keys_by_score,
        )  # fmt: skip
        self.null_q_token: nn.Parameter | None = None
        if use_null_q_tokens and num_tokens_q is not None:
            self.null_q_token = nn.Parameter(torch.randn(dim))

    @typed(report_to_group_of_module("ConditionalRoutedCrossAttention"))
    def forward(
        self,
        x: Tensor,
        context: Tensor,
        *,
        num_tokens_q: Tokens | None = None,
        num_tokens_kv: Tokens | None = None,
        mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """Compute attention of the routed tokens of x to the routed tokens of the context.

        Args:
            x, context: `[b, n, dim]` and `[b, m, dim]`, this rank's tokens.
            num_tokens_q, num_tokens_kv: override the module's numbers in this call.
            mask, context_mask: bool `[b, n]` and `[b, m]`, True where a token is real.

        Returns:
            `[b, n, dim]`, of the tokens of x.

        Raises:
            ValueError: an argument is invalid, or differs between ranks; on every rank.
        """
        k_q: Any = num_tokens_q
        k_kv = num_tokens_kv
        if k_q is None:
            k_q = self.num_tokens_q
        if k_kv is None:
            k_kv = self.num_tokens_kv
        plan, of_context = self._plans(x, context, mask, context_mask, k_q, k_kv)
        directions = None
        if self.to_routing_tokens is not None:
            directions = self.to_routing_tokens(mean_token(x, plan))
            directions = rearrange(directions, "b (r d) -> b r d", d=x.shape[-1])
        chosen = self.kv_router.choose(context, of_context, k_kv, routing_tokens=directions)
        keys = Routed.gather(context, chosen, of_context)
        heavy = self.heavy_attn
        if self.q_router is None:
            positions = plan.positions(x.device).expand(x.shape[:2])
            q = heavy.queries(x, positions, None)
            k, v = heavy.keys(keys)
            counts = ("all", keys.way.counts)
            return heavy.to_out(heavy.attend(q, k, v, keys.real, plan, counts))
        chosen = self.q_router.choose(x, plan, k_q)
        queries = Routed.gather(x, chosen, plan)
        out = heavy.to_out(heavy.attend_routed(queries, keys, plan))
        return queries.home(out, base_for(x, self.null_q_token))

    def _plans(
        self,
        x: Tensor,
        context: Tensor,
        mask: Tensor | None,
        context_mask: Tensor | None,
        k_q: Tokens | None,
        k_kv: Tokens,
    ) -> tuple[RoutingPlan, RoutingPlan]:
        """Make the routing plans of x and of the context."""
        dim = self.kv_router.dim

        def check() -> None:
            if context.dtype != x.dtype:
                raise ValueError(
                    f"context must have the dtype of x, {x.dtype}, got {context.dtype}"
                )
            for name, t in (("context", context), ("x", x)):
                if t.ndim != 3 or t.shape[2] != dim or t.shape[:1] != x.shape[:1]:
                    raise ValueError(
                        f"{name} must be [batch, tokens, {dim}] of one batch size, "
                        f"got {list(t.shape)}"
                    )
            if self.q_router is None and k_q is not None:
                raise ValueError("num_tokens_q: this module was made without a router for queries")
            check_count("num_tokens_kv", k_kv)
            check_count("num_tokens_q", k_q)

        ring = self.spread.ring(self.spread.ring_attn, None)
        caller = "ConditionalRoutedCrossAttention"
        also = {"num_tokens_q": k_q, "num_tokens_kv": k_kv}
        options: dict[str, Any] = dict(layout=self.spread.layout, group=ring)
        return (
            RoutingPlan.make(x, mask, caller=caller, also=also, check=check, **options),
            RoutingPlan.make(context, context_mask, caller=f"{caller}, context", **options),
        )


def mean_token(x: Tensor, plan: RoutingPlan) -> Tensor:
    """Compute the mean `[b, dim]` of each sample's real tokens over all ranks; 0 if it has none."""
    mine = x.to(accumulation_dtype(x.dtype))
    if plan.mask is not None:
        mine = mine.masked_fill(~plan.mask.unsqueeze(-1), 0.0)
    mine = mine.sum(1)
    ranks, shape = plan.ring.size, tuple(mine.shape)
    parts = all_to_all(
        [mine] * ranks, [shape] * ranks, Caller(plan.ring, "mean token", plan.number)
    )
    total = torch.stack(parts).sum(0)
    real = plan.real.sum(-1, keepdim=True)
    return (total / real.clamp(min=1)).to(x.dtype)
