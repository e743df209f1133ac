"""A layer with tokens that all ranks hold: attention by its definition, and all gradients."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from ring_attention_pytorch import RingAttention, Summaries
from ring_attention_pytorch.geometry.layouts import positions
from ring_attention_pytorch.nn.rotary import apply_rotary_pos_emb
from ring_attention_pytorch.ranks.ring import Ring
from tests.support import threads
from tests.support.module_cases import ATTENTION, made
from tests.support.reference import dense_attention, relative_error

B, N, S = 2, 13, 3
LAYOUTS = ("contiguous", "striped", "zigzag")
MASK = torch.tensor([[True, True, False], [False, True, True]])


def drawn() -> list[Tensor]:
    """x, shared tokens, and a cotangent."""
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(B, n, 12, generator=draw, dtype=torch.float64) for n in (N, S, N)]


def layer(options: dict[str, Any], **more: Any) -> Any:
    return made(RingAttention, dict(options, **more))


def by_definition(options: dict[str, Any], mask: Tensor | None) -> list[Tensor]:
    """Out, and gradients of x, the shared tokens and the parameters, from one softmax."""
    module = layer(options)
    x, shared, dout = drawn()
    leaves = [x.requires_grad_(), shared.requires_grad_(), *module.parameters()]
    weights = module.to_qkv[1].weight.split((16, 8, 8))
    normed = [
        t / t.norm(dim=-1, keepdim=True) * 12**0.5 * module.to_qkv[0].gamma for t in leaves[:2]
    ]
    q, k, v = ((normed[0] @ w.T).unflatten(-1, (-1, 4)) for w in weights)
    more_k, more_v = ((normed[1] @ w.T).unflatten(-1, (-1, 4)) for w in weights[1:])
    if module.rotary_embed is not None:
        angles = module.rotary_embed(torch.arange(N))
        q, k = apply_rotary_pos_emb(angles, q), apply_rotary_pos_emb(angles, k)
    beside = torch.ones(B, S, dtype=torch.bool) if mask is None else mask
    out, _ = dense_attention(
        q, torch.cat((k, more_k), 1), torch.cat((v, more_v), 1),
        causal=options.get("causal", False),
        key_mask=torch.cat((torch.ones(B, N, dtype=torch.bool), beside), 1),
        positions=(torch.arange(N), torch.cat((torch.arange(N), torch.full((S,), -1)))),
    )  # fmt: skip
    out = out.flatten(-2) @ module.to_out.weight.T
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def results(
    ring: Ring, options: dict[str, Any], state: dict[str, Tensor], mask: Tensor | None
) -> list[Tensor]:
    """One rank's."""
    layout = options.get("layout", "contiguous")
    at = positions(layout, rank=ring.rank, ring_size=ring.size, length=N)
    module = RingAttention(**ATTENTION, **options, ring_attn=True, group=ring).double()
    module.load_state_dict(state)
    x, shared, dout = drawn()
    leaves = [x[:, at].requires_grad_(), shared.requires_grad_(), *module.parameters()]
    given: dict[str, Any] = dict(shared_tokens=leaves[1], shared_mask=mask)
    if ring.size > 2:
        plan = module.plan(leaves[0], **given)
        given = dict(shared_tokens=leaves[1], plan=plan)
    out = module(leaves[0], **given)
    return [at, out.detach(), *torch.autograd.grad(out, leaves, dout[:, at])]


OPTIONS: dict[str, dict[str, Any]] = {
    "all see all": {},
    "causal and rotated": dict(causal=True, rotary_embed=True),
    "heads are swapped": dict(causal=True, ulysses=2),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_they_are_in_the_softmax_and_gradients_add_up(options):
    number = [*OPTIONS.values()].index(options)
    alone = {name: value for name, value in options.items() if name != "ulysses"}
    state = layer(alone).state_dict()  # drawn in this thread
    for size in (2, 4) if "ulysses" in options else (1, 2, 3, 4):
        how = dict(options, layout=LAYOUTS[(number + size) % 3])
        mask = MASK if size % 2 else None
        found = threads.run(size, partial(results, options=how, state=state, mask=mask))[0]
        want = by_definition(alone, mask)
        for name, whole in enumerate(want):
            each = [rank[name + 1] for rank in found]
            if name < 2:  # out and dx
                held = [whole[:, rank[0]] for rank in found]
            else:  # of shared tokens and parameters: sums over ranks
                each, held = [sum(each, torch.zeros(()))], [whole]
            worst = max(map(relative_error, each, held))
            assert worst < 1e-12, (size, how, name, worst)


def test_traced_code_breaks_around_them():
    module, (x, shared, _) = layer({}), drawn()
    found = torch.compile(module, backend="eager")(x, shared_tokens=shared)
    assert torch.equal(found, module(x, shared_tokens=shared))


X = torch.zeros(2, 5, 12).double()


@pytest.mark.parametrize(
    ("options", "call", "said"),
    [
        ({}, dict(shared_mask=MASK), "shared_mask needs shared_tokens"),
        ({}, dict(shared_tokens=X[:1]), r"shared_tokens must be \[2, tokens, 12\]"),
        ({}, dict(shared_tokens=X[..., :5]), r"shared_tokens must be \[2, tokens, 12\]"),
        ({}, dict(shared_tokens=X.float()), "in torch.float64 as x"),
        ({}, dict(shared_tokens=X, shared_mask=MASK), r"shared_mask must be bool \[2, 5\]"),
        (dict(force_regular_attn=True), dict(shared_tokens=X), "make the module without"),
        (dict(ring_attn=True, auto_shard_seq=True), dict(shared_tokens=X), "without auto_shard"),
        (
            dict(causal=True, attn_summaries=Summaries(window=4, stride=2)),
            dict(shared_tokens=X),
            "attn_summaries",
        ),
        (dict(dropout=0.5), dict(shared_tokens=X), "have no positions"),
    ],
)
def test_what_does_not_fit_is_refused(options, call, said):
    with pytest.raises(ValueError, match=said):
        layer(options)(X, **call)


def test_a_plan_is_for_such_tokens():
    module = layer({})
    with pytest.raises(ValueError, match="made without shared_keys"):
        module(X, plan=module.plan(X), shared_tokens=X)
    plan = module.plan(X, shared_tokens=X)
    with pytest.raises(ValueError, match="made with shared_keys"):
        module(X, plan=plan)
    with pytest.raises(ValueError, match="got shared_mask beside it"):
        module(X, plan=plan, shared_tokens=X, shared_mask=torch.ones(2, 5) > 0)
