"""Dropout: the same probabilities are dropped whatever the ring, in calls, plans and modules."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ring_attention_pytorch import RingAttention, RingPlan, RingTransformer, ring_attn
from ring_attention_pytorch.geometry.layouts import positions
from ring_attention_pytorch.plan import proposal
from ring_attention_pytorch.ranks.ring import Ring
from tests.support import threads
from tests.support.features import LAYOUTS, Problem, drawn, refusal, together
from tests.support.reference import relative_error
from tests.support.threads import ThreadRing

q, k, v = (drawn(2, 6, 4, 8, seed=s) for s in (1, 2, 3))


# --- the same on every ring ---


WAYS = [
    (2, "contiguous", dict(transport="ring")),
    (3, "zigzag", dict(transport="gather", memory=0)),
    (2, "zigzag", dict(ulysses=2)),
    (4, "balanced", dict(transport="gather", ulysses=2)),
]


@pytest.mark.parametrize("names", [("causal", "documents"), ("key mask", "window", "alibi")])
@pytest.mark.parametrize(("size", "layout", "way"), WAYS)
def test_right_over_rings_layouts_and_transports(names, size, layout, way):
    if "ulysses" in way:
        names = tuple(name for name in names if name != "alibi")
    problem = Problem(together((*names, "dropout", "gradient of lse")))
    errors = problem.errors(size, layout, **way)
    assert max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize("transport", ["ring", "gather"])
def test_keys_of_another_sequence_count_over_all_ranks(transport):
    lengths = 3, 0, 8
    keys = [drawn(2, sum(lengths), 4, 8, seed=s) for s in (5, 6)]
    options = dict(dropout=0.4, dropout_seed=2, cross=True)
    want = ring_attn(q, *keys, **options, group=Ring.alone())

    def main(ring: ThreadRing) -> Tensor:
        mine = [t.split(lengths, dim=1)[ring.rank] for t in keys]
        at = positions("zigzag", rank=ring.rank, ring_size=3, length=6)
        got = ring_attn(
            q[:, at], *mine, **options, layout="zigzag", transport=transport, group=ring
        )
        return relative_error(got, want[:, at])

    assert max(threads.run(3, main)[0]) < 1e-12


def test_positions_that_are_given_are_what_draws():
    at, at_keys = torch.tensor([9, 4, 5, -1, 0, 20]), torch.arange(6) * 3
    options = dict(causal=True, dropout=0.4, dropout_seed=2)
    placed = dict(query_positions=at, key_positions=at_keys)
    want = ring_attn(q, k, v, **options, **placed, group=Ring.alone())

    def main(ring: ThreadRing) -> Tensor:
        mine = slice(3 * ring.rank, 3 * ring.rank + 3)
        here = {name: t[mine] for name, t in placed.items()}
        got = ring_attn(*(t[:, mine] for t in (q, k, v)), **options, **here, group=ring)
        return relative_error(got, want[:, mine])

    assert max(threads.run(2, main)[0]) < 1e-12


# --- seeds ---


def test_pytorch_s_seed_decides_and_every_rank_goes_by_the_first():
    def once(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return ring_attn(q, k, v, dropout=0.5)

    assert torch.equal(once(3), once(3))
    assert not torch.equal(once(3), once(4))

    def main(ring: ThreadRing) -> int:
        return RingPlan.make(q, k, v, dropout=0.5, group=ring).terms.dropout.seed

    assert len(set(threads.run(3, main)[0])) == 1


def test_layers_of_a_plan_draw_apart_without_a_message():
    def main(ring: ThreadRing) -> list[Tensor]:
        plan = RingPlan.make(q, k, v, dropout=0.5, dropout_seed=1, group=ring)
        before = ring.hub.gathers[ring.rank]
        layers = [plan.for_layer(i) for i in (0, 1, 0)]
        assert ring.hub.gathers[ring.rank] == before
        found = [ring_attn(q, k, v, plan=each) for each in layers]
        assert layers[0]._shared.tiles is layers[1]._shared.tiles
        return [ring_attn(q, k, v, plan=plan), *found]

    for whole, first, second, again in threads.run(2, main)[0]:
        assert torch.equal(first, again)
        assert not any(torch.equal(a, b) for a, b in ((whole, first), (first, second)))
    plain = RingPlan.make(q, k, v)
    assert plain.for_layer(1) is plain


def grads(module: nn.Module, x: Tensor, again: bool, **call: RingPlan) -> list[Tensor]:
    torch.manual_seed(5)
    out = (
        checkpoint(lambda t: module(t, **call), x, use_reentrant=False)
        if again
        else module(x, **call)
    )
    return [out, *torch.autograd.grad(out.square().sum(), list(module.parameters()))]


def test_what_is_recomputed_drops_the_same():
    attn = RingAttention(12, dim_head=4, heads=2, dropout=0.5)
    x = torch.randn(2, 7, 12, requires_grad=True)
    planned = dict(plan=attn.plan(x).for_layer(3))
    for call in ({}, planned):
        for first, second in zip(grads(attn, x, False, **call), grads(attn, x, True, **call)):
            assert torch.equal(first, second)


# --- the modules ---


IDS = torch.randint(0, 50, (2, 13), generator=torch.Generator().manual_seed(1))


def transformer(rate: float = 0.5, **options: object) -> RingTransformer:
    torch.manual_seed(2)
    return RingTransformer(
        num_tokens=50, dim=16, depth=2, dim_head=4, heads=4, causal=True, attn_dropout=rate,
        **options,
    ).double()  # fmt: skip


def test_modules_drop_in_training_only():
    model, plain = transformer(), transformer(0.0)
    assert not torch.allclose(model(IDS), plain(IDS))
    assert torch.equal(model.eval()(IDS), plain(IDS))


def test_a_layer_may_rest_while_others_drop():
    torch.manual_seed(0)
    model, ids = transformer(), torch.randint(0, 9, (1, 12))
    model.train()
    model.layers[1].eval()
    torch.manual_seed(1)
    once = model(ids)
    torch.manual_seed(2)
    assert not torch.equal(once, model(ids))  # the other one drops
    model.layers[0].eval()
    assert torch.equal(model(ids), model.eval()(ids))


def test_each_layer_of_the_model_draws_by_a_seed_of_its_own(monkeypatch):
    module, seeds = "ring_attention_pytorch.nn.attention.ring_attn", []

    def watched(*args: object, plan: RingPlan, **more: object) -> Tensor:
        seeds.append(plan.terms.dropout.seed)
        return ring_attn(*args, plan=plan, **more)

    monkeypatch.setattr(module, watched)
    transformer()(IDS)
    assert len(set(seeds)) == 2


@pytest.mark.parametrize("layout", LAYOUTS[:3])
def test_the_model_is_the_same_over_a_ring(layout, monkeypatch):
    monkeypatch.setattr(proposal, "own_seed", lambda *_: 11)  # threads share a generator
    whole = transformer()
    want = whole(IDS).detach()

    def main(ring: ThreadRing) -> float:
        model = transformer(ring_attn=True, auto_shard_seq=False, layout=layout, group=ring)
        model.load_state_dict(whole.state_dict())
        at = positions(layout, rank=ring.rank, ring_size=3, length=13)
        return relative_error(model(IDS[:, at]), want[:, at])

    assert max(threads.run(3, main)[0]) < 1e-12


# --- what is refused ---


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(dropout=-0.1), "dropout must be at least 0 and less than 1, got -0.1"),
        (dict(dropout=1), "less than 1, got 1"),
        (dict(dropout=math.nan), "less than 1, got nan"),
        (dict(dropout_seed=3), "dropout_seed needs a dropout above 0"),
        (dict(dropout=0.1, dropout_seed=-1), "less than 2 ** 64, got -1"),
        (dict(dropout=0.1, dropout_seed=2**64), f"less than 2 ** 64, got {2**64}"),
        (dict(dropout=0.1, kernel="sdpa"), "kernel='sdpa' has no dropout"),
        (
            dict(dropout=0.1, query_positions=torch.arange(6), key_positions=torch.arange(6) // 2),
            "positions, so those of queries must all differ",
        ),
    ],
)
def test_what_cannot_be_is_refused(options, words):
    assert words in refusal(lambda: ring_attn(q, k, v, **options))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (lambda r: dict(dropout=0.1 * r), "dropout must be the same on every rank"),
        (lambda r: dict(dropout=0.1, dropout_seed=r), "dropout_seed must be the same on"),
        (lambda r: dict(dropout=-0.1 * r), "less than 1, got -0.1 (on rank 1)"),
        (lambda r: dict(dropout=0.1, cross=True, layout="zigzag"), "layout='zigzag' puts [3, 4]"),
    ],
)
def test_every_rank_is_told(options, words):
    def main(ring: ThreadRing) -> str | None:
        mine = q[:, : 2 if ring.rank else 5]
        return refusal(lambda: ring_attn(mine, k, v, **options(ring.rank), group=ring))

    first, second = threads.run(2, main)[0]
    assert first == second
    assert words in first


def test_a_plan_and_a_module_must_drop_alike():
    x = torch.randn(2, 6, 12)
    attn = RingAttention(12, dim_head=4, heads=2, dropout=0.5)
    plan = attn.plan(x)
    assert attn(x, plan=plan).shape == x.shape
    assert "dropout=0.5, this module wants" in refusal(lambda: attn.eval()(x, plan=plan))
    told = refusal(lambda: ring_attn(q, k, v, plan=RingPlan.make(q, k, v), dropout=0.1))
    assert "the plan already decides dropout" in told
    for options in (dict(dropout=1.5), dict(dropout=0.5, force_regular_attn=True)):
        assert "dropout" in refusal(lambda o=options: RingAttention(12, **o))
