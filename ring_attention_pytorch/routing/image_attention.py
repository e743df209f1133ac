"""Conditional routing for images: square windows, and tokens routed from the whole image."""

from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from ring_attention_pytorch.arguments import checked
from ring_attention_pytorch.nn.attention import RingAttention
from ring_attention_pytorch.nn.sharding import report_to_group_of_module
from ring_attention_pytorch.ranks.agreement import typed
from ring_attention_pytorch.routing.attention import ConditionalRoutedAttention
from ring_attention_pytorch.routing.dispatch import Dispatch, dealt
from ring_attention_pytorch.routing.plan import RoutingPlan
from ring_attention_pytorch.routing.router import Tokens

Size = tuple[int, int]


def window_slots(size: Size, window: int, device: torch.device) -> Tensor:
    """List the positions in each window of an image, `[W, window ** 2]`; -1 beyond the edge.

    Positions number the image's tokens row by row.

    >>> window_slots((2, 3), 2, torch.device("cpu")).tolist()
    [[0, 1, 3, 4], [2, -1, 5, -1]]
    """
    height, width = size
    positions = torch.arange(height * width, device=device).view(height, width)
    rows, cols = height + -height % window, width + -width % window
    padded = positions.new_full((rows, cols), -1)
    padded[:height, :width] = positions
    return rearrange(padded, "(a h) (b w) -> (a b) (h w)", h=window, w=window)


class ConditionalRoutedImageAttention(ConditionalRoutedAttention):
    """An attention layer for images: full attention in square windows, plus among routed tokens.

    Args:
        light_window_size: side of a window, in tokens; windows at the edge can be smaller.
        channel_first: images are `[b, dim, height, width]`; if False `[b, height, width, dim]`.
        The rest: as for `ConditionalRoutedAttention`.

    Raises:
        ValueError: arguments are invalid or contradict one another.

    >>> attn = ConditionalRoutedImageAttention(
    ...     16, num_heavy_tokens_q=4, num_heavy_tokens_kv=4, light_window_size=4, heavy_heads=2
    ... )
    >>> attn(torch.randn(1, 6, 7, 16)).shape
    torch.Size([1, 6, 7, 16])
    """

    @checked
    def __init__(
        self,
        dim: int,
        *,
        light_dim_head: int = 64,
        light_heads: int = 8,
        light_window_size: int = 128,
        channel_first: bool = False,
        **options: Any,
    ):
        if given := {"has_light_attn", "rotary_emb"} & set(options):
            raise ValueError(f"{', '.join(given)}: not of image attention")
        super().__init__(dim, has_light_attn=False, light_window_size=light_window_size, **options)
        self.side: int = light_window_size
        self.channel_first: bool = channel_first
        self.window_attn: RingAttention = RingAttention(
            dim, dim_head=light_dim_head, heads=light_heads, kernel=options.get("kernel")
        )

    @typed(report_to_group_of_module("ConditionalRoutedImageAttention"))
    def forward(
        self,
        x: Tensor,
        *,
        image_size: tuple[int, int] | None = None,
        num_heavy_tokens_q: Tokens | None = None,
        num_heavy_tokens_kv: Tokens | None = None,
        mask: Tensor | None = None,
        plan: RoutingPlan | None = None,
    ) -> Tensor:
        """Compute the sum of both branches.

        Args:
            x: a whole image, on one process; or, with image_size (height, width), this rank's
                tokens `[b, n, dim]` of it, with positions row by row.
            mask: bool `[b, n]`, True where a token is real; n = height * width of a whole image.
            The rest: as for `ConditionalRoutedAttention.forward`.

        Returns:
            A tensor of x's shape.

        Raises:
            ValueError: an argument is invalid, or differs between ranks; on every rank.
        """
        whole = image_size is None
        size, shape = image_size, list(x.shape)
        if whole and x.ndim == 4:
            if self.channel_first:
                x = rearrange(x, "b d h w -> b h w d")
            size = (x.shape[1], x.shape[2])
            x = x.flatten(1, 2)

        def check() -> None:
            if len(shape) != (4 if whole else 3):
                raise ValueError(
                    "x must be a whole image of 4 dimensions, or tokens [b, n, dim] with "
                    f"image_size, got {shape} with image_size={image_size}"
                )
            if whole and self.spread.ring_attn:
                raise ValueError(
                    "tokens of an image on a ring are [b, n, dim], beside their image_size"
                )
            self.q_router.check(x)

        caller = "ConditionalRoutedImageAttention"
        also = {"image_size": size, "q": num_heavy_tokens_q, "kv": num_heavy_tokens_kv}
        plan = RoutingPlan.of(plan, x, mask, self.spread, caller, also, check)
        assert size is not None
        if size[0] * size[1] != plan.length:
            raise ValueError(f"{caller}: image_size={size} has not the {plan.length} tokens of x")
        heavy = super().forward(
            x, num_heavy_tokens_q=num_heavy_tokens_q, num_heavy_tokens_kv=num_heavy_tokens_kv,
            plan=plan,
        )  # fmt: skip
        out = heavy + self._light(x, plan, size)
        if not whole:
            return out
        if self.channel_first:
            return rearrange(out, "b (h w) d -> b d h w", h=size[0])
        return rearrange(out, "b (h w) d -> b h w d", h=size[0])

    def _light(self, x: Tensor, plan: RoutingPlan, size: Size) -> Tensor:
        """Send whole windows to ranks, compute attention within them, and return the results."""
        positions = window_slots(size, self.side, x.device)
        area = self.side**2
        inside = torch.arange(area, device=x.device)
        slots = []
        for windows in dealt(len(positions), plan.ring.size, x.device):
            first = windows.unsqueeze(1) * area
            slots.append((first + inside).flatten())
        everything = positions.flatten().expand(len(x), 1, -1)
        way = Dispatch.make(everything, plan, slots)
        here = way.positions.squeeze(1)
        real = plan.real.gather(1, here.clamp(min=0))
        seen = (here >= 0) & real
        by_window = "b (w s) ... -> (b w) s ..."
        tokens = rearrange(way.out(x).squeeze(1), by_window, s=area)
        out = self.window_attn(tokens, rearrange(seen, by_window, s=area))
        out = rearrange(out, "(b w) s d -> b 1 (w s) d", b=len(x))
        return way.home(out, torch.zeros_like(x))
