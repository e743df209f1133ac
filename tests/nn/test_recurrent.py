"""Recurrent modules over rings, against the same layers token by token."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from ring_attention_pytorch import RingTransformer, RunPlan
from ring_attention_pytorch.geometry.layouts import positions
from ring_attention_pytorch.nn.recurrent import GatedDeltaNet, Mamba2, pattern_of
from ring_attention_pytorch.ranks.ring import as_ring
from tests.support.recurrent_cases import Spread, check
from tests.support.recurrent_reference import convolved, sequential
from tests.support.reference import relative_error

DIM = 6


def normal(x: Tensor, gamma: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True).clamp(min=1e-12) * x.shape[-1] ** 0.5 * gamma


def near(x: Tensor, gamma: Tensor) -> Tensor:
    """A norm that leaves tokens near 0 short."""
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gamma


def delta_net(p, x: Tensor, spread: Spread, mask: Tensor | None = None) -> Tensor:
    """A gated delta net with 4 value heads and 2 key heads of 3."""
    real = torch.ones_like(x[..., :1]) if mask is None else mask[..., None].double()
    normed = normal(x * real, p["norm.gamma"])
    mixed = convolved(normed @ p["to_qkv.weight"].T, p["conv"], None, spread.documents)
    q, k, v = (t.unflatten(2, (-1, 3)) for t in (F.silu(mixed) * real).split((6, 6, 12), -1))
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    decay, beta = (normed @ p["to_gates.weight"].T).split(4, -1)
    g = -p["log_rates"].exp() * F.softplus(decay + p["steps"])
    out, _ = sequential(q / 3**0.5, k, v, g, beta.sigmoid(), spread.begins)
    gates = F.silu((normed @ p["to_out_gates.weight"].T).unflatten(2, (-1, 3)))
    return (near(out, p["out_norm.gamma"]) * gates).flatten(2) @ p["to_out.weight"].T


def mamba(p, x: Tensor, spread: Spread, mask: Tensor | None = None) -> Tensor:
    """A Mamba 2 layer with 4 heads of 3 and 2 groups of states of 2."""
    real = torch.ones_like(x[..., :1]) if mask is None else mask[..., None].double()
    normed = normal(x * real, p["norm.gamma"])
    mixed = F.silu(convolved(normed @ p["to_xbc.weight"].T, p["conv"], None, spread.documents))
    v, b, c = (mixed * real).split((12, 4, 4), -1)
    v, b, c = v.unflatten(2, (4, 3)), b.unflatten(2, (2, 2)), c.unflatten(2, (2, 2))
    dt = F.softplus(normed @ p["to_steps.weight"].T + p["steps"])
    g = -dt * p["log_rates"].exp()
    out, _ = sequential(c, b, v * dt[..., None], g, None, spread.begins)
    out = (out + v * p["skip"][:, None]).flatten(2)
    gated = out * F.silu(normed @ p["to_out_gates.weight"].T)
    return near(gated, p["out_norm.gamma"]) @ p["to_out.weight"].T


def layers() -> dict[str, tuple[nn.Module, object]]:
    torch.manual_seed(0)
    return {
        "delta": (GatedDeltaNet(DIM, heads=4, key_heads=2, dim_head=3), delta_net),
        "mamba": (Mamba2(DIM, heads=4, dim_head=3, dim_state=2, groups=2), mamba),
    }


@pytest.mark.parametrize("kind", ["delta", "mamba"])
@pytest.mark.parametrize("seed", [20, 21, 24, 27])
def test_modules_equal_the_same_layers_token_by_token(kind, seed) -> None:
    layer, function = layers()[kind]
    layer = layer.double()
    spread = Spread.drawn(seed)
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(spread.batch, spread.length, DIM, generator=draw, dtype=torch.float64)
    mask = torch.rand(spread.batch, spread.length, generator=draw) > 0.2 if seed % 2 else None
    names = dict(layer.named_parameters())

    def ours(*, plan, x, **given):
        real = None if mask is None else mask[:, spread.held(plan.ring.rank)]
        own = copy.deepcopy(layer)  # threads would swap the parameters of one
        return {"out": functional_call(own, given, (x, real), {"plan": plan})}

    def reference(*, spread, x, **given):
        return {"out": function(given, x, spread, mask)}

    same = {name: p.detach() for name, p in names.items()}
    check(spread, {"x": x}, same, ours, reference, 1e-10)


@pytest.mark.parametrize("kind", ["delta", "mamba"])
def test_gradients_in_bfloat16_are_near_those_of_float32(kind) -> None:
    """Some outputs of a scan are near 0, and rounded; the norm after it must not blow that up."""
    torch.manual_seed(0)
    layer = GatedDeltaNet(64, heads=4, dim_head=16) if kind == "delta" else Mamba2(64, heads=4)
    x, weights = torch.randn(1, 128, 64, requires_grad=True), torch.randn(1, 128, 64)
    grads = []
    for lower in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=lower):
            out = layer(x, plan=RunPlan.make(x))
        grads.append(torch.autograd.grad((out * weights).sum(), [x, *layer.parameters()]))
    assert max(relative_error(got, want) for want, got in zip(*grads)) < 0.1


def hybrid(**given) -> RingTransformer:
    torch.manual_seed(1)
    model = RingTransformer(
        num_tokens=11,
        dim=16,
        depth=3,
        dim_head=4,
        heads=2,
        causal=True,
        layers="rma",
        rotary_restart=True,
        **given,
    )
    return model.double()


def step(layout: str | None, documents: bool):
    """Loss and averaged gradients over this rank's ring; without a layout of one process."""
    draw = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 11, (2, 22), generator=draw)
    borders = [0, 5, 6, 22] if documents else None
    ring = as_ring(None)
    if layout is None:
        parts = [ids] if borders is None else ids.split([5, 1, 16], 1)
        model = hybrid(force_regular_attn=True)
        losses = [model(part, return_loss=True) * (part.shape[1] - 1)
                  for part in parts if part.shape[1] > 1]  # fmt: skip
        loss = sum(losses) / sum(part.shape[1] - 1 for part in parts)
    else:
        model = hybrid(ring_attn=True, layout=layout, auto_shard_seq=False)
        at = positions(layout, rank=ring.rank, ring_size=ring.size, length=22)
        loss = model(ids[:, at], return_loss=True, cu_seqlens=borders)
    loss.backward()
    grads = [p.grad for p in model.parameters()]
    if layout is not None:
        for grad in grads:
            ring.total(grad)
            grad /= ring.size
    return loss.detach(), grads


@pytest.mark.parametrize("documents", [False, True])
def test_a_hybrid_over_three_ranks_equals_one_process(pools, documents) -> None:
    want, wanted = step(None, documents)
    for layout in ("zigzag", "contiguous"):
        for loss, grads in pools(3).run(step, layout, documents):
            assert relative_error(loss, want) < 1e-10
            for got, expected in zip(grads, wanted, strict=True):
                assert relative_error(got, expected) < 1e-10


def compiled(kind: str) -> list[float]:
    """Errors of a compiled layer's results and gradients over this rank's ring."""
    layer, ring = layers()[kind][0].double(), as_ring(None)
    at = positions("zigzag", rank=ring.rank, ring_size=ring.size, length=13)
    x = torch.randn(1, 13, DIM, dtype=torch.float64)[:, at]
    plan, found = RunPlan.make(x, layout="zigzag", cu_seqlens=[0, 4, 13]), []
    for function in (layer, torch.compile(layer, backend="eager")):
        leaf = x.clone().requires_grad_()
        out = function(leaf, plan=plan)
        leaves = [leaf, *layer.parameters()]
        found.append([out.detach(), *torch.autograd.grad(out.square().sum(), leaves)])
    return [relative_error(got, want) for want, got in zip(*found, strict=True)]


@pytest.mark.parametrize("kind", ["delta", "mamba"])
def test_torch_compile_breaks_the_graph_around_exchanges(pools, kind) -> None:
    for errors in pools(2).run(compiled, kind):
        assert max(errors) < 1e-12


def test_patterns() -> None:
    assert pattern_of(None, 2) == "aa"
    assert pattern_of(["r", "a"], 4) == "rara"
    for wrong in ("rr", "rx", "", "rrra"):
        with pytest.raises(ValueError, match="layers must be of 'a'"):
            pattern_of(wrong, 6)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (dict(causal=False), "need causal=True"),
        (dict(layout="striped", ring_attn=True), "not the striped layout"),
        (dict(max_lookback_seq_len=(4, None)), "must be None for recurrent blocks"),
    ],
)
def test_what_contradicts_recurrent_blocks(given, match) -> None:
    options = dict(num_tokens=9, dim=8, depth=2, dim_head=4, heads=2, causal=True, layers="ra")
    with pytest.raises(ValueError, match=match):
        RingTransformer(**{**options, **given})


@pytest.mark.parametrize("kind", ["delta", "mamba"])
def test_read_in_parts_a_sequence_is_the_same(kind) -> None:
    layer = layers()[kind][0].double()
    x = torch.randn(2, 13, DIM, dtype=torch.float64)
    mask = torch.arange(13) >= torch.tensor([[4], [0]])
    want = layer(x, mask, plan=RunPlan.make(x))
    state, outs = None, []
    for part, real in zip(x.split([2, 5, 1, 0, 1, 4], 1), mask.split([2, 5, 1, 0, 1, 4], 1)):
        out, state = layer.read(part, real, RunPlan.make(part), state)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 1), want)


def test_wrong_sizes_and_tokens() -> None:
    with pytest.raises(ValueError, match="heads must be a multiple of key_heads, got 4 and 3"):
        GatedDeltaNet(8, heads=4, key_heads=3)
    layer, x = GatedDeltaNet(8, heads=2, dim_head=4), torch.zeros(1, 3, 8)
    plan = RunPlan.make(x)
    for wrong, mask in ((x[..., :4], None), (x, torch.zeros(1, 3)), (x.long(), None)):
        with pytest.raises(ValueError, match="a recurrent layer: "):
            layer(wrong, mask, plan=plan)
