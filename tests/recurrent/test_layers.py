"""Recurrent layers over rings of threads, against the recurrence token by token."""

import pytest
import torch

from ring_attention_pytorch.recurrent import ring_gated_delta_rule, ring_kda
from tests.support import threads
from tests.support.recurrent_cases import (
    D_K,
    D_V,
    HEADS,
    Spread,
    check,
    data,
    delta,
    mamba_2,
)


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
    check(spread, *mamba_2(spread, seed), 1e-10)


@pytest.mark.parametrize("channels", [False, True])
def test_autocast_leaves_states_in_float32(channels) -> None:
    spread = Spread(2, 40, 1, "zigzag", None)
    sharded, _ = data(spread, channels, 0)
    rule = ring_kda if channels else ring_gated_delta_rule

    def main(ring):
        at = spread.held(ring.rank)
        mine = {name: t[:, at].float() for name, t in sharded.items()}
        plan = spread.plan(ring)
        want = rule(**mine, plan=plan, final=True)
        with torch.autocast("cpu", torch.bfloat16):
            found = rule(**mine, plan=plan, final=True)
        assert all(map(torch.equal, found, want))

    threads.run(2, main)
