"""A plan's decisions for queries of a shape, and its result against dense attention."""

from math import isclose, log, prod, tanh

import pytest
import torch

from ring_attention_pytorch import RingCache, ring_attn_with_cache
from ring_attention_pytorch.inference.decode_plan import Asked, DecodePlan
from ring_attention_pytorch.inference.partial import Scores
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.schedule import relays
from tests.support import threads
from tests.support.reference import dense_attention, relative_error

RIGHT = Asked((2, 3, 4, 8), True, False, Scores(8**-0.5), False, False, "eager")


def plan_of(**otherwise) -> DecodePlan:
    cache = RingCache(2, 2, 8, value_dim=6, dtype=torch.float64, page=2, group=Ring.alone())
    return DecodePlan(cache.pools, RIGHT._replace(**otherwise))


def test_plans_of_other_calls_have_other_purposes() -> None:
    others = [
        dict(shape=(2, 1, 4, 8)), dict(new=False), dict(starts=True), dict(scores=Scores(0.5)),
        dict(scores=Scores(8**-0.5, window=3)), dict(sinks=True), dict(slopes=True),
        dict(causal=False),
    ]  # fmt: skip
    purposes = {plan_of(**each).purpose for each in ({}, *others)}
    assert len(purposes) == 1 + len(others)
    assert plan_of().purpose in purposes


@pytest.mark.parametrize("clamp", [None, 5.0])
def test_factors_make_scores_in_base_2(clamp: float | None) -> None:
    first, second = plan_of(scores=Scores(0.25, clamp)).factors
    product = 13.0
    score = product * 0.25
    if clamp is None:
        assert second == 0
        assert isclose(product * first, score / log(2))
    else:
        assert isclose(tanh(product * first) * second, clamp * tanh(score / clamp) / log(2))


@pytest.mark.parametrize(("width", "pieces"), [(6, 1), (32, 1), (33, 2)])
def test_rows_are_merged_in_pieces_of_32_columns(width: int, pieces: int) -> None:
    cache = RingCache(2, 2, 8, value_dim=width, group=Ring.alone())
    plan = DecodePlan(cache.pools, RIGHT)
    assert plan.units == prod((2, 3, 4)) * pieces
    assert plan.out_shape == (2, 3, 4, width)


def test_a_plan_attends_to_what_was_kept_and_to_new_tokens() -> None:
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    k, v, sinks = normal(2, 9, 2, 8), normal(2, 9, 2, 6), normal(4)
    q = normal(2, 9, 4, 8)
    cache = RingCache(2, 2, 8, value_dim=6, dtype=torch.float64, page=2, group=Ring.alone())
    cache.append(k[:, :6], v[:, :6])
    cache.prepare(3, 0)
    plan = DecodePlan(cache.pools, RIGHT._replace(sinks=True))
    assert not plan.ran
    out, lse = plan.run(q[:, 6:], k[:, 6:], v[:, 6:], 0, (sinks, None))
    want, of_all = dense_attention(q, k, v, causal=True, sinks=sinks)
    assert plan.ran
    assert plan.capturable
    assert relative_error(out, want[:, 6:]) < 1e-12
    assert relative_error(lse, of_all[..., 6:]) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_takes_nothing_from_what_is_summed_in_float32(dtype: torch.dtype) -> None:
    q, k, v = torch.randn(3, 2, 30, 2, 8).to(dtype)
    found = []
    for autocast in (False, True):
        cache = RingCache(2, 2, 8, dtype=dtype, group=Ring.alone())
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found.append(ring_attn_with_cache(q, k, v, cache, return_lse=True))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("machines", [(0, 0, 1, 1), (0, 1, 1, 2, 0), (0, 0, 0)])
def test_each_machine_sends_its_results_to_others_once_and_no_key(machines, monkeypatch) -> None:
    """With cached keys on all ranks, and with few: the bytes of a step are the same."""
    monkeypatch.setattr(relays, "_EXCHANGE", 0)
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 14, h, 8, generator=draw).double() for h in (4, 2))
    v, sinks = torch.randn(2, 14, 2, 6, generator=draw).double(), torch.randn(4).double()

    def decode(ring: threads.ThreadRing) -> tuple[torch.Tensor, torch.Tensor]:
        cache = RingCache(2, 2, 8, value_dim=6, dtype=torch.float64, page=2, group=ring)
        found = []
        for first, last in ((0, 1), (1, 11), *((i, i + 1) for i in range(11, 14))):
            tokens = (t[:, first:last] for t in (q, k, v))
            found.append(ring_attn_with_cache(*tokens, cache, sinks=sinks, return_lse=True))
        outs, lses = zip(*found)
        return torch.cat(outs, dim=1), torch.cat(lses, dim=2)

    found, hub = threads.run(len(machines), decode, machines)
    want, _ = dense_attention(q, k, v, causal=True, sinks=sinks)
    for out, lse in found:
        assert relative_error(out, want) < 1e-13
        assert torch.equal(out, found[0][0]), "a rank has other bits"
        assert torch.equal(lse, found[0][1])
    token = 2 * 4 * (6 + 1) * 8  # of all sequences and heads: out and lse
    number = len({*machines})
    crossed = sum(n for (a, b), n in hub.ways.items() if machines[a] != machines[b])
    assert crossed == 14 * token * number * (number - 1), "a machine's result crosses once"
