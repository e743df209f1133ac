"""Routed modules on a ring against the same modules on one process, for threads and processes."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ring_attention_pytorch import routing
from ring_attention_pytorch.geometry.layouts import positions
from ring_attention_pytorch.ranks.ring import Ring
from tests.support import routing_reference, threads
from tests.support.ranks import Pool
from tests.support.reference import relative_error

LAYOUTS = ("contiguous", "striped", "zigzag")
TOLERANCE = 1e-10
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
class Case:
    """What to compute. Data and weights are drawn from the seed, the same on every rank."""

    module: str
    length: int = 23
    layout: str = "contiguous"
    masked: bool = True
    batch: int = 2
    context: int = 31
    seed: int = 0

    def data(self) -> dict[str, Tensor]:
        """x, context, cotangent, and masks of the two."""
        draw = torch.Generator().manual_seed(self.seed)
        n, m = self.length, self.context

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw, dtype=torch.float64)

        data = {"x": normal(self.batch, n, DIM), "context": normal(self.batch, m, DIM)}
        data["dout"] = normal(self.batch, n, DIM)
        for name, length in (("mask", n), ("context_mask", m)):
            mask = torch.rand((self.batch, length), generator=draw) < 0.7
            mask[-1] = torch.arange(length) < 3  # fewer real tokens than are asked for
            data[name] = mask
        return data

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


def call(module: nn.Module, case: Case, data: dict[str, Tensor]) -> Tensor:
    masks = {"mask": data["mask"]} if case.masked else {}
    if isinstance(module, routing.ConditionalRoutedCrossAttention):
        if case.masked:
            masks["context_mask"] = data["context_mask"]
        return module(data["x"], data["context"], **masks)
    if isinstance(module, routing.ConditionalRoutedImageAttention):
        return module(data["x"], image_size=image_size(case.length), **masks)
    return module(data["x"], **masks)


def by_loops(module: nn.Module, case: Case, data: dict[str, Tensor]) -> Tensor:
    """The same by loops over tokens, which know of no ranks."""
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
    data: dict[str, Tensor],
    call: Callable[[nn.Module, Case, dict[str, Tensor]], Tensor] = call,
) -> dict[str, Tensor]:
    """out, and gradients of x, the context and every parameter."""
    data = dict(data)
    for name in ("x", "context"):
        data[name] = data[name].clone().requires_grad_()
    out = call(module, case, data)
    inputs = {n: data[n] for n in ("x", "context")} | dict(module.named_parameters())
    grads = torch.autograd.grad(out, list(inputs.values()), data["dout"], allow_unused=True)
    found = {n: torch.zeros_like(t) if g is None else g for (n, t), g in zip(inputs.items(), grads)}
    return {"out": out.detach(), **found}


@lru_cache(maxsize=64)
def whole(case: Case) -> dict[str, Tensor]:
    """The same on one process; for any layout."""
    return results(case.make(), case, case.data())


def places(case: Case, rank: int, size: int) -> dict[str, Tensor]:
    x, context = (
        positions(case.layout, rank=rank, ring_size=size, length=n)
        for n in (case.length, case.context)
    )
    return {"x": x, "dout": x, "mask": x, "context": context, "context_mask": context}


def shard(case: Case, ring: Ring) -> dict[str, Tensor]:
    """The same from one rank's shards."""
    module = case.make(ring_attn=True, layout=case.layout, group=ring)
    at = places(case, ring.rank, ring.size)
    return results(module, case, {name: t[:, at[name]] for name, t in case.data().items()})


def errors(
    case: Case, by_rank: list[dict[str, Tensor]], want: dict[str, Tensor] | None = None
) -> dict[str, float]:
    """The worst relative error of each result; gradients of parameters are summed over ranks."""
    want = want or whole(Case(**{**vars(case), "layout": "contiguous"}))
    size, found = len(by_rank), {}
    for name, wanted in want.items():
        if name in ("out", "x", "context"):
            at = [places(case, r, size)["x" if name == "out" else name] for r in range(size)]
            found[name] = max(
                relative_error(mine[name], wanted[:, here]) for mine, here in zip(by_rank, at)
            )
        else:
            found[name] = relative_error(sum(mine[name] for mine in by_rank), wanted)
    return found


def check(case: Case, by_rank: list[dict[str, Tensor]]) -> None:
    bad = {name: e for name, e in errors(case, by_rank).items() if not e < TOLERANCE}
    assert not bad, f"{len(by_rank)} ranks: {bad} in {case}"


def check_in_threads(case: Case, size: int) -> threads.Hub:
    got, hub = threads.run(size, lambda ring: shard(case, ring))
    check(case, got)
    return hub


def process_case(cases: list[Case]) -> list[dict[str, Tensor]]:
    """For a pool."""
    return [shard(case, Ring()) for case in cases]


def check_in_processes(cases: list[Case], pool: Pool) -> None:
    for case, *by_rank in zip(cases, *pool.run(process_case, cases)):
        check(case, by_rank)
