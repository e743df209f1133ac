"""Causal conditional routing: no later token changes a result, or the choice of a routed token.

Keys are the best tokens of each window, seen from later windows only: when a query looks at them,
the choice among them is final. A query is chosen by its own score and those of the window before.
Choosing the best queries of a window would not be causal, since they are known only at its end.
The original chooses so, and later tokens leak into earlier ones there; that form is left out here.
"""

from typing import NamedTuple

import torch
from beartype import beartype
from torch import Tensor, nn

from ring_attention_pytorch.comm.agreement import typed
from ring_attention_pytorch.comm.ring import Group
from ring_attention_pytorch.nn.sharding import ShardConfig, told_by_module
from ring_attention_pytorch.routing.attention import (
    HeavyAttention,
    Routed,
    base_for,
    check_attention_options,
    light_attention,
    light_branch,
)
from ring_attention_pytorch.routing.plan import RoutingPlan
from ring_attention_pytorch.routing.router import CoordinateDescentRouter, Tokens, refuse_blocks
from ring_attention_pytorch.routing.selection import slots
from ring_attention_pytorch.routing.soft_topk import count_problem


class Turns(NamedTuple):
    """The order of the routed sequence: for each window its queries, then its keys.

    A query comes after exactly the keys that it may see, so plain causal attention is right. The
    sequence is dealt to ranks in layout "striped". Each list has a tensor for each rank: `queries`
    and `keys` are the slots that it works on, `queries_at` and `keys_at` the places of these among
    its tokens of the routed sequence.
    """

    queries: list[Tensor]
    queries_at: list[Tensor]
    keys: list[Tensor]
    keys_at: list[Tensor]

    @classmethod
    def make(
        cls, windows: int, queries: int, keys: int, ring_size: int, device: torch.device
    ) -> "Turns":
        """Make the order for a number of windows, with a number of queries and keys in each.

        >>> turns = Turns.make(2, 1, 2, ring_size=2, device=torch.device("cpu"))  # q k k q k k
        >>> [t.tolist() for t in turns.queries], [t.tolist() for t in turns.keys]
        ([[0], [1]], [[1, 2], [0, 3]])
        """
        turn = torch.arange(windows * (queries + keys), device=device)
        is_query = turn % (queries + keys) < queries
        found = []
        for kind in (is_query, ~is_query):
            place, slot = turn[kind], torch.arange(int(kind.sum()), device=device)
            on = [place % ring_size == rank for rank in range(ring_size)]
            found += [[slot[here] for here in on], [place[here] // ring_size for here in on]]
        return cls(*found)


class ConditionalRoutedAutoregressiveAttention(nn.Module):
    """A causal attention layer: a local window for all tokens, plus attention among routed ones.

    The sequence is cut into windows of `heavy_window_size` tokens. The `num_heavy_tokens_kv` best
    tokens of each are keys for the queries of later windows. A token is routed as a query if its
    score would be among the `num_heavy_tokens_q` best of the window before its own, until its
    window has this many queries; the first window has none. One set of keys serves all queries, so
    memory is linear.

    Args:
        num_heavy_tokens_q, num_heavy_tokens_kv: numbers for each window; a float is a share of it.
        light_window_size: a token sees itself and this many tokens before it.
        heavy_window_size: tokens of a routing window; None is light_window_size.
        The rest: as for `ConditionalRoutedAttention`.

    Raises:
        ValueError: arguments are invalid or contradict one another.

    >>> attn = ConditionalRoutedAutoregressiveAttention(
    ...     16, num_heavy_tokens_q=2, num_heavy_tokens_kv=2, light_window_size=4, heavy_heads=2
    ... )
    >>> attn(torch.randn(1, 20, 16)).shape
    torch.Size([1, 20, 16])
    """

    @beartype
    def __init__(  # noqa: PLR0913 - a public entry point
        self,
        dim: int,
        *,
        num_heavy_tokens_q: Tokens,
        num_heavy_tokens_kv: Tokens,
        num_routed_kv: int = 1,
        light_dim_head: int = 64,
        light_heads: int = 8,
        light_window_size: int = 128,
        heavy_window_size: int | None = None,
        heavy_dim_head: int = 64,
        heavy_heads: int = 8,
        router_straight_through: bool = True,
        router_kwargs: dict | None = None,
        multiply_keys_by_score: bool = False,
        multiply_queries_by_score: bool = False,
        use_triton: bool = False,
        use_null_q_tokens: bool = True,
        use_flash_attn: bool = False,
        rotary_emb: bool = False,
        ring_attn: bool = False,
        layout: str | None = None,
        group: Group = None,
        kernel: str | None = None,
    ):
        super().__init__()
        self.window = light_window_size if heavy_window_size is None else heavy_window_size
        check_attention_options(
            {"num_heavy_tokens_q": num_heavy_tokens_q, "num_heavy_tokens_kv": num_heavy_tokens_kv},
            num_routed_kv, heavy_heads, use_flash_attn, kernel, dim=dim,
            heavy_dim_head=heavy_dim_head, light_window_size=light_window_size,
            heavy_window_size=self.window,
        )  # fmt: skip
        self.num_heavy_tokens_q, self.num_heavy_tokens_kv = num_heavy_tokens_q, num_heavy_tokens_kv
        self.spread = ShardConfig.make(ring_attn, False, False, 1, layout, False, group)
        over = dict(ring_attn=ring_attn, layout=layout, group=group)
        self.light_attn = light_branch(
            dim, dim_head=light_dim_head, heads=light_heads, rotary_embed=rotary_emb, causal=True,
            max_lookback_seq_len=light_window_size, kernel=kernel, **over,
        )  # fmt: skip
        options = dict(router_kwargs or {}, straight_through=router_straight_through) | over
        if use_triton:
            options["use_triton"] = True
        self.q_router = CoordinateDescentRouter(dim, **options)
        self.kv_router = CoordinateDescentRouter(dim, num_routing_tokens=num_routed_kv, **options)
        self.heavy_attn = HeavyAttention(
            dim, heavy_dim_head, heavy_heads, num_routed_kv, rotary=rotary_emb, kernel=kernel,
            multiply=(multiply_queries_by_score, multiply_keys_by_score),
        )  # fmt: skip
        refuse_blocks(self.q_router, "windows")
        self.null_q_token = nn.Parameter(torch.randn(dim)) if use_null_q_tokens else None

    @typed(told_by_module("ConditionalRoutedAutoregressiveAttention"))
    def forward(
        self,
        x: Tensor,
        *,
        num_heavy_tokens_q: Tokens | None = None,
        num_heavy_tokens_kv: Tokens | None = None,
        random_route: bool = False,
        mask: Tensor | None = None,
        plan: RoutingPlan | None = None,
    ) -> Tensor:
        """Compute the sum of both branches; no later token changes a token's result.

        Args:
            x: `[b, n, dim]`, the tokens held here.
            num_heavy_tokens_q, num_heavy_tokens_kv: override the module's numbers in this call.
            random_route: choose tokens at random, with gates 1.
            mask: bool `[b, n]`, True where a token is real; only real ones are seen and routed.
            plan: the plan of this batch, which then has the mask.

        Returns:
            `[b, n, dim]`, of the tokens x.

        Raises:
            ValueError: an argument is invalid, or differs between ranks; on every rank.
        """
        k_q = self.num_heavy_tokens_q if num_heavy_tokens_q is None else num_heavy_tokens_q
        k_kv = self.num_heavy_tokens_kv if num_heavy_tokens_kv is None else num_heavy_tokens_kv
        problem = count_problem("num_heavy_tokens_q", k_q) or self.q_router.problem(x, None)
        problem = problem or count_problem("num_heavy_tokens_kv", k_kv)
        also = {
            "num_heavy_tokens_q": k_q, "num_heavy_tokens_kv": k_kv, "random_route": random_route,
            "heavy_window_size": self.window,
        }  # fmt: skip
        caller = "ConditionalRoutedAutoregressiveAttention"
        plan = RoutingPlan.of(plan, x, mask, self.spread, caller, also, problem)
        pick = dict(size=self.window, random_route=random_route)
        queries = self.q_router.choose(x, plan, k_q, causal=True, **pick)
        keys = self.kv_router.choose(x, plan, k_kv, **pick)
        turns = Turns.make(
            -(-plan.length // self.window), *(slots(k, self.window) for k in (k_q, k_kv)),
            plan.ring.size, x.device,
        )  # fmt: skip
        of_q = Routed.gather(x, queries, plan, turns.queries)
        of_kv = Routed.gather(x, keys, plan, turns.keys)
        q = self.heavy_attn.queries(
            *(t.squeeze(1) for t in (of_q.tokens, of_q.positions, of_q.gates))
        )
        k, v = self.heavy_attn.keys(of_kv)
        out = self._attend(q, k, v, of_kv.positions[:, 0] >= 0, plan, turns)
        heavy = of_q.home(self.heavy_attn.to_out(out), base_for(x, self.null_q_token))
        return heavy + light_attention(self.light_attn, x, plan)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, real: Tensor, plan: RoutingPlan, turns: "Turns"
    ) -> Tensor:
        """Compute causal attention over the routed sequence, in the order of `turns`."""
        rank = plan.ring.rank
        at_q, at_k = turns.queries_at[rank], turns.keys_at[rank]
        n = len(at_q) + len(at_k)
        q, k, v = (
            t.new_zeros((t.shape[0], n, *t.shape[2:])).index_copy(1, at, t)
            for t, at in ((q, at_q), (k, at_k), (v, at_k))
        )
        seen = real.new_zeros((len(real), n)).index_copy(1, at_k, real)
        counts = tuple(len(a) + len(b) for a, b in zip(turns.queries_at, turns.keys_at))
        found = self.heavy_attn.attend(q, k, v, seen, plan, counts, causal=True)
        return found.index_select(1, at_q)
