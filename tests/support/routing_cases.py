"""Routed modules on a ring against the same modules on one process, for threads and processes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ring_attention_pytorch import routing
from ring_attention_pytorch.geometry.layouts import positions
from ring_attention_pytorch.ranks.ring import Ring
from tests.support import case as language
from tests.support import routing_reference
from tests.support.case import (
    Results,
    Tokens,
    check_in_processes,
    check_in_threads,
    gradients,
    worst,
)

__all__ = ["check_in_processes", "check_in_threads", "worst"]  # for whoever imports the rest here
LAYOUTS = ("contiguous", "striped", "zigzag")
DIM = 8
SOFT = dict(router_straight_through=False, router_kwargs=dict(eps=2.0))
HEADS = dict(heavy_dim_head=4, heavy_heads=4)
LIGHT = dict(light_dim_head=4, light_heads=2, light_window_size=4)

MODULES: dict[str, Callable[..., nn.Module]] = {
    "feedforward": lambda **o: routing.ConditionalRoutedFeedForward(
        DIM, num_heavy_tokens=5, **SOFT, **o
    ),
    "causal feedforward": lambda **o: routing.ConditionalRoutedFeedForward(
        DIM, num_heavy_tokens=0.4, heavy_window_size=5, **SOFT, **o
    ),
    "attention": lambda **o: routing.ConditionalRoutedAttention(
        DIM, num_heavy_tokens_q=5, num_heavy_tokens_kv=6, **HEADS, **LIGHT, **o
    ),
    "attention to sets": lambda **o: routing.ConditionalRoutedAttention(
        DIM, num_heavy_tokens_q=0.3, num_heavy_tokens_kv=4, num_routed_kv=2, rotary_emb=True,
        multiply_keys_by_score=True, multiply_queries_by_score=True, **HEADS, **LIGHT, **SOFT, **o,
    ),
    "heavy attention": lambda **o: routing.ConditionalRoutedAttention(
        DIM, num_heavy_tokens_q=30, num_heavy_tokens_kv=1, has_light_attn=False,
        use_null_q_tokens=False, router_straight_through=False,
        router_kwargs=dict(n_iters=9, eps=0.5, eps_init=4.0, eps_decay=0.7), **HEADS, **o,
    ),
    "autoregressive": lambda **o: routing.ConditionalRoutedAutoregressiveAttention(
        DIM, num_heavy_tokens_q=2, num_heavy_tokens_kv=3, num_routed_kv=2, heavy_window_size=5,
        rotary_emb=True, **HEADS, **LIGHT, **SOFT, **o,
    ),
    "cross": lambda **o: routing.ConditionalRoutedCrossAttention(
        DIM, num_tokens_q=4, num_tokens_kv=5, dim_head=4, heads=4, kv_routing_tokens=2,
        route_kv_by_source=True, **SOFT, **o,
    ),
    "cross by blocks": lambda **o: routing.ConditionalRoutedCrossAttention(
        DIM, num_tokens_q=None, num_tokens_kv=6, dim_head=4, heads=2, route_block_size=7, **o
    ),
    "image": lambda **o: routing.ConditionalRoutedImageAttention(
        DIM, num_heavy_tokens_q=5, num_heavy_tokens_kv=4, light_dim_head=4, light_heads=2,
        light_window_size=2, **HEADS, **SOFT, **o,
    ),
    "block": lambda **o: routing.ConditionalRoutedTransformerBlock(
        DIM, num_heavy_attn_tokens_q=4, num_heavy_attn_tokens_kv=4, num_heavy_ff_tokens=0.25,
        **HEADS, **LIGHT, **o,
    ),
    "rotary causal block": lambda **o: routing.ConditionalRoutedTransformerBlock(
        DIM, num_heavy_attn_tokens_q=1, num_heavy_attn_tokens_kv=1, num_heavy_ff_tokens=2,
        causal=True, heavy_window_size=8, rotary_emb=True, **HEADS, light_dim_head=4,
        light_heads=4, light_window_size=8, **o,
    ),
    "causal block": lambda **o: routing.ConditionalRoutedTransformerBlock(
        DIM, num_heavy_attn_tokens_q=2, num_heavy_attn_tokens_kv=2, num_heavy_ff_tokens=2,
        causal=True, heavy_window_size=6, **HEADS, **LIGHT, **SOFT, **o,
    ),
}  # fmt: skip


# the function of `routing_reference` that loops over a module's tokens, where its name is another
_ORACLES = {
    "causal feedforward": "feedforward", "attention to sets": "attention",
    "causal block": "block", "rotary causal block": "block",
}  # fmt: skip


@dataclass(frozen=True)
class Case(language.Case):
    """A case of a routed module. Weights are drawn from the seed, too."""

    limit: ClassVar[float] = 1e-10
    module: str = ""
    length: int = 23
    layout: str = "contiguous"
    masked: bool = True
    batch: int = 2
    context: int = 31

    def data(self) -> Results:
        """x, context, cotangent, and masks of the two."""
        found = {}
        for name, n in (("x", self.length), ("context", self.context), ("dout", self.length)):
            found[name] = self.normal(name, self.batch, n, DIM)
        for name, n in (("mask", self.length), ("context_mask", self.context)):
            found[name] = self.marks(name, self.batch, n, share=0.7)
            found[name][-1] = torch.arange(n) < 3  # fewer real tokens than are asked for
        return found

    def tokens(self, name: str, rank: int, size: int) -> Tokens:
        of_context = name in ("context", "dcontext", "context_mask")
        if not of_context and name not in ("x", "dx", "out", "dout", "mask"):
            return None
        n = self.context if of_context else self.length
        return 1, positions(self.layout, rank=rank, ring_size=size, length=n)

    def whole(self) -> Results:
        return results(self.make(), self, self.data())

    def shard(self, ring: Ring) -> Results:
        module = self.make(ring_attn=True, layout=self.layout, group=ring)
        return results(module, self, self.part(self.data(), ring))

    def make(self, **over: Any) -> nn.Module:
        """The module; every parameter random, the null ones and gammas too."""
        module = MODULES[self.module](**over).double()
        draw = torch.Generator().manual_seed(self.seed + 1)
        with torch.no_grad():
            for _, p in sorted(module.named_parameters()):
                p.copy_(torch.randn(p.shape, generator=draw, dtype=p.dtype) * 0.5)
        return module


def image_size(length: int) -> tuple[int, int]:
    """Height and width, not of a square where that can be helped."""
    height = next(h for h in (3, 5, 7, 2, 1) if length % h == 0)
    return height, length // height


def call(module: nn.Module, case: Case, data: Results) -> Tensor:
    masks = {"mask": data["mask"]} if case.masked else {}
    if isinstance(module, routing.ConditionalRoutedCrossAttention):
        if case.masked:
            masks["context_mask"] = data["context_mask"]
        return module(data["x"], data["context"], **masks)
    if isinstance(module, routing.ConditionalRoutedImageAttention):
        return module(data["x"], image_size=image_size(case.length), **masks)
    return module(data["x"], **masks)


def by_loops(module: nn.Module, case: Case, data: Results) -> Tensor:
    """Compute the results by loops over tokens, which know of no ranks."""
    given = {name: data[name] for name in ("mask", "context_mask")}
    if not case.masked:
        given = {name: torch.ones_like(mask) for name, mask in given.items()}
    if case.module == "cross":
        return routing_reference.cross(module, data["x"], data["context"], **given)
    if case.module == "image":
        return routing_reference.image(module, data["x"], given["mask"], image_size(case.length))
    oracle = getattr(routing_reference, _ORACLES.get(case.module, case.module))
    window = 8 if case.module == "rotary causal block" else LIGHT["light_window_size"]
    return oracle(module, data["x"], given["mask"], window)


def results(
    module: nn.Module,
    case: Case,
    data: Results,
    call: Callable[[nn.Module, Case, Results], Tensor] = call,
) -> Results:
    """out, and gradients of x, the context and every parameter."""
    leaves = {name: data[name].clone().requires_grad_() for name in ("x", "context")}
    out = call(module, case, data | leaves)
    leaves |= dict(module.named_parameters())
    return gradients({"out": out}, leaves, {"out": data["dout"]})
