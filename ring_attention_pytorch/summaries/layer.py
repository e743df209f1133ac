"""The far part of an attention layer: its parameters for summaries, forward and decoding."""

from collections.abc import Callable
from dataclasses import dataclass
from math import log
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from ring_attention_pytorch.arguments import check_least, checked, checks_of
from ring_attention_pytorch.nn.layer_caches import Reading
from ring_attention_pytorch.nn.rotary import apply_rotary_pos_emb
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype
from ring_attention_pytorch.summaries.attention import summary_attn
from ring_attention_pytorch.summaries.cache import SummaryCache
from ring_attention_pytorch.summaries.cells import Cells
from ring_attention_pytorch.summaries.generation import CachedSummaries
from ring_attention_pytorch.summaries.plan import SummaryPlan
from ring_attention_pytorch.summaries.pooling import softmax_mean, summarize

_OF_PLAIN = (
    "causal",
    "window",
    "cross",
    "dropout",
    "ulysses",
)  # options of a plain layer's plan, not passed to `SummaryPlan.make`
POOLS = ("mean", "attention")


@checked
@dataclass(frozen=True)
class Summaries:
    """Options of attention to summaries: the `attn_summaries` of `RingAttention`.

    Args:
        window: a token sees itself and this many tokens before it exactly, and on to the start of
            the cell in which the window ends. Beyond that it sees summaries.
        stride: tokens of a cell; each cell has one summary.
        block: tokens that a summary is made of, up to the cell's end. None is stride; more than
            that lets summaries overlap.
        distance: how far back summaries are seen: window plus a multiple of stride. None sees all.
        pool: "mean" weighs the tokens of a block by their places, "attention" also by their
            content. Weights are learned, separately for keys and values.
        gates: near and far keys get a softmax each, and each token learns how much it takes of
            both results. If False, one softmax covers both.
        select: cells before the window that each query group also reads exactly: the ones whose
            summaries get most of its attention.

    Raises:
        ValueError: numbers are out of range, or there is no such pool.

    >>> Summaries(window=512, stride=16).rule.span is None
    True
    """

    window: int
    stride: int = 16
    block: int | None = None
    distance: int | None = None
    pool: str = "mean"
    gates: bool = False
    select: int = 0

    def __post_init__(self) -> None:
        with checks_of("Summaries"):
            self.rule.check()
            if self.pool not in POOLS:
                names = ", ".join(map(repr, POOLS))
                raise ValueError(f"pool must be one of {names}, got {self.pool!r}")

    @property
    def rule(self) -> Cells:
        """The options as `Cells`, which decide which tokens are near and far."""
        block = self.stride if self.block is None else self.block
        return Cells(self.window, self.stride, block, self.distance, self.select)

    @checked
    def layer(self, dim: int, dim_head: int, heads: int, key_heads: int) -> "SummaryLayer":
        """Make the far part of a layer with these sizes."""
        sizes = dict(dim=dim, dim_head=dim_head, heads=heads, key_heads=key_heads)
        with checks_of("summaries"):
            check_least(1, **sizes)
        return SummaryLayer(self, dim, dim_head, heads, key_heads)


class SummaryLayer(nn.Module):
    """Attention of q, k, v before rotary embedding: near exactly, far by learned summaries.

    Initially a summary is a plain mean, and its score is raised by log(stride): it weighs as much
    as `stride` tokens equal to it.
    """

    def __init__(
        self, given: Summaries, dim: int, dim_head: int, heads: int, key_heads: int
    ) -> None:
        super().__init__()
        self.rule: Cells = given.rule
        self.key_weights: nn.Parameter = nn.Parameter(torch.zeros(key_heads, self.rule.block))
        self.value_weights: nn.Parameter = nn.Parameter(torch.zeros(key_heads, self.rule.block))
        self.key_query: nn.Parameter | None = None  # these two if pool="attention"
        self.value_query: nn.Parameter | None = None
        self.gates: nn.Linear | None = None  # one of these two
        self.bias: nn.Parameter | None = None
        if given.pool == "attention":
            self.key_query = nn.Parameter(torch.zeros(key_heads, dim_head))
            self.value_query = nn.Parameter(torch.zeros(key_heads, dim_head))
        if given.gates:
            self.gates = nn.Linear(dim, 2 * heads)
        else:
            self.bias = nn.Parameter(torch.full((heads,), log(self.rule.stride)))
        self.rotary: Callable[[Tensor], Tensor] | None = None
        self.restart: bool = False

    def rotate_by(self, rotary: Callable[[Tensor], Tensor], restart: bool) -> None:
        """Rotate summaries by the positions of their cells' last tokens.

        `rotary` turns positions `[m]` into angles `[m, d]`; `restart` counts within documents.
        """
        self.rotary, self.restart = rotary, restart

    def plan(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> SummaryPlan:
        """Make the plan for tensors like these; `options` are the options of a layer's plan."""
        given = {name: value for name, value in options.items() if name not in _OF_PLAIN}
        return SummaryPlan.make(q, k, v, **self.rule._asdict(), **given)

    def forward(
        self, x: Tensor, qkv: list[Tensor], angles: Tensor | None, plan: SummaryPlan
    ) -> Tensor:
        """Return `[b, n, h, d]` for tokens x `[b, n, dim]`; q, k, v are not rotated yet.

        `angles` `[n, d]` are the tokens' rotary angles; None rotates nothing.
        """
        q, k, far_k, far_v = self._summarized(qkv, angles, plan)
        gates = self._gates(x)
        return summary_attn(q, k, qkv[2], far_k, far_v, plan=plan, bias=self.bias, gates=gates)

    def cache(self, attn: Any, reading: Reading) -> CachedSummaries:
        """Make the cache for generation; `attn` is the layer that contains this one."""
        return CachedSummaries(attn, reading)

    def prefill(
        self,
        x: Tensor,
        qkv: list[Tensor],
        angles: Tensor | None,
        plan: SummaryPlan,
        cache: SummaryCache,
    ) -> Tensor:
        """Run `forward` on a prompt, and fill an empty cache with it."""
        q, k, far_k, far_v = self._summarized(qkv, angles, plan)
        _, raw, v = qkv
        cache.read(plan, raw, k, v, [far_k, far_v])
        gates = self._gates(x)
        return summary_attn(q, k, v, far_k, far_v, plan=plan, bias=self.bias, gates=gates)

    def step(
        self, x: Tensor, qkv: list[Tensor], angles: Tensor | None, cache: SummaryCache
    ) -> Tensor:
        """Run `forward` on the next token `[b, 1, dim]`, the same on all ranks; cache it."""
        q, raw, v = qkv
        k = raw
        if angles is not None:
            q, k = apply_rotary_pos_emb(angles, q), apply_rotary_pos_emb(angles, raw)
        cache.append(raw, k, v, self._pooled)
        return cache.attend(q, self.bias, self._gates(x)).to(q.dtype)

    def _gates(self, x: Tensor) -> Tensor | None:
        if self.gates is None:
            return None
        return rearrange(self.gates(x).sigmoid(), "b n (h two) -> b n h two", two=2)

    def _summarized(
        self, qkv: list[Tensor], angles: Tensor | None, plan: SummaryPlan
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q, k, and summaries of keys and values; all but values rotated, if angles."""
        q, k, v = qkv
        weights = self.key_weights, self.value_weights
        queries = self.key_query, self.value_query
        far_k, far_v = summarize(k, v, plan=plan, weights=weights, queries=queries)
        if angles is None:
            return q, k, far_k, far_v
        assert self.rotary is not None  # checked by the layer
        of_far = self.rotary(plan.summary_positions(in_documents=self.restart))
        q, k = apply_rotary_pos_emb(angles, q), apply_rotary_pos_emb(angles, k)
        return q, k, apply_rotary_pos_emb(of_far, far_k), far_v

    def _pooled(
        self, k: Tensor, v: Tensor, place: int, last: int, real: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the summary `[b, 1, h_kv, ...]` of one block: the `pool` of `SummaryCache`."""
        found = []
        weights = (self.key_weights, self.key_query), (self.value_weights, self.value_query)
        for x, (by_place, query) in zip((k, v), weights):
            wide = x.to(accumulation_dtype(x.dtype))
            logits = by_place.to(wide.dtype).T[place:].expand(*x.shape[:3])
            with torch.autocast(x.device.type, enabled=False):
                if query is not None:
                    logits = logits + torch.einsum("bshd,hd->bsh", wide, query.to(wide.dtype))
                if real is not None:
                    logits = logits.masked_fill(~real[..., None], -torch.inf)
                found.append(softmax_mean(wide, logits)[0].to(x.dtype)[:, None])
        far_k, far_v = found
        if self.rotary is not None:
            at = self.rotary(torch.tensor([last], device=k.device))
            far_k = apply_rotary_pos_emb(at, far_k)
        return far_k, far_v
