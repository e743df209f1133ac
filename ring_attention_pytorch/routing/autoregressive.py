"""Causal conditional routing: no later token changes a result, or the choice of a routed token.

Keys are the best tokens of each window. Only later windows see them, when the choice is final. A
query is chosen by its own score and the scores of the window before. The original takes the best
queries of a window, which are known only at its end, so that later tokens leak into earlier ones;
that is not causal, and not available here.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_attention_pytorch.arguments import check_least, checked
from ring_attention_pytorch.nn.sharding import report_to_group_of_module
from ring_attention_pytorch.ranks.agreement import typed
from ring_attention_pytorch.routing.attention import ConditionalRoutedAttention
from ring_attention_pytorch.routing.plan import RoutingPlan
from ring_attention_pytorch.routing.router import Routed, Tokens, refuse_blocks
from ring_attention_pytorch.routing.selection import slots


class Turns(NamedTuple):
    """The order of the routed sequence: for each window its queries, then its keys.

    Exactly the keys that a query sees precede it, so plain causal attention is correct. Ranks hold
    the sequence in layout "striped". Each list has a tensor per rank: `queries` and `keys` are the
    rank's slots, `queries_at` and `keys_at` their places among the rank's tokens of the routed
    sequence.
    """

    queries: list[Tensor]
    queries_at: list[Tensor]
    keys: list[Tensor]
    keys_at: list[Tensor]

    @classmethod
    def make(
        cls, windows: int, queries: int, keys: int, ring_size: int, device: torch.device
    ) -> "Turns":
        """Make the order for `windows` windows with `queries` queries and `keys` keys each.

        >>> turns = Turns.make(2, 1, 2, ring_size=2, device=torch.device("cpu"))  # q k k q k k
        >>> [t.tolist() for t in turns.queries], [t.tolist() for t in turns.keys]
        ([[0], [1]], [[1, 2], [0, 3]])
        """
        turn = torch.arange(windows * (queries + keys), device=device)
        is_query = turn % (queries + keys) < queries
        query_turns, key_turns = turn[is_query], turn[~is_query]
        turns = cls([], [], [], [])
        for rank in range(ring_size):
            is_mine = query_turns % ring_size == rank
            turns.queries.append(is_mine.nonzero().flatten())
            turns.queries_at.append(query_turns[is_mine] // ring_size)
            is_mine = key_turns % ring_size == rank
            turns.keys.append(is_mine.nonzero().flatten())
            turns.keys_at.append(key_turns[is_mine] // ring_size)
        return turns


class ConditionalRoutedAutoregressiveAttention(ConditionalRoutedAttention):
    """A causal attention layer: a local window for all tokens, plus attention among routed ones.

    The sequence is cut into windows of `heavy_window_size` tokens. The `num_heavy_tokens_kv` best
    tokens of each are keys for the queries of later windows. A token is routed as a query if its
    score would be among the `num_heavy_tokens_q` best of the window before its own, until its
    window has this many queries; the first window has none. One set of keys serves all queries, so
    memory is linear.

    Args:
        num_heavy_tokens_q, num_heavy_tokens_kv: numbers per window; a float is a share of it.
        light_window_size: a token sees itself and this many tokens before it.
        heavy_window_size: tokens of a routing window; None is light_window_size.
        options: as for `ConditionalRoutedAttention`; there is always a light branch.

    Raises:
        ValueError: arguments are invalid or contradict one another.

    >>> attn = ConditionalRoutedAutoregressiveAttention(
    ...     16, num_heavy_tokens_q=2, num_heavy_tokens_kv=2, light_window_size=4, heavy_heads=2
    ... )
    >>> attn(torch.randn(1, 20, 16)).shape
    torch.Size([1, 20, 16])
    """

    causal = True

    @checked
    def __init__(
        self,
        dim: int,
        *,
        light_window_size: int = 128,
        heavy_window_size: int | None = None,
        **options: Any,
    ):
        # has_light_attn is passed here so that Python refuses it among the options
        super().__init__(dim, has_light_attn=True, light_window_size=light_window_size, **options)
        self.window: int = light_window_size if heavy_window_size is None else heavy_window_size
        check_least(1, heavy_window_size=self.window)
        refuse_blocks(self.q_router, "windows")

    @typed(report_to_group_of_module("ConditionalRoutedAutoregressiveAttention"))
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
            x: `[b, n, dim]`, this rank's tokens.
            num_heavy_tokens_q, num_heavy_tokens_kv: override the module's numbers in this call.
            random_route: choose tokens at random, with gates 1.
            mask: bool `[b, n]`, True where a token is real; only real ones are seen and routed.
            plan: the plan of this batch, made with the mask; pass no mask with it.

        Returns:
            `[b, n, dim]`, of the tokens x.

        Raises:
            ValueError: an argument is invalid, or differs between ranks; on every rank.
        """
        plan, k_q, k_kv = self._agree(
            "ConditionalRoutedAutoregressiveAttention", x, mask, plan, num_heavy_tokens_q,
            num_heavy_tokens_kv, random_route=random_route, heavy_window_size=self.window,
        )  # fmt: skip
        how: dict[str, Any] = dict(size=self.window, random_route=random_route)
        routed_q = self.q_router.choose(x, plan, k_q, causal=True, **how)
        routed_kv = self.kv_router.choose(x, plan, k_kv, **how)
        windows = -(-plan.length // self.window)
        most_q, most_kv = slots(k_q, self.window), slots(k_kv, self.window)
        turns = Turns.make(windows, most_q, most_kv, plan.ring.size, x.device)
        queries = Routed.gather(x, routed_q, plan, turns.queries)
        keys = Routed.gather(x, routed_kv, plan, turns.keys)
        out = self._attend(queries, keys, plan, turns)
        return self._sum(x, queries, out, plan)

    def _attend(self, queries: Routed, keys: Routed, plan: RoutingPlan, turns: Turns) -> Tensor:
        """Compute causal attention over the routed sequence, in the order of `turns`."""
        counts = []
        for queries_at, keys_at in zip(turns.queries_at, turns.keys_at):
            counts.append(len(queries_at) + len(keys_at))
        rank = plan.ring.rank
        n = counts[rank]
        queries_at, keys_at = turns.queries_at[rank], turns.keys_at[rank]
        q = self.heavy_attn.routed_queries(queries)
        k, v = self.heavy_attn.keys(keys)
        q = _placed(q, queries_at, n)
        k = _placed(k, keys_at, n)
        v = _placed(v, keys_at, n)
        seen = _placed(keys.real, keys_at, n)
        out = self.heavy_attn.attend(q, k, v, seen, plan, tuple(counts), causal=True)
        return out.index_select(1, queries_at)


def _placed(t: Tensor, places: Tensor, n: int) -> Tensor:
    """Scatter t `[b, K, ...]` to its places among n tokens, with zeros elsewhere."""
    b, _, *width = t.shape
    return t.new_zeros((b, n, *width)).index_copy(1, places, t)
