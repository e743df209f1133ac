"""A light feed-forward for every token and a heavy one for routed tokens (CoLT5)."""

from typing import Any

from einops import rearrange
from torch import Tensor, nn

from ring_attention_pytorch.arguments import check_least, checked
from ring_attention_pytorch.nn.feedforward import feed_forward
from ring_attention_pytorch.nn.sharding import ShardConfig, report_to_group_of_module
from ring_attention_pytorch.plan.option_types import LayoutName
from ring_attention_pytorch.ranks.agreement import typed
from ring_attention_pytorch.ranks.ring import Group
from ring_attention_pytorch.routing.attention import base_for
from ring_attention_pytorch.routing.plan import RoutingPlan
from ring_attention_pytorch.routing.router import (
    CoordinateDescentRouter,
    Routed,
    Tokens,
    refuse_blocks,
    router_options,
)
from ring_attention_pytorch.routing.soft_topk import check_count


class ConditionalRoutedFeedForward(nn.Module):
    """A feed-forward light(x) + gate * heavy(x), the heavy part for routed tokens only.

    Args:
        dim: model width.
        num_heavy_tokens: routed tokens per sample; a float is a share of its real tokens. With
            heavy_window_size, at most this many per window.
        light_ff_mult, heavy_ff_mult: width of the two branches, as a multiple of dim.
        router_straight_through, router_kwargs, use_triton: options of `CoordinateDescentRouter`.
        heavy_window_size: None chooses among the whole sequence, later tokens included. An int
            makes the choice causal: a token is routed if its score would be among the best of the
            window before its own, until its own window is full; the first window has none.
        ring_attn: x is this rank's part of a sequence over a ring.
        layout, group: the layout of that sequence, and its ring.

    Raises:
        ValueError: arguments are invalid or contradict one another.

    >>> ff = ConditionalRoutedFeedForward(16, num_heavy_tokens=4)
    >>> ff(torch.randn(1, 20, 16)).shape
    torch.Size([1, 20, 16])
    """

    @checked
    def __init__(
        self,
        dim: int,
        *,
        num_heavy_tokens: Tokens,
        light_ff_mult: float | int = 0.5,
        heavy_ff_mult: float | int = 4,
        router_straight_through: bool = True,
        router_kwargs: dict[Any, Any] | None = None,
        use_triton: bool = False,
        heavy_window_size: int | None = None,
        ring_attn: bool = False,
        layout: LayoutName | None = None,
        group: Group = None,
    ):
        super().__init__()
        check_count("num_heavy_tokens", num_heavy_tokens)
        check_least(1, dim=dim, heavy_window_size=heavy_window_size)
        check_least(1 / dim, light_ff_mult=light_ff_mult, heavy_ff_mult=heavy_ff_mult)
        self.num_heavy_tokens: Tokens = num_heavy_tokens
        self.window: int | None = heavy_window_size
        over: dict[str, Any] = dict(ring_attn=ring_attn, layout=layout, group=group)
        self.spread: ShardConfig = ShardConfig.make(**over)
        options = router_options(router_kwargs, router_straight_through, use_triton) | over
        self.router: CoordinateDescentRouter = CoordinateDescentRouter(dim, **options)
        if heavy_window_size is not None:
            refuse_blocks(self.router, "heavy_window_size")
        self.light_ff: nn.Sequential = feed_forward(dim, light_ff_mult)
        self.heavy_ff: nn.Sequential = feed_forward(dim, heavy_ff_mult)

    @typed(report_to_group_of_module("ConditionalRoutedFeedForward"))
    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        num_heavy_tokens: Tokens | None = None,
        *,
        plan: RoutingPlan | None = None,
    ) -> Tensor:
        """Compute the sum of both branches.

        Args:
            x: `[b, n, dim]`, this rank's tokens.
            mask: bool `[b, n]`, True where a token is real; others are never routed.
            num_heavy_tokens: overrides the module's number in this call.
            plan: the plan of this batch, made with the mask; pass no mask with it.

        Returns:
            `[b, n, dim]`, of the tokens x.

        Raises:
            ValueError: an argument is invalid, or differs between ranks; on every rank.
        """
        k = num_heavy_tokens
        if k is None:
            k = self.num_heavy_tokens

        def check() -> None:
            check_count("num_heavy_tokens", k)
            self.router.check(x)

        also = {"num_heavy_tokens": k, "heavy_window_size": self.window}
        caller = "ConditionalRoutedFeedForward"
        plan = RoutingPlan.of(plan, x, mask, self.spread, caller, also, check)
        chosen = self.router.choose(x, plan, k, size=self.window, causal=self.window is not None)
        routed = Routed.gather(x, chosen, plan)
        tokens = rearrange(routed.tokens, "b 1 k d -> b k d")
        heavy = self.heavy_ff(tokens)
        heavy = routed.home(heavy, base_for(x, None))
        return self.light_ff(x) + heavy
