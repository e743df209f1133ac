"""RingTransformer: logits, losses and all gradients against one process."""

import copy
import pickle
import tempfile
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from ring_attention_pytorch import RingTransformer, shard_sequence
from ring_attention_pytorch.ranks.ring import Ring
from tests.support.module_cases import (
    EXACT,
    Case,
    Errors,
    assert_all_exact,
    before_within_and_after,
    check,
    check_refused,
    gradient_errors,
    made,
    random_mask,
    traffic,
    transformer_cases,
    whole_again,
)
from tests.support.ranks import alone
from tests.support.reference import relative_error

LAYOUTS = ("contiguous", "striped", "zigzag")
SIZES = (pytest.param(2, marks=pytest.mark.thorough), 3, 4)
GOALS = (None, "next", "labels")


def brought(size: int, length: int) -> tuple[tuple[int, int], ...]:
    """Batches of different sizes, one of which has nothing."""
    return tuple(((2, 1, 3, 0)[rank], length) for rank in range(size))


def all_if_two(size: int, cases: list[Case]) -> list[Case]:
    """Every second case over three ranks, the others over four; thorough ones over two are all."""
    return cases if size == 2 else cases[size % 2 :: 2]


# automatic sharding


def auto_cases(size: int) -> list[Case]:
    odd, small = brought(size, 13), dict(ring_seq_size=4)
    cases = [
        Case(dict(small, causal=causal, layout=layout), odd, masked=masked, loss=goal)
        for causal, layout, masked, goal in product((False, True), LAYOUTS, (False, True), GOALS)
        if layout == "contiguous" or masked
    ]
    cases += [
        Case(dict(small, causal=True, max_lookback_seq_len=w, layout=layout), odd, loss=goal)
        for w, (layout, goal) in product((3, (2, None), (5, 1)), zip(LAYOUTS, GOALS))
    ]
    cases += [
        Case(dict(small, causal=True), brought(size, n), masked=True, loss=goal)
        for n, goal in product((1, 2, 3, 8), GOALS)
    ]
    cases += [Case(dict(small, softclamp=0.5, num_grouped_query_heads=4, causal=True), odd)]
    cases += [Case(dict(small, num_grouped_query_heads=1, rotary_embed_theta=100), odd)]
    cases += [Case(dict(small, ignore_index=i, causal=True), odd, loss="next") for i in (-100, 3)]
    cases += [Case(dict(small, ignore_index=3, causal=True), odd, masked=True, loss="labels")]
    return cases


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_brings_its_batch_and_all_is_as_in_one_process(
    pools: Callable, size: int
) -> None:
    cases = all_if_two(size, auto_cases(size))
    for part in range(3):
        check(pools(size), transformer_cases, cases[part::3])


def test_rings_may_be_smaller_than_the_world_and_the_loss_is_everyones(pools: Callable) -> None:
    cases = [
        Case(
            dict(causal=True, layout=layout, ring_seq_size=s), brought(4, 13), masked=True,
            loss=goal,
        )
        for s, layout, goal in product((7, 50), LAYOUTS, GOALS)
    ]  # fmt: skip
    lengths = ((2, 9), (1, 9), (1, 13), (2, 13))
    cases += [Case(dict(causal=True, ring_seq_size=7), lengths, loss=goal) for goal in GOALS]
    cases += [
        Case(dict(causal=True), brought(4, 13), loss=goal, call={"ring_size": r})
        for r, goal in product((1, 2, 4), GOALS)
    ]
    check(pools(4), transformer_cases, cases)


# sharded by hand


def hand_cases(size: int) -> list[Case]:
    cases = [
        Case(dict(causal=True, layout=layout), ((3, 13),), True, masked=masked, loss=goal)
        for layout, masked, goal in product(LAYOUTS, (False, True), GOALS)
    ]
    cases += [
        Case(
            dict(causal=False, layout=layout),
            ((3, 13),),
            True,
            masked=layout == "zigzag",
            loss=goal,
        )
        for layout, goal in product(LAYOUTS, GOALS)
    ]
    cases += [
        Case(dict(causal=True, layout=layout, max_lookback_seq_len=(3, 1)), ((2, n),), True, loss=g)
        for layout, n, g in product(LAYOUTS, (2, 17), (None, "next"))
    ]
    cases += [Case(dict(causal=True, layout=x), ((1, 1),), True, loss="next") for x in LAYOUTS]
    cases += [Case(dict(causal=True, striped_ring_attn=True), ((2, 9),), True, loss="next")]
    return cases


@pytest.mark.parametrize("size", SIZES)
def test_sharded_by_hand_the_next_token_is_found_wherever_it_lives(
    pools: Callable, size: int
) -> None:
    cases = all_if_two(size, hand_cases(size))
    for half in (cases[::2], cases[1::2]):
        check(pools(size), transformer_cases, half)


def test_by_hand_too_several_rings_have_one_loss(pools: Callable) -> None:
    cases = [
        Case(
            dict(causal=True, layout=layout), ((2, 13), (1, 6)), by_hand=True, masked=masked,
            loss=goal, call={"ring_size": 2},
        )
        for layout, masked, goal in product(LAYOUTS, (False, True), GOALS)
    ]  # fmt: skip
    check(pools(4), transformer_cases, cases)


def nothing_but_padding(kind: str) -> dict[str, Any]:
    """The loss and gradients where the last shard, or everything, is padding."""
    everything, layout = kind.split()
    x = torch.randint(0, 11, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(2, 12, dtype=torch.bool)
    if everything == "some":
        mask[:, :5] = True
    options = dict(causal=True, ring_attn=True, auto_shard_seq=False, layout=layout)
    module = made(RingTransformer, options)
    loss = module(
        shard_sequence(x, layout=layout), shard_sequence(mask, layout=layout), return_loss=True
    )
    loss.backward()
    grads = [p.grad for p in module.parameters()]
    whole = made(RingTransformer, dict(causal=True, force_regular_attn=True))
    want = whole(x, mask, return_loss=True)
    return {
        "loss": loss.item(),
        "want": want.item(),
        "finite": all(bool(g.isfinite().all()) for g in grads if g is not None),
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_of_nothing_but_padding_are_no_nan(pools: Callable, layout: str) -> None:
    for found in pools(3).run(nothing_but_padding, f"some {layout}"):
        assert found["finite"]
        assert found["loss"] == pytest.approx(found["want"], rel=1e-12)
        assert found["loss"] > 0
    for found in pools(3).run(nothing_but_padding, f"no {layout}"):
        assert found == {"loss": 0.0, "want": 0.0, "finite": True}


# one process


def plain(**options: Any) -> Any:
    return made(RingTransformer, dict(options))


def ids(*shape: int) -> Tensor:
    return torch.randint(0, 11, shape)


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, (3, None))])
@pytest.mark.parametrize("softclamp", [None, 0.5])
def test_without_a_group_all_ways_are_one(
    causal: bool, window: Any, softclamp: float | None
) -> None:
    shared = dict(causal=causal, max_lookback_seq_len=window, softclamp=softclamp)
    x, labels = ids(3, 9), ids(3, 9)
    mask = random_mask((3, 9), torch.Generator().manual_seed(0))
    calls = [{}, {"mask": mask}, {"labels": labels}, {"return_loss": True}]
    calls += [{"mask": mask, "labels": labels}, {"mask": mask, "return_loss": True}]
    ways = [{}, {"ring_attn": True}, {"ring_attn": True, "auto_shard_seq": False}]
    ways += [{"ring_attn": True, "layout": layout} for layout in LAYOUTS]
    for call in calls:
        whole = plain(**shared, force_regular_attn=True)
        want = whole(x, **call)
        want.square().sum().backward()
        for way in ways:
            module = plain(**shared, **way)
            got = module(x, **call)
            got.square().sum().backward()
            assert relative_error(got, want) < EXACT
            assert_all_exact(gradient_errors(module, whole))


def test_the_loss_is_the_mean_over_real_tokens() -> None:
    model, x, mask = plain(causal=True), ids(3, 9), torch.rand(3, 9) < 0.7
    logits = model(x[:, :-1], mask[:, :-1])
    real = mask[:, 1:]
    want = F.cross_entropy(logits[real], x[:, 1:][real])
    assert relative_error(model(x, mask, return_loss=True), want) < EXACT
    labels = ids(3, 9).masked_fill(torch.rand(3, 9) < 0.3, -1)
    real = mask & (labels != -1)
    want = F.cross_entropy(model(x, mask)[real], labels[real])
    before = labels.clone()
    assert relative_error(model(x, mask, labels=labels), want) < EXACT
    assert torch.equal(labels, before)
    assert relative_error(model(x, mask, labels=labels, return_loss=True), want) < EXACT


def test_ids_may_be_int32() -> None:
    model, x = plain(causal=True), ids(2, 9)
    assert torch.equal(model(x.int()), model(x))
    assert torch.equal(model(x.int(), return_loss=True), model(x, return_loss=True))


def test_a_causal_model_sees_no_later_token_and_a_window_no_earlier_one() -> None:
    x = ids(1, 12)
    other = x.clone()
    other[:, 6] = (x[:, 6] + 1) % 11
    changed = (plain(causal=True)(x) != plain(causal=True)(other)).any(-1)[0].tolist()
    assert changed == [False] * 6 + [True] * 6
    windowed = plain(causal=True, max_lookback_seq_len=2)
    changed = (windowed(x) != windowed(other)).any(-1)[0].tolist()
    assert changed == [False] * 6 + [True] * 5 + [False]  # two blocks of two tokens each


def test_the_keys_of_a_checkpoint_are_the_original_ones() -> None:
    model = plain(causal=True)
    ours = {
        "token_emb.weight": [11, 12],
        "rotary_emb.inv_freq": [2],
        "to_logits.0.gamma": [12],
        "to_logits.1.weight": [11, 12],
    }
    for i in range(2):
        ours |= {
            f"layers.{i}.0.to_qkv.0.gamma": [12],
            f"layers.{i}.0.to_qkv.1.weight": [32, 12],
            f"layers.{i}.0.to_out.weight": [12, 16],
            f"layers.{i}.1.0.gamma": [12],
            f"layers.{i}.1.1.weight": [24, 12],
            f"layers.{i}.1.1.bias": [24],
            f"layers.{i}.1.3.weight": [12, 24],
            f"layers.{i}.1.3.bias": [12],
        }
    assert {k: list(v.shape) for k, v in model.state_dict().items()} == ours
    assert set(plain(causal=True, ring_attn=True, layout="striped").state_dict()) == set(ours)


def test_blocks_are_prenorm_attention_and_gelu_feedforward_with_residuals() -> None:
    model, x = plain(causal=True, force_regular_attn=True), ids(2, 9)
    tokens, angles = model.token_emb(x), model.rotary_emb(9)
    for attn, ff in model.layers:
        tokens = tokens + attn(tokens, rotary_emb=angles)
        norm, up, _, down = ff
        length = tokens.norm(dim=-1, keepdim=True)
        tokens = tokens + down(F.gelu(up(tokens / length * 12**0.5 * norm.gamma)))
    normed = tokens / tokens.norm(dim=-1, keepdim=True) * 12**0.5 * model.to_logits[0].gamma
    assert relative_error(model(x), normed @ model.to_logits[1].weight.T) < EXACT


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_lookback_seq_len": (1, 2, 3)}, "one for each of 2 blocks, got 3"),
        ({"max_lookback_seq_len": (1, -2)}, "at least 0, got -2"),
        ({"use_cuda_kernel": True, "kernel": "sdpa"}, "leave one out"),
        ({"num_grouped_query_heads": 3}, "must divide heads=4"),
        ({"auto_shard_seq": True}, "auto_shard_seq needs ring_attn=True"),
        ({"layout": "zigzag"}, "a layout needs ring_attn=True"),
        ({"striped_ring_attn": True}, "a layout needs ring_attn=True"),
        ({"ring_attn": True, "ring_seq_size": 0}, "ring_seq_size must be at least 1"),
        (
            {"ring_attn": True, "striped_ring_attn": True, "layout": "contiguous"},
            "striped_ring_attn=True is layout='striped'",
        ),
        ({"force_regular_attn": True, "kernel": "sdpa"}, "force_regular_attn uses no kernel"),
        ({"softclamp": -1.0}, "softclamp must be None or positive"),
        ({"dim_head": 3}, "an even dim, got 3"),
    ],
)
def test_a_model_that_cannot_be_is_refused_when_it_is_made(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        plain(**options)


@pytest.mark.parametrize(
    ("options", "call", "words"),
    [
        ({}, {"x": torch.zeros(2, 5)}, "x must be int64 or int32 ids"),
        ({}, {"x": torch.zeros(5, dtype=torch.long)}, "x must be int64 or int32 ids"),
        ({}, {"mask": torch.ones(2, 4, dtype=torch.bool)}, "mask must be bool [2, 5]"),
        ({}, {"mask": torch.ones(2, 5)}, "mask must be bool [2, 5]"),
        ({}, {"labels": torch.zeros(2, 4, dtype=torch.long)}, "labels must be int64 [2, 5]"),
        ({}, {"labels": torch.zeros(2, 5)}, "labels must be int64 [2, 5]"),
        ({}, {"ring_size": 1}, "while the ring is off"),
        (
            {"ring_attn": True},
            {"ring_size": 1, "force_ring_reduce_off": True},
            "while the ring is off",
        ),
        ({"kernel": "sdpa", "softclamp": 1.0}, {}, "has no softclamp"),
        ({"kernel": "none such"}, {}, "kernel must be None or one of"),
    ],
)
def test_a_call_that_cannot_be_is_refused(
    options: dict[str, Any], call: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the words are checked below
        plain(**options)(**{"x": ids(2, 5)} | call)
    assert words in str(error.value)


def test_a_model_can_be_copied_and_pickled() -> None:
    model, x = plain(causal=True, ring_attn=True), ids(2, 9)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), model(x))


# refused alike on every rank


def misuse(name: str) -> None:
    odd_one, size = dist.get_rank() == 1, dist.get_world_size()
    kind, _, what = name.partition(": ")
    auto = kind == "auto"
    options = dict(causal=True, ring_attn=True, auto_shard_seq=auto, ring_seq_size=1)
    if what == "windows differ":
        options["max_lookback_seq_len"] = 2 if odd_one else 3
    options["rotary_restart"] = what == "restarts on one rank" and odd_one
    model = made(RingTransformer, options)
    x = torch.zeros((2, 8 if auto else 8 // size), dtype=torch.long)
    mask, longer = torch.ones_like(x, dtype=torch.bool), torch.cat((x, x[:, :1]), dim=1)
    wrong_x = {"ids of another kind": x.int(), "no ids": x.double(), "no batch": x[0]}
    wrong_x |= {"lengths differ": longer, "batches differ": x[:1]}
    call: dict[str, Any] = {
        "mask on one rank": {"mask": mask} if odd_one else {},
        "mask too long on one rank": {"mask": longer.bool() if odd_one else mask},
        "mask of fewer samples": {"mask": mask[:1] if odd_one else mask},
        "labels on one rank": {"labels": x} if odd_one else {},
        "labels of another length": {"labels": longer if odd_one else x},
        "loss on one rank": {"return_loss": odd_one},
        "batches differ": {"return_loss": True},
        "ring size": {"ring_size": size + 1},
    }.get(what, {})
    model(wrong_x.get(what, x) if odd_one else x, **call)


REFUSED = {
    "auto: mask on one rank": "mask must be the same on every rank",
    "auto: mask too long on one rank": "mask must be bool [2, 8]",
    "auto: mask of fewer samples": "mask must be bool [2, 8]",
    "auto: labels on one rank": "labels must be the same on every rank",
    "auto: labels of another length": "labels must be int64 [2, 8]",
    "auto: loss on one rank": "return_loss must be the same on every rank",
    "auto: ids of another kind": "dtype must be the same on every rank",
    "auto: no ids": "x must be int64 or int32 ids",
    "auto: no batch": "x must be int64 or int32 ids",
    "auto: lengths differ": "ranks of one ring must bring equal lengths",
    "auto: windows differ": "window must be the same on every rank",
    "auto: ring size": "ring_size must divide the group's",
    "hand: restarts on one rank": "rotary_restart must be the same on every rank",
    "hand: mask on one rank": "mask must be the same on every rank",
    "hand: mask too long on one rank": "mask must be bool [2,",
    "hand: labels on one rank": "labels must be the same on every rank",
    "hand: labels of another length": "labels must be int64 [2,",
    "hand: loss on one rank": "return_loss must be the same on every rank",
    "hand: no ids": "x must be int64 or int32 ids",
    "hand: no batch": "x must be int64 or int32 ids",
    "hand: batches differ": "batch must be the same on every rank",
    "hand: lengths differ": "layout='contiguous' puts",
    "hand: windows differ": "window must be the same on every rank",
    "hand: ring size": "ring_size must divide the group's",
}


@pytest.mark.parametrize("size", [2, 4])
def test_what_cannot_be_is_refused_in_the_same_words_on_all_ranks(
    pools: Callable, size: int
) -> None:
    check_refused(pools(size), misuse, REFUSED)


IDS = torch.zeros(1, 4, dtype=torch.long)
WITH_PLANS: dict[str, tuple[dict[str, Any], str]] = {
    "an id": (dict(x=IDS + 99), "ids must be 0 to"),
    "a label": (dict(labels=IDS + 99), "labels must be 0 to"),
    "a mask": (dict(mask=IDS.bool()), "beside plans only labels are taken"),
    "a plan too few": (dict(plans=1), "plans must be one for each of 2 blocks, got 1"),
    "no tensor": (dict(x="ids"), "violates type hint"),
    "another name": (dict(masks=None), "unexpected keyword argument 'masks'"),
}


@pytest.mark.parametrize("layers", ["a", "ra"])
@pytest.mark.parametrize("name", WITH_PLANS)
def test_ranks_that_wait_with_plans_hear_of_an_error(
    name: str, layers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With plans ranks don't agree, so the failure is reported."""
    told: list[str] = []
    monkeypatch.setattr(Ring, "report_failure", lambda ring, error: told.append(str(error)))
    model = made(RingTransformer, dict(causal=True, layers=layers))
    plans = model.plans(IDS)
    wrong, words = WITH_PLANS[name]
    call = {"x": IDS, **wrong, "plans": plans[: wrong.get("plans")]}
    with pytest.raises(ValueError, match=words):
        model(**call)
    assert any(words in text for text in told), told


def test_tensors_without_values_give_shapes_and_leave_no_trace() -> None:
    ids, mask = torch.randint(0, 11, (2, 6)), torch.rand(2, 6) < 0.7
    sizes: dict[str, Any] = dict(num_tokens=11, dim=12, depth=2, dim_head=4, heads=4)
    for options in (dict(causal=True), dict(force_regular_attn=True), dict(rotary_restart=True)):
        with FakeTensorMode():
            fake = torch.zeros(2, 6, dtype=torch.long)
            loss = RingTransformer(**sizes, **options)(fake, fake.bool(), return_loss=True)
            loss.backward()
            assert isinstance(loss, FakeTensor)
        model = RingTransformer(**sizes, **options)
        whole = RingTransformer(**sizes, **options | {"force_regular_attn": True})
        whole.load_state_dict(model.state_dict())
        assert relative_error(model(ids, mask), whole(ids, mask)) < 1e-5


# what travels


def travelled(length: int, ring_size: int) -> dict[str, Any]:
    model = made(RingTransformer, dict(causal=True, ring_attn=True, max_lookback_seq_len=(None, 1)))
    x = torch.zeros((3, length), dtype=torch.long)
    with traffic() as seen:
        logits = model(x, ring_size=ring_size)
    with traffic() as of_loss:
        model(x, return_loss=True, ring_size=ring_size)
    return {
        "logits": seen.floats_received(),
        "ids": sum(s.numel() for s, dtype in seen.received if dtype == torch.int64),
        "loss": of_loss.floats_received(),
        "notes": max(seen.gathered),
        "times": len(seen.gathered),
        "home": logits.shape,
    }


@pytest.mark.parametrize("ring_size", [2, 4])
def test_ids_travel_not_embeddings_and_logits_go_only_home(pools: Callable, ring_size: int) -> None:
    n, b, classes, keys = 16, 3, 11, 2 * 4
    held, others = n // ring_size, ring_size - 1
    for found in pools(4).run(travelled, n, ring_size):
        whole_ring = 2 * ring_size * b * held * keys  # keys and values of one rank's tokens
        # zigzag's window of one token is at most two distances from home, and one by a ring of 2
        of_keys = [(others + hops) * whole_ring for hops in {2: (1,), 4: (2,)}[ring_size]]
        home = others * b * held * classes
        assert [sum(found["logits"]) - home] == of_keys
        assert max(found["logits"]) <= ring_size * b * held * max(classes, 2 * keys)
        assert found["ids"] == others * b * held
        assert len(found["loss"]) == others + {2: 1, 4: 2}[ring_size]
        assert found["notes"] <= 4096
        # of the batch, and for each kind of block one, and one more for the other ring to know
        assert found["times"] == {2: 5, 4: 3}[ring_size]
        assert found["home"] == (b, n, classes)


# checkpoints and other rings


def saved_and_logits(layout: str) -> tuple[dict[str, Tensor], Tensor]:
    model = made(RingTransformer, dict(causal=True, ring_attn=True, layout=layout, ring_seq_size=3))
    x = torch.randint(0, 11, (2, 11), generator=torch.Generator().manual_seed(5))
    return model.state_dict(), model(x).detach()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_of_four_ranks_gives_the_same_logits_on_one(
    pools: Callable, layout: str
) -> None:
    x = torch.randint(0, 11, (2, 11), generator=torch.Generator().manual_seed(5))
    for state, logits in pools(4).run(saved_and_logits, layout):
        one = RingTransformer(
            num_tokens=11, dim=12, depth=2, ff_mult=2, dim_head=4, heads=4,
            num_grouped_query_heads=2, causal=True,
        ).double()  # fmt: skip
        one.load_state_dict(state)
        assert relative_error(one(x), logits) < EXACT


def off_the_ring(cases: list[tuple[str, str]]) -> list[Errors]:
    """Everyone's own whole sequence, of lengths that no ring could share."""
    found, rank = [], dist.get_rank()
    for kind, layout in cases:
        shared = dict(causal=True, max_lookback_seq_len=(4, None), softclamp=0.7)
        ring = dict(ring_attn=True, auto_shard_seq="auto" in kind, layout=layout)
        module = plain(**shared, **ring, force_regular_attn="regular" in kind)
        whole = plain(**shared, force_regular_attn=True)
        x = torch.randint(0, 11, (2, 5 + 3 * rank))
        call = {"force_ring_reduce_off": True} if "off" in kind else {}
        errors = {}
        with traffic() as seen:
            for given in ({}, {"return_loss": True}, {"labels": x}):
                got, want = module(x, **given, **call), whole(x, **given)
                errors[f"out {list(given)}"] = relative_error(got, want)
                got.sum().backward()
                want.sum().backward()
        assert (seen.sent, seen.gathered) == ([], [])
        found.append(errors | gradient_errors(module, whole, ranks="own"))
    return found


def test_off_the_ring_every_rank_works_alone_on_its_whole_sequence(pools: Callable) -> None:
    kinds = ("hand off", "auto off", "hand regular", "auto regular")
    check(pools(3), off_the_ring, list(product(kinds, LAYOUTS)))


def in_groups(kind: str) -> Errors:
    """A ring over a part of the world, the rest being other rings: pairs 0 2 and 1 3."""
    rank = dist.get_rank()
    if kind == "mesh":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "dp"))
        group: Any = mesh["cp"]
    else:
        group = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    place, pair = rank // 2, rank % 2
    options = dict(causal=True, ring_attn=True, group=group, ring_seq_size=4)
    draw = torch.Generator().manual_seed(pair)
    x = torch.randint(0, 11, (3, 7 + pair), generator=draw)
    mine = x[:1] if place == 0 else x[1:]
    whole = plain(causal=True, force_regular_attn=True)
    auto, hand = plain(**options), plain(**options, auto_shard_seq=False, layout="striped")
    want, loss = whole(x), whole(x, return_loss=True)
    shards = shard_sequence(x, layout="striped", group=group)
    return {
        "auto": relative_error(auto(mine), want[:1] if place == 0 else want[1:]),
        "auto loss": relative_error(auto(mine, return_loss=True), loss),
        "hand": relative_error(whole_again(hand, x, "striped", group), want),
        "hand loss": relative_error(hand(shards, return_loss=True), loss),
    }


@pytest.mark.parametrize("kind", ["mesh", "groups"])
def test_a_ring_may_be_any_group_of_processes(pools: Callable, kind: str) -> None:
    for errors in pools(4).run(in_groups, kind):
        assert_all_exact(errors)


def test_groups_may_come_and_go_while_a_model_lives() -> None:
    with tempfile.TemporaryDirectory() as folder:
        alone(before_within_and_after, 2, 2, folder)


# together with the rest of PyTorch


def checkpointed(by_hand: bool) -> list[Errors]:
    found = []
    size = dist.get_world_size()
    x = torch.randint(0, 11, (2, 12), generator=torch.Generator().manual_seed(0))
    for impl in (CheckpointImpl.REENTRANT, CheckpointImpl.NO_REENTRANT):
        options = dict(causal=True, ring_attn=True, auto_shard_seq=not by_hand, layout="zigzag")
        module, whole = plain(**options), plain(causal=True, force_regular_attn=True)
        for block in module.layers:
            for i in range(len(block)):
                block[i] = checkpoint_wrapper(block[i], impl)
        mine = shard_sequence(x, layout="zigzag") if by_hand else x
        call = {} if by_hand else {"ring_size": size}
        with traffic() as seen:
            got = module(mine, return_loss=True, **call)
            forward = len(seen.received)
            got.backward()
        want = whole(x, return_loss=True)
        want.backward()
        assert len(seen.received) > 2 * forward, "nothing was recomputed"
        errors = gradient_errors(module, whole, ranks="mean")
        found.append({"loss": relative_error(got, want)} | errors)
    return found


@pytest.mark.parametrize("by_hand", [False, True])
def test_activations_of_blocks_may_be_recomputed(pools: Callable, by_hand: bool) -> None:
    for found in pools(4).run(checkpointed, by_hand):
        for errors in found:
            assert_all_exact(errors)


def under_ddp(kinds: list[str]) -> list[Errors]:
    found, rank, size = [], dist.get_rank(), dist.get_world_size()
    xs = torch.randint(0, 11, (2 * size, 13), generator=torch.Generator().manual_seed(0))
    for kind in kinds:
        auto = "auto" in kind
        module = plain(causal=True, ring_attn=True, auto_shard_seq=auto, ring_seq_size=4)
        whole = plain(causal=True, force_regular_attn=True)
        mine = xs[2 * rank : 2 * rank + 2] if auto else shard_sequence(xs)
        wrapped = DistributedDataParallel(module)
        got = want = torch.zeros(())
        for _ in range(2):  # gradients add up
            if "loss" in kind:
                got, want = wrapped(mine, return_loss=True), whole(xs, return_loss=True)
            else:
                got, want = wrapped(mine).square().mean(), whole(xs).square().mean()
            got.backward()
            want.backward()
        errors = gradient_errors(module, whole, ranks="own")
        found.append(errors | ({"loss": relative_error(got, want)} if "loss" in kind else {}))
    return found


def test_under_ddp_gradients_are_those_of_one_process(pools: Callable) -> None:
    for found in pools(4).run(under_ddp, ["auto", "auto loss", "hand loss"]):
        for errors in found:
            assert_all_exact(errors)


def trained(steps: int) -> tuple[list[float], list[float]]:
    """Losses of some steps of AdamW, over the ring and in one process."""
    rank, size = dist.get_rank(), dist.get_world_size()
    xs = torch.randint(0, 11, (size, 13), generator=torch.Generator().manual_seed(0))
    module = plain(causal=True, ring_attn=True, ring_seq_size=4)
    models: list[tuple[nn.Module, Tensor]] = [
        (DistributedDataParallel(module), xs[rank : rank + 1]),
        (plain(causal=True, force_regular_attn=True), xs),
    ]
    histories = []
    for model, x in models:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        histories.append([])
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(x, return_loss=True)
            loss.backward()
            optimizer.step()
            histories[-1].append(loss.item())
    return histories[0], histories[1]


def test_training_over_a_ring_is_training_in_one_process(pools: Callable) -> None:
    for ring, one in pools(4).run(trained, 8):
        assert ring == pytest.approx(one, rel=1e-8)
        assert one[-1] < one[0] - 0.1


def autocast_errors(layouts: list[str]) -> list[dict[str, tuple[float, float]]]:
    """The ring's and one process' bfloat16 errors against float32."""
    found, size = [], dist.get_world_size()
    x = torch.randint(0, 11, (2, 64), generator=torch.Generator().manual_seed(0))
    for layout in layouts:
        whole, plainly = (plain(causal=True).float() for _ in range(2))
        module = plain(causal=True, ring_attn=True, auto_shard_seq=False, layout=layout).float()
        exact = whole(x, return_loss=True)
        exact.backward()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            one = plainly(x, return_loss=True)
            got = module(shard_sequence(x, layout=layout), return_loss=True)
        one.backward()
        got.backward()
        assert got.dtype == torch.float32
        ring = gradient_errors(module, whole, ranks="mean")
        alone = gradient_errors(plainly, whole, ranks="own")
        assert size > 1
        found.append({name: (ring[name], alone[name]) for name in ring})
    return found


def test_under_autocast_a_ring_is_as_exact_as_one_process(pools: Callable) -> None:
    for found in pools(4).run(autocast_errors, list(LAYOUTS)):
        for errors in found:
            assert all(0 < ring <= 3 * one for ring, one in errors.values()), errors


def two_at_once() -> list[Errors]:
    x = torch.randint(0, 11, (3, 12), generator=torch.Generator().manual_seed(0))
    rank = dist.get_rank()
    shared = [dict(causal=True), dict(max_lookback_seq_len=(2, None))]
    rings = [dict(layout="zigzag", ring_seq_size=4), dict(layout="striped", auto_shard_seq=False)]
    modules = [plain(**s, **r, ring_attn=True) for s, r in zip(shared, rings)]
    wholes = [plain(**s, force_regular_attn=True) for s in shared]
    inputs = [x[rank : rank + 1], shard_sequence(x, layout="striped")]
    losses = [m(i, return_loss=True) for m, i in zip(modules, inputs)]
    want = [whole(x, return_loss=True) for whole in wholes]
    for i in (0, 1):
        losses[i].backward()
        want[i].backward()
    return [
        {"loss": relative_error(a, b)} | gradient_errors(m, w, ranks="mean")
        for a, b, m, w in zip(losses, want, modules, wholes)
    ]


def test_two_models_do_not_get_in_each_others_way(pools: Callable) -> None:
    for found in pools(3).run(two_at_once):
        for errors in found:
            assert_all_exact(errors)
