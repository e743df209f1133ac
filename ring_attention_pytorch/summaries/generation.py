"""The cache of a layer with summaries, while its model generates."""

from typing import Any

import torch
from torch import Tensor

from ring_attention_pytorch.nn.layer_caches import Reading, TokenChunk
from ring_attention_pytorch.summaries.cache import SummaryCache
from ring_attention_pytorch.summaries.plan import SummaryPlan


class CachedSummaries:
    """A layer and its cache: the window on all ranks, summaries sharded over them."""

    def __init__(self, attn: Any, reading: Reading) -> None:
        self.attn: Any = attn  # an attention layer with summaries
        self.reading = reading
        shape = reading.samples, 0, attn.heads_here()[1], attn.dim_head
        like = torch.empty(shape, dtype=reading.dtype, device=reading.device)
        self.cache: SummaryCache = SummaryCache(
            attn.summaries.rule, reading.ring, like, reading.starts
        )

    @property
    def length(self) -> int:
        """Number of tokens read."""
        return self.cache.length

    def attend(self, x: Tensor, chunk: TokenChunk) -> Tensor:
        """Read a prompt, or the next token, `[b, n, dim]`; return the layer's result for them."""
        attn, far = self.attn, self.attn.summaries
        qkv = [t.to(self.reading.dtype) for t in attn.project(x, None)]
        if chunk.layout is None:
            out = far.step(x, qkv, chunk.angles, self.cache)
        else:
            out = far.prefill(x, qkv, chunk.angles, self._plan(x, chunk), self.cache)
        return attn.to_out(out.flatten(2))

    def _plan(self, x: Tensor, chunk: TokenChunk) -> SummaryPlan:
        """Return the plan of a prompt, which all layers with the same cells share."""

        def make() -> SummaryPlan:
            starts = self.cache.starts
            seen = None if starts is None else chunk.at >= starts
            return self.attn.plan_over(self.reading.ring, x, seen, layout=chunk.layout)

        return chunk.plans.of(self.cache.rule, make)
