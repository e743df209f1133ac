"""A transformer block whose attention and feed-forward each have a light and a heavy branch."""

from functools import partial
from typing import Any

from torch import Tensor, nn

from ring_attention_pytorch.arguments import checked
from ring_attention_pytorch.nn.sharding import ShardConfig, report_to_group_of_module
from ring_attention_pytorch.plan.option_types import LayoutName
from ring_attention_pytorch.ranks.agreement import typed
from ring_attention_pytorch.ranks.ring import Group
from ring_attention_pytorch.routing.attention import ConditionalRoutedAttention
from ring_attention_pytorch.routing.autoregressive import ConditionalRoutedAutoregressiveAttention
from ring_attention_pytorch.routing.feedforward import ConditionalRoutedFeedForward
from ring_attention_pytorch.routing.plan import RoutingPlan
from ring_attention_pytorch.routing.router import Tokens


class ConditionalRoutedTransformerBlock(nn.Module):
    """A conditionally routed block: x + attention(x), then x + feedforward(x).

    Args:
        dim: model width.
        num_heavy_attn_tokens_q, num_heavy_attn_tokens_kv, num_heavy_ff_tokens: routed tokens per
            sample, or per window if causal; a float is a share of its real tokens.
        causal: no token sees a later one, and later tokens do not change which are routed.
        heavy_window_size: tokens of a causal block's routing window; None is light_window_size.
        attention_options: other options of `ConditionalRoutedAttention`.
        The rest: as for `ConditionalRoutedAttention` and `ConditionalRoutedFeedForward`.

    Raises:
        ValueError: arguments are invalid or contradict one another.

    >>> import torch
    >>> block = ConditionalRoutedTransformerBlock(
    ...     16, num_heavy_attn_tokens_q=4, num_heavy_attn_tokens_kv=4, num_heavy_ff_tokens=4
    ... )
    >>> block(torch.randn(1, 20, 16)).shape
    torch.Size([1, 20, 16])
    """

    @checked
    def __init__(
        self,
        dim: int,
        *,
        num_heavy_attn_tokens_q: Tokens,
        num_heavy_attn_tokens_kv: Tokens,
        num_heavy_ff_tokens: Tokens,
        light_window_size: int = 128,
        light_ff_mult: float | int = 0.5,
        heavy_ff_mult: float | int = 4,
        router_straight_through: bool = True,
        router_kwargs: dict[Any, Any] | None = None,
        use_triton: bool = False,
        causal: bool = False,
        heavy_window_size: int | None = None,
        ring_attn: bool = False,
        layout: LayoutName | None = None,
        group: Group = None,
        **attention_options: Any,
    ):
        super().__init__()
        if heavy_window_size is not None and not causal:
            raise ValueError("heavy_window_size is of a causal block: others choose from the whole")
        over: dict[str, Any] = dict(ring_attn=ring_attn, layout=layout, group=group)
        self.spread: ShardConfig = ShardConfig.make(causal=causal, **over)
        both: dict[str, Any] = dict(
            over, router_straight_through=router_straight_through, router_kwargs=router_kwargs,
            use_triton=use_triton,
        )  # fmt: skip
        attention: type[ConditionalRoutedAttention] = ConditionalRoutedAttention
        if causal:
            attention = ConditionalRoutedAutoregressiveAttention
            window = light_window_size if heavy_window_size is None else heavy_window_size
            both["heavy_window_size"] = window
        self.conditional_attn: ConditionalRoutedAttention = attention(
            dim, num_heavy_tokens_q=num_heavy_attn_tokens_q,
            num_heavy_tokens_kv=num_heavy_attn_tokens_kv, light_window_size=light_window_size,
            **both, **attention_options,
        )  # fmt: skip
        self.conditional_ff: ConditionalRoutedFeedForward = ConditionalRoutedFeedForward(
            dim, num_heavy_tokens=num_heavy_ff_tokens, light_ff_mult=light_ff_mult,
            heavy_ff_mult=heavy_ff_mult, **both,
        )  # fmt: skip

    @typed(report_to_group_of_module("ConditionalRoutedTransformerBlock"))
    def forward(
        self, x: Tensor, mask: Tensor | None = None, *, plan: RoutingPlan | None = None
    ) -> Tensor:
        """Compute the block for this rank's tokens.

        Args:
            x: `[b, n, dim]`, this rank's tokens.
            mask: bool `[b, n]`, True where a token is real.
            plan: the plan of this batch, made with the mask; pass no mask with it.

        Returns:
            `[b, n, dim]`.

        Raises:
            ValueError: an argument is invalid, or differs between ranks; on every rank.
        """
        caller = "ConditionalRoutedTransformerBlock"
        check = partial(self.conditional_ff.router.check, x)
        plan = RoutingPlan.of(plan, x, mask, self.spread, caller, {}, check)
        x = x + self.conditional_attn(x, plan=plan)
        return x + self.conditional_ff(x, plan=plan)
