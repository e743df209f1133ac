"""`SummaryAttention`: a layer that sees near tokens exactly, and summaries of the rest."""

from typing import Any

import torch
from torch import Tensor

from ring_attention_pytorch.arguments import checked
from ring_attention_pytorch.nn.attention import RingAttention
from ring_attention_pytorch.nn.sharding import report_to_group_of_module
from ring_attention_pytorch.ranks.agreement import report_to_ring_of, reporting, typed
from ring_attention_pytorch.summaries.cache import SummaryCache
from ring_attention_pytorch.summaries.layer import Summaries


class SummaryAttention(RingAttention):
    """A causal attention layer of linear cost: near tokens exactly, others by summaries.

    Args:
        dim: model width.
        window, stride, block, distance, pool, gates, select: as for `Summaries`.
        options: other options of `RingAttention`.

    Raises:
        ValueError: arguments are invalid or contradict one another.

    >>> attn = SummaryAttention(32, window=8, stride=4, dim_head=8, heads=4)
    >>> attn(torch.randn(1, 37, 32)).shape
    torch.Size([1, 37, 32])
    """

    @checked
    def __init__(
        self,
        dim: int,
        *,
        window: int,
        stride: int = 16,
        block: int | None = None,
        distance: int | None = None,
        pool: str = "mean",
        gates: bool = False,
        select: int = 0,
        **options: Any,
    ):
        given = Summaries(window, stride, block, distance, pool, gates, select)
        options = {"causal": True} | options
        super().__init__(dim, attn_summaries=given, **options)

    @typed(report_to_group_of_module("ring attention"))
    @torch.no_grad()
    def prefill(self, x: Tensor) -> tuple[Tensor, SummaryCache]:
        """Compute attention of a prompt, and make the cache for `step`.

        Args:
            x: `[b, n, dim]`, this rank's part of a prompt, whose samples are equally long.

        Returns:
            `[b, n, dim]`, the result of `forward`, and this layer's cache.

        Raises:
            ValueError: the layer has softclamp, auto_shard_seq or select, or x is not such a part.

        >>> attn = SummaryAttention(32, window=8, stride=4, dim_head=8, heads=4)
        >>> x = torch.randn(1, 37, 32)
        >>> _, cache = attn.prefill(x[:, :30])
        >>> out = torch.cat([attn.step(token, cache) for token in x[:, 30:].split(1, 1)], 1)
        >>> torch.testing.assert_close(out, attn(x)[:, 30:])
        """
        if self.softclamp is not None or self.spread.auto or self.summaries.rule.select:
            raise ValueError("prefill needs a layer without softclamp, auto_shard_seq and select")
        plan: Any = self.plan(x)
        qkv = list(self.project(x, None))
        cache = SummaryCache(self.summaries.rule, plan.ring, qkv[1][:, :0])
        angles = self._angles(plan.near.positions(x.device))
        out = self.summaries.prefill(x, qkv, angles, plan, cache)
        return self.to_out(out.flatten(2)), cache

    @typed(report_to_ring_of("cache"))
    @torch.no_grad()
    def step(self, x: Tensor, cache: SummaryCache) -> Tensor:
        """Compute attention of the next token `[b, 1, dim]`, and add it to the cache.

        All ranks of the ring call this with the same x, and get the same result.

        Raises:
            ValueError: x is not one token for each sample in the cache.
        """
        want = [len(cache.recent), 1, self.to_out.out_features]
        with reporting(cache.ring.report_failure):
            if list(x.shape) != want:
                got = [*x.shape]
                raise ValueError(f"step: x must be {want}, one token of each sample, got {got}")
        angles = self._angles(torch.tensor([cache.length], device=x.device))
        out = self.summaries.step(x, list(self.project(x, None)), angles, cache)
        return self.to_out(out.flatten(2))

    def _angles(self, at: Tensor) -> Tensor | None:
        return None if self.rotary_embed is None else self.rotary_embed(at)
