"""Recurrent layers over rings of threads, against the recurrence token by token."""

import pytest
import torch

from ring_attention_pytorch.recurrent import ring_gated_delta_rule, ring_kda, ring_mamba2
from tests.support.recurrent_cases import Spread, check
from tests.support.recurrent_reference import sequential

KEY_HEADS, HEADS, D_K, D_V = 2, 4, 3, 5


def data(spread: Spread, channels: bool, seed: int):
    """Inputs with gates at 0 and 1, keys of different norms."""
    draw = torch.Generator().manual_seed(seed)
    shape = spread.batch, spread.length

    def normal(*more: int) -> torch.Tensor:
        return torch.randn(*more, generator=draw, dtype=torch.float64)

    gate = normal(*shape, HEADS, *(D_K,) * channels).sigmoid() ** 0.3
    chance = torch.rand(gate.shape, generator=draw)
    gate[chance < 0.03], gate[chance > 0.97] = 0.0, 1.0
    beta = normal(*shape, HEADS).sigmoid()
    beta[(chance.amax(-1) if channels else chance) > 0.95] = 1.0
    q, k = normal(*shape, KEY_HEADS, D_K), normal(*shape, KEY_HEADS, D_K)
    return dict(q=q, k=k, v=normal(*shape, HEADS, D_V), g=gate.log(), beta=beta), normal


def delta(rule, normalize):
    def ours(*, plan, initial=None, **given):
        out, last = rule(**given, plan=plan, normalize=normalize, initial=initial, final=True)
        return {"out": out, "last": last}

    def reference(*, spread, initial=None, q, k, v, g, beta):
        if normalize:
            q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
        out, last = sequential(q / D_K**0.5, k, v, g, beta, spread.begins, initial)
        return {"out": out, "last": last}

    return ours, reference


@pytest.mark.parametrize("rule", [ring_gated_delta_rule, ring_kda])
@pytest.mark.parametrize("seed", range(12))
def test_the_delta_rule_equals_one_process(rule, seed) -> None:
    spread, normalize = Spread.drawn(seed), seed % 3 > 0
    sharded, normal = data(spread, rule is ring_kda, seed)
    if not normalize:
        sharded["k"] = sharded["k"] / 2
    same = {"initial": normal(spread.batch, HEADS, D_K, D_V)} if seed % 2 else {}
    check(spread, sharded, same, *delta(rule, normalize), 1e-10)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_without_final_states(size, layout) -> None:
    spread = Spread(size, 41, 1, layout, [[0, 11, 13, 41]] if size == 3 else None)
    sharded, _ = data(spread, False, 1)

    def ours(*, plan, **given):
        return {"out": ring_gated_delta_rule(**given, plan=plan, normalize=True)[0]}

    def reference(**given):
        return {"out": delta(None, True)[1](**given)["out"]}

    check(spread, sharded, {}, ours, reference, 1e-10)


@pytest.mark.parametrize("seed", range(12))
def test_mamba_2_equals_one_process(seed) -> None:
    spread = Spread.drawn(100 + seed)
    shape = spread.batch, spread.length
    draw = torch.Generator().manual_seed(seed)

    def normal(*more: int) -> torch.Tensor:
        return torch.randn(*more, generator=draw, dtype=torch.float64)

    dt = normal(*shape, HEADS).exp()
    dt[torch.rand(dt.shape, generator=draw) < 0.1] = 0.0
    sharded = dict(
        x=normal(*shape, HEADS, D_V), dt=dt, b=normal(*shape, KEY_HEADS, D_K),
        c=normal(*shape, KEY_HEADS, D_K),
    )  # fmt: skip
    same = dict(a=-normal(HEADS).exp(), skip=normal(HEADS))
    if seed % 2:
        same["initial"] = normal(spread.batch, HEADS, D_V, D_K)

    def ours(*, plan, **given):
        out, last = ring_mamba2(**given, plan=plan, final=True)
        return {"out": out, "last": last}

    def reference(*, spread, x, dt, a, b, c, skip, initial=None):
        state = None if initial is None else initial.mT
        out, last = sequential(c, b, x * dt[..., None], dt * a, None, spread.begins, state)
        return {"out": out + x * skip[:, None], "last": last.mT}

    check(spread, sharded, same, ours, reference, 1e-10)
