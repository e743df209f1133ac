"""Compiled cases as data: a function, a layer and a model with a feature each, in ten lengths.

`docs/write_compile.py` tabulates what becomes of each, and tests hold it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from ring_attention_pytorch import (
    RingAttention,
    RingPlan,
    RingTransformer,
    ring_attn,
    shard_sequence,
)
from ring_attention_pytorch.ranks.ring import Ring
from tests.support.reference import relative_error

LENGTHS = range(16, 26)
B, HEADS, KEY_HEADS, D, TOKENS = 2, 4, 2, 8, 40
BACKEND = "aot_eager"


class Row(NamedTuple):
    """Graphs of all lengths, whether a step is one, and the worst error against eager."""

    graphs: int
    whole: bool
    error: float


class Step(NamedTuple):
    """A function of some arguments, what it is differentiated by, and what draws dropout."""

    given: tuple[Any, ...]
    leaves: list[Tensor]


Case = tuple[Callable[..., Tensor], Callable[[int], Step], bool]  # what, its step, fullgraph


def shard(t: Tensor) -> Tensor:
    return shard_sequence(t, layout="zigzag")


def documents(n: int) -> Tensor:
    return shard((torch.arange(n) // 5).expand(B, n)).contiguous()


def visible(n: int) -> Tensor:
    return shard(torch.arange(n).expand(B, n) % 4 != 1).contiguous()


def even_distance(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i - j) % 2 == 0


Options = dict[str, Any]
CALLS: dict[str, Callable[[int], Options]] = {
    "causal, gradient of lse": lambda n: {},
    "window": lambda n: dict(window=5),
    "key mask": lambda n: dict(key_mask=visible(n)),
    "documents": lambda n: dict(documents=documents(n)),
    "cu_seqlens": lambda n: dict(cu_seqlens=[0, 3, 7, n]),
    "prefix": lambda n: dict(prefix=4),
    "mask_mod": lambda n: dict(mask_mod=even_distance),
    "softclamp": lambda n: dict(softclamp=5.0),
    "alibi": lambda n: dict(alibi_slopes=torch.arange(4.0).double() / 8),
    "sinks": lambda n: dict(sinks=torch.randn(HEADS).double().requires_grad_()),
    "key_bias": lambda n: dict(
        key_bias=torch.randn(B, len(visible(n)[0])).double().requires_grad_()
    ),
    "dropout": lambda n: dict(dropout=0.3, dropout_seed=n),
    "ulysses": lambda n: dict(ulysses=Ring().size if Ring().size < 4 else 2),
    "ulysses, sinks": lambda n: CALLS["ulysses"](n) | CALLS["sinks"](n),
    'transport="ring"': lambda n: dict(transport="ring"),
    'transport="gather"': lambda n: dict(transport="gather"),
}


def calls(feature: str) -> Case:
    """`ring_attn` beside other operations, with a plan."""

    def run(q: Tensor, k: Tensor, v: Tensor, more: Options, plan: RingPlan) -> Tensor:
        out, lse = ring_attn(torch.sin(q), k, v, plan=plan, return_lse=True, **more)
        return (out * 2).square().sum() + lse.exp().sum()

    def step(n: int) -> Step:
        torch.manual_seed(n)
        shapes = [(B, n, heads, D) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
        q, k, v = (shard(torch.randn(s).double()).requires_grad_() for s in shapes)
        options = CALLS[feature](n)
        plan = RingPlan.make(q, k, v, **dict(causal=True, layout="zigzag") | options)
        more = {name: options[name] for name in ("sinks", "key_bias") if name in options}
        return Step((q, k, v, more, plan), [q, k, v, *more.values()])

    return run, step, True


HOW = dict(
    dim_head=D, heads=HEADS, num_grouped_query_heads=HEADS // KEY_HEADS, causal=True,
    ring_attn=True, auto_shard_seq=False, layout="zigzag",
)  # fmt: skip
LAYERS: dict[str, tuple[Options, Callable[[int], Options]]] = {
    "rotary embedding": ({}, lambda n: {}),
    "documents, angles restart": (
        dict(rotary_restart=True), lambda n: dict(documents=documents(n)),
    ),
    "key mask": ({}, lambda n: dict(mask=visible(n))),
    "dropout by layer": (dict(dropout=0.3), lambda n: {}),
    "without a plan": ({}, lambda n: dict(documents=documents(n))),
}  # fmt: skip


def layers(feature: str) -> Case:
    """Two layers, which share a plan; or one that makes its own."""
    own, given = LAYERS[feature]
    torch.manual_seed(0)
    makes = [RingAttention(16, rotary_embed=True, **HOW, **own) for _ in range(2)]
    both = nn.ModuleList(makes).double()
    alone = feature == "without a plan"

    def run(x: Tensor, options: Options, plan: RingPlan | None) -> Tensor:
        if plan is None:
            return both[0](x, **options).square().sum()
        for number, attn in enumerate(both):
            x = x + attn(x, plan=plan.for_layer(number))
        return x.square().sum()

    def step(n: int) -> Step:
        torch.manual_seed(n)
        x = shard(torch.randn(B, n, 16).double()).requires_grad_()
        options = given(n)
        plan = None if alone else both[0].plan(x, **options)
        parameters = (both[0] if alone else both).parameters()
        return Step((x, options if alone else {}, plan), [x, *parameters])

    return run, step, not alone


MODELS: dict[str, tuple[Options, Callable[[int], Options]]] = {
    "documents, loss": ({}, lambda n: dict(documents=documents(n))),
    "window of each block": (dict(max_lookback_seq_len=(3, 7)), lambda n: {}),
    "dropout": (dict(attn_dropout=0.3), lambda n: {}),
    "ulysses": (dict(ulysses=2), lambda n: {}),
    "without plans": ({}, lambda n: dict(documents=documents(n))),
}


def models(feature: str) -> Case:
    """A model of two blocks, to its loss over all ranks."""
    own, given = MODELS[feature]
    if Ring().size == 1:
        own = {name: value for name, value in own.items() if name != "ulysses"}
    torch.manual_seed(0)
    model = RingTransformer(num_tokens=TOKENS, dim=16, depth=2, **HOW, **own).double()
    alone = feature == "without plans"

    def step(n: int) -> Step:
        torch.manual_seed(n)
        ids = torch.randint(0, TOKENS, (B, n))
        labels, ids = shard(ids.roll(-1, 1)), shard(ids)
        options = given(n)
        more = options if alone else dict(plans=model.plans(ids, **options))
        return Step((ids, labels, more), list(model.parameters()))

    def run(ids: Tensor, labels: Tensor, more: Options) -> Tensor:
        return model(ids, labels=labels, **more)

    return run, step, not alone


SUBJECTS = {"ring_attn": (calls, CALLS), "RingAttention": (layers, LAYERS)}
SUBJECTS["RingTransformer"] = (models, MODELS)
ROWS = [(subject, feature) for subject, (_, features) in SUBJECTS.items() for feature in features]


def measured(subject: str, feature: str, backend: str = BACKEND, lengths: Any = LENGTHS) -> Row:
    """Compile what is named on this rank, and take steps of all lengths, eagerly too."""
    make, _ = SUBJECTS[subject]
    run, step, fullgraph = make(feature)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(run, fullgraph=fullgraph, backend=counter)
    worst = 0.0
    for n in lengths:
        given, by = step(n)
        found = []
        for attempt in (run, compiled):
            loss = attempt(*given)
            found.append([loss, *torch.autograd.grad(loss, by)])
        errors = [relative_error(got, want) for want, got in zip(*found)]
        worst = max(worst, *errors)
    return Row(counter.frame_count, fullgraph, worst)
