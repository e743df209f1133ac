"""Cases of summary attention: the same data on any ring, compared with the dense reference."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ring_attention_pytorch import RingTransformer
from ring_attention_pytorch.geometry.layouts import positions
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.summaries import (
    Summaries,
    SummaryAttention,
    SummaryPlan,
    summarize,
    summary_attn,
)
from tests.support import case as language
from tests.support import threads
from tests.support.case import Results, Tokens, check_in_processes, check_in_threads, gradients
from tests.support.reference import relative_error
from tests.support.summary_reference import summary_attention

__all__ = ["check_in_processes", "check_in_threads"]  # for whoever imports the rest from here
HEADS, KEY_HEADS, D, D_V = 4, 2, 6, 5
# sharded; the rest is the same on all ranks
BY_TOKEN = {
    "q",
    "k",
    "v",
    "gates",
    "out",
    "dout",
    "dq",
    "dk",
    "dv",
    "dgates",
    "documents",
    "key_mask",
}


@dataclass(frozen=True, kw_only=True)
class Case(language.Case):
    """A case of attention with summaries."""

    length: int = 43
    window: int = 5
    stride: int = 3
    block: int = 3
    distance: int | None = None
    select: int = 0
    level: bool = False  # whether all keys are alike, so that all cells are tied
    layout: str = "contiguous"
    batch: int = 2
    documents: bool = False
    masked: bool = False
    gated: bool = False
    pooled: str = "mean"
    transport: str | None = None

    @property
    def rule(self) -> dict[str, Any]:
        return {
            name: getattr(self, name)
            for name in ("window", "stride", "block", "distance", "select")
        }

    def data(self) -> Results:
        """All tensors that have gradients, and the cotangent."""
        tokens = self.batch, self.length
        shapes = {
            "q": (*tokens, HEADS, D),
            "k": (*tokens, KEY_HEADS, D),
            "v": (*tokens, KEY_HEADS, D_V),
            "key_weights": (KEY_HEADS, self.block),
            "value_weights": (KEY_HEADS, self.block),
            "dout": (*tokens, HEADS, D_V),
        }
        if self.pooled == "attention":
            shapes |= {"key_query": (KEY_HEADS, D), "value_query": (KEY_HEADS, D_V)}
        shapes |= {"gates": (*tokens, HEADS, 2)} if self.gated else {"bias": (HEADS,)}
        data = {name: self.normal(name, *shape) for name, shape in shapes.items()}
        if self.level:
            data["k"].zero_()
        return data

    def masks(self) -> Results:
        """Documents, one of them in two runs, and a mask that leaves a whole cell blind."""
        masks, tokens = {}, (self.batch, self.length)
        if self.documents:
            ids = self.marks("documents", *tokens, share=0.08).cumsum(1)
            ids[-1] = torch.arange(self.length) > self.length // 3
            ids[-1, -self.length // 4 :] = 0
            masks["documents"] = ids
        if self.masked:
            masks["key_mask"] = self.marks("key_mask", *tokens, share=0.6)
            masks["key_mask"][:, : 2 * self.stride] = False
        return masks

    def at(self, rank: int, size: int) -> Tensor:
        return positions(self.layout, rank=rank, ring_size=size, length=self.length)

    def tokens(self, name: str, rank: int, size: int) -> Tokens:
        return (1, self.at(rank, size)) if name in BY_TOKEN else None

    def whole(self) -> Results:
        def attend(data: Results, extra: Results) -> Tensor:
            qkv = (data[name] for name in "qkv")
            return summary_attention(*qkv, **self.rule, **_arguments(data), **extra, **self.masks())

        return _differentiated(self.data(), attend)

    def shard(self, ring: Ring) -> Results:
        def attend(data: Results, extra: Results) -> Tensor:
            q, k, v = (data[name] for name in "qkv")
            options = dict(layout=self.layout, group=ring, transport=self.transport)
            masks = self.part(self.masks(), ring)
            plan = SummaryPlan.make(q, k, v, **self.rule, **options, **masks)
            far = summarize(k, v, plan=plan, **_arguments(data))
            return summary_attn(q, k, v, *far, plan=plan, **extra)

        return _differentiated(self.part(self.data(), ring), attend)


PACKED = Case(documents=True, masked=True, block=5)
CASES = {
    "overlapping blocks": Case(block=8, masked=True),
    "bounded": Case(distance=11, documents=True),
    "window of whole cells": Case(window=6, transport="gather"),
    "attention pooling": Case(pooled="attention", documents=True, masked=True, block=4),
    "selected": Case(select=2),
    "tied": Case(select=2, level=True, masked=True),
    "selected of few": Case(select=3, documents=True, masked=True, block=5, distance=14),
    "gates": Case(gated=True, documents=True),
    "nothing far": Case(window=4, stride=2, block=3, distance=4),
    "shorter than the window": Case(length=9, window=20),
    "one token each": Case(length=3, window=0, stride=1, block=1),
}


def _differentiated(data: Results, attend: Callable[[Results, Results], Tensor]) -> Results:
    along = {"out": data.pop("dout")}
    leaves = {name: t.requires_grad_() for name, t in data.items()}
    extra = {name: leaves[name] for name in ("bias", "gates") if name in leaves}
    return gradients({"out": attend(leaves, extra)}, leaves, along)


def _arguments(data: Results) -> dict[str, tuple[Tensor | None, Tensor | None]]:
    return {
        "weights": (data["key_weights"], data["value_weights"]),
        "queries": (data.get("key_query"), data.get("value_query")),
    }


# --- modules ---


@dataclass(frozen=True)
class Module:
    """A model, its ids and documents; of a seed."""

    length: int = 41
    restart: bool = False
    gates: bool = False
    pool: str = "mean"
    select: int = 0

    def model(self, **over: Any) -> RingTransformer:
        draw = torch.Generator().manual_seed(3)  # threads share PyTorch's own
        far = Summaries(5, 3, 4, gates=self.gates, pool=self.pool, select=self.select)
        model = RingTransformer(
            num_tokens=17, dim=12, depth=2, dim_head=6, heads=4, num_grouped_query_heads=2,
            causal=True, attn_summaries=far, rotary_restart=self.restart, **over,
        )  # fmt: skip
        with torch.no_grad():
            for p in model.parameters():
                p.normal_(std=0.3, generator=draw)
        return model.double()

    def data(self) -> tuple[Tensor, Tensor]:
        """Ids, and documents that differ between samples."""
        draw = torch.Generator().manual_seed(4)
        ids = torch.randint(0, 17, (2, self.length), generator=draw)
        documents = torch.stack([torch.arange(self.length) >= start for start in (9, 20)])
        return ids, documents.long()


def _trained(model: RingTransformer, *given: Tensor) -> Results:
    ids, documents = given
    loss = model(ids, documents=documents, return_loss=True)
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters()}


def check_modules_in_threads(case: Module, size: int, layout: str) -> None:
    """Loss and gradients, the mean over ranks, are those of one process."""

    def rank_main(ring: Ring) -> Results:
        options = dict(ring_attn=True, auto_shard_seq=False, layout=layout, group=ring)
        at = positions(layout, rank=ring.rank, ring_size=size, length=case.length)
        return _trained(case.model(**options), *(t[:, at] for t in case.data()))

    want = _trained(case.model(), *case.data())
    got, _ = threads.run(size, rank_main)
    for name, t in want.items():
        mean = sum(each[name] for each in got) / size
        assert relative_error(mean, t) < 1e-10, name


def decoded(
    layout: str, distance: int | None, gates: bool, pool: str, prompt: int
) -> dict[str, float]:
    """Errors of a prompt on a ring and of tokens after it, and bytes; for a pool."""
    ring, n = Ring(), prompt + 25
    draw = torch.Generator().manual_seed(5)

    def layer(**over: Any) -> SummaryAttention:
        made = SummaryAttention(
            12, window=5, stride=3, block=4, distance=distance, gates=gates, pool=pool, heads=4,
            dim_head=6, num_grouped_query_heads=2, rotary_embed=True, **over,
        ).double()  # fmt: skip
        draw.manual_seed(5)
        with torch.no_grad():
            for p in made.parameters():
                p.normal_(std=0.5, generator=draw)
        return made

    x = torch.randn(2, n, 12, dtype=torch.float64, generator=draw)
    want = layer()(x).detach()
    at = positions(layout, rank=ring.rank, ring_size=ring.size, length=prompt)
    mine = layer(ring_attn=True, layout=layout)
    first, cache = mine.prefill(x[:, at])
    later = torch.cat([mine.step(token, cache) for token in x[:, prompt:].split(1, 1)], 1)
    return {
        "prompt": relative_error(first, want[:, at]),
        "later": relative_error(later, want[:, prompt:]),
        "recent": cache.recent.shape[1],
        "far": cache.far.shape[1],
    }


def separate_rings() -> bool:
    """Run two rings, one whose documents are all near; for a pool of four."""
    ring, case = Ring(None, 2), Module(select=1)
    model = case.model(ring_attn=True, auto_shard_seq=False)
    ids, documents = case.data()
    if ring.first == 0:
        documents = torch.arange(case.length).expand(2, -1) // 4
    at = positions("contiguous", rank=ring.rank, ring_size=2, length=case.length)
    alone = case.model()(ids, documents=documents)
    found = model(ids[:, at], documents=documents[:, at], ring_size=2)
    return relative_error(found, alone[:, at]) < 1e-10
