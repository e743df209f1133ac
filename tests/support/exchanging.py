"""Every function that exchanges: a call of it with its backward, for ranks to make out of step.

A call repeated by all ranks gives the same results, so what a rank has from a call of other ranks
is seen in its numbers. `EXCHANGING` has for each a function of a ring, which plans (ranks agree
there), and returns the call: a forward, which returns its results and its backward.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import ring_attention_pytorch as rap
from ring_attention_pytorch import RingCache, RingPlan, RunPlan, SummaryPlan
from ring_attention_pytorch.decoding import tree_attn_decode
from ring_attention_pytorch.latent import mla_plan, mla_ring_attn, tied_ring_attn
from ring_attention_pytorch.nn.sharding import AutoShard
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.recurrent.halo import last_tokens
from ring_attention_pytorch.routing import RoutingPlan
from ring_attention_pytorch.routing.dispatch import Dispatch, dealt
from ring_attention_pytorch.routing.soft_topk import soft_topk

N, H, D = 4, 2, 4  # a rank's tokens, heads, their size
Results = list[Tensor]
Forward = Callable[
    ..., tuple[Results, Callable[[], Results]]
]  # of tensors by a factor, or as given


def drawn(ring: Ring, *shape: int) -> Tensor:
    draw = torch.Generator().manual_seed(ring.rank + sum(shape))
    return torch.randn(shape, generator=draw, dtype=torch.float64)


def of_tokens(ring: Ring, *width: int, count: int = 1) -> list[Tensor]:
    return [*drawn(ring, count, 1, N, *width).unbind()]


def differentiated(function: Callable[..., Any], *given: Tensor) -> Forward:
    """Make the call that differentiates the sum of squares of what a function returns."""

    def forward(factor: float = 1.0) -> tuple[Results, Callable[[], Results]]:
        leaves = [(factor * t.detach()).requires_grad_() for t in given]
        found = function(*leaves)
        found = [found] if isinstance(found, Tensor) else [t for t in found if t is not None]
        loss = sum(t.double().square().sum() for t in found if t.requires_grad)

        def backward() -> Results:
            grads = torch.autograd.grad(loss, leaves, allow_unused=True)
            return [grad for grad in grads if grad is not None]

        return [t.detach() for t in found], backward

    return forward


def without_gradient(function: Callable[[], Any]) -> Forward:
    def forward() -> tuple[Results, Callable[[], Results]]:
        with torch.no_grad():
            found = function()
        return [found] if isinstance(found, Tensor) else [*found], list

    return forward


def attention(**options: Any) -> Callable[[Ring], Forward]:
    def made(ring: Ring) -> Forward:
        q, k, v = (t.requires_grad_() for t in of_tokens(ring, H, D, count=3))
        plan = RingPlan.make(q, k, v, group=ring, kernel="eager", **options)
        return differentiated(lambda *qkv: rap.ring_attn(*qkv, plan=plan), q, k, v)

    return made


def without_plan(ring: Ring) -> Forward:
    given = of_tokens(ring, H, D, count=3)
    return differentiated(lambda *qkv: rap.ring_attn(*qkv, group=ring, kernel="eager"), *given)


def twice_differentiated(ring: Ring) -> Forward:
    q, k, v = (t.requires_grad_() for t in of_tokens(ring, H, D, count=3))
    plan = RingPlan.make(q, k, v, group=ring, kernel="eager")

    def first(*qkv: Tensor) -> Any:
        return torch.autograd.grad(
            rap.ring_attn(*qkv, plan=plan).square().sum(), qkv, create_graph=True
        )

    return differentiated(first, q, k, v)


def with_shared_keys(ring: Ring) -> Forward:
    q, k, v = (t.requires_grad_() for t in of_tokens(ring, H, D, count=3))
    shared = [torch.ones(1, 3, H, D, dtype=torch.float64).requires_grad_() for _ in range(2)]
    plan = RingPlan.make(q, k, v, group=ring, kernel="eager", shared_keys=tuple(shared))
    return differentiated(
        lambda q, k, v, *both: rap.ring_attn(q, k, v, plan=plan, shared_keys=both), q, k, v, *shared
    )


def latents(ring: Ring) -> Forward:
    nope, rope = of_tokens(ring, H, D, count=2)
    latent, k_rope, w_up = drawn(ring, 1, N, 6), drawn(ring, 1, N, D), torch.ones(H, D + 3, 6)
    given = [t.double().requires_grad_() for t in (nope, rope, latent, k_rope, w_up)]
    plan = mla_plan(*given, group=ring)
    return differentiated(lambda *given: mla_ring_attn(*given, plan=plan), *given)


def tied(ring: Ring) -> Forward:
    q, kv = (t.requires_grad_() for t in of_tokens(ring, H, D, count=2))
    return differentiated(lambda q, kv: tied_ring_attn(q, kv, group=ring), q, kv)


def recurrent(name: str) -> Callable[[Ring], Forward]:
    def made(ring: Ring) -> Forward:
        q, k, v = of_tokens(ring, H, D, count=3)
        plan, gate = RunPlan.make(q, group=ring), -v[..., 0].abs()
        calls: dict[str, Callable[..., Any]] = {
            "ring_gated_delta_rule": lambda q, k, v: rap.ring_gated_delta_rule(
                q, k, v, gate, gate.exp(), plan=plan, normalize=True
            ),
            "ring_kda": lambda q, k, v: rap.ring_kda(
                q, k, v, -v.abs(), gate.exp(), plan=plan, normalize=True
            ),
            "ring_mamba2": lambda q, k, v: rap.ring_mamba2(
                v, gate.exp(), -torch.ones(H).double(), q, k, plan=plan
            ),
            "ring_halo": lambda q, k, v: rap.ring_halo(q, 3, plan=plan),
            "ring_short_conv": lambda q, k, v: rap.ring_short_conv(
                q.flatten(2), torch.ones(H * D, 4).double(), plan=plan
            ),
            "last_tokens": lambda q, k, v: last_tokens(q, 3, plan=plan),
            "ring_scan": lambda q, k, v: rap.ring_scan(
                k[0, :1, :, 0].sigmoid(), v[0, :1, :, :, None], plan=plan
            ),
        }
        return differentiated(calls[name], q, k, v)

    return made


def unsharded(ring: Ring) -> Forward:
    length = N * ring.size
    return differentiated(
        lambda x: rap.unshard_sequence(x, length=length, group=ring), *of_tokens(ring, D)
    )


def sharded_by_itself(ring: Ring) -> Forward:
    x = drawn(ring, 1, 2 * N, D).requires_grad_()
    kinds: dict[str, Any] = dict(ring_seq_size=N, layout="contiguous", group=ring, ring_size=None)
    shards = AutoShard.make(x, same={}, **kinds)
    return differentiated(lambda x: shards.unshard(shards.shard(x).sin()), x)


def summaries(select: int) -> Callable[[Ring], Forward]:
    def made(ring: Ring) -> Forward:
        q, k, v = (t.requires_grad_() for t in drawn(ring, 3, 1, 16, H, D).unbind())
        plan = SummaryPlan.make(q, k, v, window=4, stride=4, group=ring, select=select)

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return rap.summary_attn(q, k, v, *rap.summarize(k, v, plan=plan), plan=plan)

        return differentiated(call, q, k, v)

    return made


def gates(ring: Ring) -> Forward:
    return differentiated(lambda x: soft_topk(x, 2, group=ring), drawn(ring, 2, N))


def best_keys(ring: Ring) -> Forward:
    at = torch.arange(N) + N * ring.rank
    return differentiated(lambda x: rap.top_keys(x, at, 3, group=ring)[0], drawn(ring, 2, N))


def routed(ring: Ring) -> Forward:
    x = drawn(ring, 1, N, D)
    plan = RoutingPlan.make(x, group=ring)
    way = Dispatch.make(torch.arange(N).view(1, 1, N), plan, dealt(N, ring.size, x.device))

    def call(x: Tensor) -> Tensor:
        scores = plan.whole(x[..., 0])
        return way.home(way.out(x).sin(), x) + scores.sum()

    return differentiated(call, x)


def loss(ring: Ring) -> Forward:
    labels = torch.arange(N)[None] % 3
    return differentiated(
        lambda x: rap.ring_cross_entropy(x, labels, group=ring), drawn(ring, 1, N, 5)
    )


def rolled(ring: Ring) -> Forward:
    batch = rap.shard_batch({"input_ids": torch.arange(N * ring.size)[None]}, group=ring)
    return without_gradient(lambda: batch.roll(batch["input_ids"], 1, -1))


def decoded(ring: Ring) -> Forward:
    q = torch.ones(1, H, 1, D, dtype=torch.float64)
    k, v = (drawn(ring, 1, H, N, D) for _ in range(2))
    return without_gradient(lambda: tree_attn_decode(q, k, v, shard_kv_seq=False, group=ring))


def cached(length: int, **options: Any) -> Callable[[Ring], Forward]:
    """Take a token, or a prompt's chunk after some tokens, and take it back."""

    def made(ring: Ring) -> Forward:
        cache = RingCache(1, H, D, page=1, dtype=torch.float64, group=ring)
        first = torch.ones(1, 4, H, D, dtype=torch.float64)
        rap.ring_attn_with_cache(first, first, first, cache)
        taken = length * ring.size if "layout" in options else length

        def call() -> Tensor:
            q = (drawn(ring, 1, length, H, D) if "layout" in options else first[:, :length]).clone()
            out = rap.ring_attn_with_cache(q, q, q, cache, **options)
            cache.rollback(taken)
            return out

        return without_gradient(call)

    return made


EXCHANGING: dict[str, Callable[[Ring], Forward]] = {
    "ring_attn": attention(),
    "ring_attn, causal": attention(causal=True, layout="zigzag"),
    "ring_attn, gathered": attention(transport="gather"),
    "ring_attn, Ulysses": attention(ulysses=2),
    "ring_attn without a plan": without_plan,
    "second derivatives": twice_differentiated,
    "shared keys": with_shared_keys,
    "mla_ring_attn": latents,
    "tied_ring_attn": tied,
    **{
        name: recurrent(name)
        for name in (
            "ring_gated_delta_rule", "ring_kda", "ring_mamba2", "ring_halo", "ring_short_conv",
            "last_tokens", "ring_scan",
        )
    },
    "unshard_sequence": unsharded,
    "automatic sharding": sharded_by_itself,
    "summaries": summaries(0),
    "selected cells": summaries(2),
    "soft_topk": gates,
    "top_keys": best_keys,
    "routing": routed,
    "ring_cross_entropy": loss,
    "rolling a batch": rolled,
    "tree_attn_decode": decoded,
    "decoding": cached(1),
    "a prompt's chunk": cached(2, layout="contiguous"),
}  # fmt: skip

WITHOUT_BACKWARD = ["rolling a batch", "tree_attn_decode", "decoding", "a prompt's chunk"]
