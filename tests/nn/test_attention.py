"""RingAttention against one process."""

import copy
import pickle
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ring_attention_pytorch import RingAttention, RingPlan, shard_sequence
from ring_attention_pytorch.ranks.ring import Ring
from tests.support import threads
from tests.support.module_cases import (
    EXACT,
    Case,
    Errors,
    assert_all_exact,
    attention_cases,
    check,
    check_refused,
    gradient_errors,
    made,
    traffic,
    whole_again,
)
from tests.support.reference import dense_attention, relative_error

LAYOUTS = ("contiguous", "striped", "zigzag")
SIZES = (2, 3, 4)


def brought(size: int, length: int) -> tuple[tuple[int, int], ...]:
    """Batches of different sizes, one of which has nothing."""
    return tuple(((2, 1, 3, 0)[rank], length) for rank in range(size))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("softclamp", [None, 0.5])
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 2), (False, 2)])
def test_the_regular_module_and_the_kernels_are_one_without_a_group(
    causal: bool, window: int | None, rotary: bool, softclamp: float | None, masked: bool
) -> None:
    options = dict(
        causal=causal, max_lookback_seq_len=window, softclamp=softclamp, rotary_embed=rotary
    )
    regular = made(RingAttention, dict(options, force_regular_attn=True))
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    mask = torch.rand(2, 9) < 0.6 if masked else None
    cotangent = torch.randn_like(x)
    want = regular(x, mask)
    want.backward(cotangent)
    for ring in ({}, {"ring_attn": True}, {"ring_attn": True, "auto_shard_seq": True}):
        module = made(RingAttention, dict(options, **ring))
        got = module(x, mask)
        got.backward(cotangent)
        assert relative_error(got, want) < EXACT
        assert_all_exact(gradient_errors(module, regular))


def projected(module: Any, x: Tensor, context: Tensor) -> list[Tensor]:
    """q of x, k and v of the context, by the definition: `[b, n, h, 4]`."""
    weights = module.to_qkv[1].weight.split((16, 8, 8))
    normed = [t / t.norm(dim=-1, keepdim=True) * 12**0.5 for t in (x, context, context)]
    parts = [t * module.to_qkv[0].gamma @ w.T for t, w in zip(normed, weights)]
    return [t.unflatten(-1, (-1, 4)) for t in parts]


def test_the_regular_module_is_attention_by_the_definition() -> None:
    options = dict(causal=True, max_lookback_seq_len=3, softclamp=0.8, force_regular_attn=True)
    module = made(RingAttention, options)
    x, mask = torch.randn(2, 9, 12, dtype=torch.float64), torch.rand(2, 9) < 0.7
    oracle = dict(causal=True, window=3, key_mask=mask, softclamp=0.8)
    out, _ = dense_attention(*projected(module, x, x), **oracle)
    assert relative_error(module(x, mask), out.flatten(-2) @ module.to_out.weight.T) < EXACT


@pytest.mark.parametrize("regular", [False, True])
def test_a_context_is_normed_and_projected_as_the_tokens_are(regular: bool) -> None:
    module = made(RingAttention, {"softclamp": 0.8, "force_regular_attn": regular})
    x, context = (torch.randn(2, n, 12, dtype=torch.float64) for n in (9, 5))
    mask = torch.rand(2, 5) < 0.7
    out, _ = dense_attention(*projected(module, x, context), key_mask=mask, softclamp=0.8)
    got = module(x, context=context, context_mask=mask)
    assert relative_error(got, out.flatten(-2) @ module.to_out.weight.T) < EXACT


@pytest.mark.parametrize("own", [False, True])
def test_queries_and_keys_are_turned_by_their_positions_and_values_are_not(own: bool) -> None:
    module = made(RingAttention, {"rotary_embed": True, "rotary_embed_theta": 100} if own else {})
    x, frequencies = torch.randn(2, 9, 12, dtype=torch.float64), torch.tensor([1.0, 0.1])
    angles = torch.outer(torch.arange(9.0), frequencies)
    turns = torch.polar(torch.ones(9, 1, 2).double(), angles[:, None].double())
    q, k, v = projected(module, x, x)
    turned = [torch.complex(t[..., :2], t[..., 2:]) * turns for t in (q, k)]
    out, _ = dense_attention(*(torch.cat((t.real, t.imag), dim=-1) for t in turned), v)
    got = module(x, **({} if own else {"rotary_emb": angles.double().repeat(1, 2)}))
    # the module's own angles are float32, as good as 9 radians can be there
    limit = 1e-6 if own else EXACT
    assert relative_error(got, out.flatten(-2) @ module.to_out.weight.T) < limit


def test_prenorm_is_a_norm_before_the_projection_and_nothing_else() -> None:
    with_norm = made(RingAttention, {})
    without = made(RingAttention, {"prenorm": False})
    without.load_state_dict({k: v for k, v in with_norm.state_dict().items() if "gamma" not in k})
    x = torch.randn(1, 5, 12, dtype=torch.float64)
    assert relative_error(with_norm(x), without(with_norm.to_qkv[0](x))) < EXACT
    assert relative_error(with_norm(x), without(x)) > 0.01


def test_the_keys_of_a_checkpoint_are_the_original_ones() -> None:
    ours = {"to_qkv.0.gamma": [12], "to_qkv.1.weight": [32, 12], "to_out.weight": [12, 16]}
    found = {k: list(v.shape) for k, v in made(RingAttention, {}).state_dict().items()}
    assert found == ours
    rotary = made(RingAttention, {"rotary_embed": True})
    assert set(rotary.state_dict()) == {*ours, "rotary_embed.inv_freq"}
    spread = made(RingAttention, {"ring_attn": True, "auto_shard_seq": True, "causal": True})
    assert set(spread.state_dict()) == set(ours)


def test_theta_changes_the_angles_and_only_with_them() -> None:
    x = torch.randn(1, 9, 12, dtype=torch.float64)
    ten, hundred = (
        made(RingAttention, {"rotary_embed": True, "rotary_embed_theta": t}) for t in (10, 100.0)
    )
    assert ten.rotary_embed.inv_freq.tolist() == pytest.approx([1.0, 10**-0.5])
    assert relative_error(ten(x), hundred(x)) > 1e-6


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"eps": 1e-6}, "eps has no effect"),
        ({"use_cuda_kernel": True, "kernel": "eager"}, "leave one out"),
        ({"num_grouped_query_heads": 3}, "must divide heads=4"),
        ({"num_grouped_query_heads": 0}, "must divide heads=4"),
        ({"max_lookback_seq_len": -1}, "at least 0, got -1"),
        ({"softclamp": 0.0}, "softclamp must be None or positive"),
        ({"force_regular_attn": True, "kernel": "eager"}, "force_regular_attn uses no kernel"),
        ({"auto_shard_seq": True}, "auto_shard_seq needs ring_attn=True"),
        ({"layout": "zigzag"}, "a layout needs ring_attn=True"),
        ({"striped_ring_attn": True}, "a layout needs ring_attn=True"),
        ({"group": Ring.alone()}, "a group needs ring_attn=True"),
        ({"ring_attn": True, "ring_seq_size": 0}, "ring_seq_size must be at least 1"),
        ({"ring_attn": True, "layout": "spiral"}, "layout must be one of 'contiguous'"),
        (
            {"ring_attn": True, "striped_ring_attn": True, "layout": "zigzag"},
            "striped_ring_attn=True is layout='striped'",
        ),
        ({"rotary_embed": True, "dim_head": 5}, "an even dim, got 5"),
    ],
)
def test_a_module_that_cannot_be_is_refused_when_it_is_made(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        made(RingAttention, options)


@pytest.mark.parametrize("value", [None, False])
def test_without_a_cuda_kernel_is_what_there_is(value: bool | None) -> None:
    assert made(RingAttention, {"use_cuda_kernel": value}).kernel is None


def test_a_cuda_kernel_is_ours_and_wants_a_cuda_device() -> None:
    attn = made(RingAttention, {"use_cuda_kernel": True})
    assert attn.kernel == "triton"
    with pytest.raises(ValueError, match="'triton' runs on CUDA"):
        attn(torch.randn(1, 9, 12))


x3 = torch.randn(2, 6, 12, dtype=torch.float64)
seen3 = torch.ones(2, 6, dtype=torch.bool)


def misused(options: dict[str, Any], **call: Any) -> Callable[[], Tensor]:
    return lambda: made(RingAttention, options)(x3, **call)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (misused({}, ring_size=1), "ring_size=1 was given while the ring is off"),
        (
            misused({"ring_attn": True}, ring_size=1, force_ring_reduce_off=True),
            "while the ring is off",
        ),
        (
            misused({"ring_attn": True, "force_regular_attn": True}, ring_size=1),
            "while the ring is off",
        ),
        (misused({}, context_mask=seen3), "context_mask needs a context"),
        (misused({}, context=x3, mask=seen3), "its own context_mask says"),
        (misused({"causal": True}, context=x3), "context is another sequence"),
        (misused({"max_lookback_seq_len": 2}, context=x3), "context is another sequence"),
        (misused({"rotary_embed": True}, context=x3), "context is another sequence"),
        (misused({}, context=x3, rotary_emb=torch.zeros(6, 4)), "context is another sequence"),
        (misused({}, context=x3[..., :5]), "context must be [batch, tokens, 12]"),
        (misused({}, context=x3[:1]), "must agree in b"),
        (misused({}, context=x3, context_mask=seen3[:, :5]), "context_mask must be bool [2, 6]"),
        (misused({}, mask=seen3[:, :5]), "mask must be bool [2, 6]"),
        (misused({}, mask=seen3.float()), "mask must be bool [2, 6]"),
        (misused({"force_regular_attn": True}, mask=seen3[:1]), "mask must be bool [2, 6]"),
        (misused({}, rotary_emb=torch.zeros(7, 4)), "rotary_emb must be [6, 4]"),
        (
            misused({"rotary_embed": True}, rotary_emb=torch.zeros(6, 4)),
            "rotary_emb would be ignored",
        ),
    ],
)
def test_a_call_that_cannot_be_is_refused(call: Callable[[], Tensor], words: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the words are checked below
        call()
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("options", "call", "words"),
    [
        ({}, {"mask": seen3}, "got a mask beside it"),
        ({}, {"ring_size": 1}, "got ring_size beside it"),
        ({}, {"context": x3}, "got context beside it"),
        ({}, {"force_ring_reduce_off": True}, "got force_ring_reduce_off beside it"),
        ({"causal": True}, {}, "this module wants Mask(causal=True"),
        ({"max_lookback_seq_len": 2}, {}, "window=2"),
        ({"softclamp": 2.0}, {}, "with 2.0"),
        ({"kernel": "eager"}, {}, "this module 'eager'"),
        ({"force_regular_attn": True}, {}, "for the ring's kernels"),
        ({"ring_attn": True, "auto_shard_seq": True}, {}, "sharded by hand"),
    ],
)
def test_a_plan_that_the_call_or_the_module_contradicts_is_refused(
    options: dict[str, Any], call: dict[str, Any], words: str
) -> None:
    plan = made(RingAttention, {}).plan(x3)
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the words are checked below
        made(RingAttention, options)(x3, plan=plan, **call)
    assert words in str(error.value)


def test_one_plan_serves_many_layers() -> None:
    layers = [made(RingAttention, {"causal": True, "softclamp": 0.5}) for _ in range(2)]
    mask = torch.rand(2, 6) < 0.7
    plan = layers[0].plan(x3, mask)
    assert isinstance(plan, RingPlan)
    for layer in layers:
        assert torch.equal(layer(x3, plan=plan), layer(x3, mask))


def test_what_does_not_fit_a_plan_is_reported_to_ranks_that_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reports: list[str] = []
    monkeypatch.setattr(Ring, "report_failure", lambda _, error: reports.append(str(error)))
    layer, x = RingAttention(8, dim_head=4, heads=2), torch.zeros(1, 3, 8)
    plan = layer.plan(x)
    with pytest.raises(ValueError, match="RingAttention: x must be"):
        layer(x[0], plan=plan)
    with pytest.raises(ValueError, match="the plan already decides that; got ring_size"):
        layer(x, plan=plan, ring_size=1)
    assert ["RingAttention: x must be" in reports[0], "got ring_size" in reports[1]] == [True] * 2


def test_over_machines_a_module_swaps_heads_unless_that_is_forbidden() -> None:
    x = torch.randn(1, 24, 16, dtype=torch.float64)
    alone = RingAttention(16, dim_head=4, heads=4, causal=True).double()

    def main(ring: Ring) -> tuple[list[int], float]:
        mine, degrees, worst = shard_sequence(x, group=ring, layout="zigzag"), [], 0.0
        for ulysses in (None, 1):
            attn = RingAttention(
                16, dim_head=4, heads=4, causal=True, ring_attn=True, layout="zigzag",
                group=ring, ulysses=ulysses,
            ).double()  # fmt: skip
            attn.load_state_dict(alone.state_dict())
            plan = attn.plan(mine)
            degrees.append(plan.degree)
            want = shard_sequence(alone(x), group=ring, layout="zigzag")
            worst = max(worst, relative_error(attn(mine, plan=plan), want))
        return degrees, worst

    for degrees, worst in threads.run(4, main, machines=(0, 0, 1, 1))[0]:
        assert degrees == [2, 1]
        assert worst < 1e-12


def test_a_module_can_be_copied_and_pickled() -> None:
    options = {"ring_attn": True, "auto_shard_seq": True, "causal": True, "rotary_embed": True}
    module = made(RingAttention, options)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(x3), module(x3))


# automatic sharding


def auto_cases(size: int) -> list[Case]:
    """Everything by itself, and much of it together."""
    odd = brought(size, 13)
    cases = [
        Case(dict(causal=causal, layout=layout, ring_seq_size=4), odd, masked=masked)
        for causal, layout, masked in product((False, True), LAYOUTS, (False, True))
    ]
    cases += [
        Case(dict(causal=causal, max_lookback_seq_len=w, layout=layout, ring_seq_size=4), odd)
        for (causal, w), layout in product(((True, 3), (False, 3), (True, 0)), LAYOUTS)
    ]
    cases += [
        Case(dict(causal=True, ring_seq_size=4), brought(size, n), masked=n > 3)
        for n in (1, 2, 3, 7, 8, 29)
    ]
    # lengths at which a layout's permutation is its own inverse
    cases += [
        Case(dict(causal=True, ring_seq_size=1, layout=layout), brought(size, n))
        for layout, n in product(LAYOUTS, (size + 1, 2 * size))
    ]
    everything = dict(rotary_embed=True, softclamp=0.6, max_lookback_seq_len=5, causal=True)
    cases += [Case(dict(everything, layout=layout, ring_seq_size=4), odd) for layout in LAYOUTS]
    cases += [Case(dict(everything, ring_seq_size=4), odd, masked=True)]
    cases += [Case(dict(layout=layout, ring_seq_size=4), odd, angles=True) for layout in LAYOUTS]
    cases += [Case(dict(causal=True, striped_ring_attn=True, ring_seq_size=4), odd, angles=True)]
    cases += [Case(dict(num_grouped_query_heads=g, ring_seq_size=4), odd) for g in (1, 4)]
    cases += [Case(dict(kernel="eager", bucket_size=3, causal=True, ring_seq_size=4), odd)]
    return cases


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_brings_its_batch_and_gets_what_one_process_would_make(
    pools: Callable, size: int
) -> None:
    cases = auto_cases(size)
    for half in (cases[::2], cases[1::2]):
        check(pools(size), attention_cases, half)


def test_rings_may_be_smaller_than_the_world(pools: Callable) -> None:
    by_length = [
        Case(dict(causal=True, rotary_embed=True, ring_seq_size=s, layout=layout), brought(4, 13))
        for s, layout in product((7, 13, 100), LAYOUTS)
    ]
    by_name = [
        Case(dict(causal=True, rotary_embed=True), brought(4, 13), call={"ring_size": r})
        for r in (1, 2, 4)
    ]
    own_length = Case(
        dict(causal=True, rotary_embed=True, ring_seq_size=7), ((2, 9), (1, 9), (1, 13), (2, 13))
    )
    alone = Case(dict(causal=True, ring_seq_size=50), ((2, 9), (1, 4), (1, 13), (2, 1)))
    check(pools(4), attention_cases, [*by_length, *by_name, own_length, alone])


def test_the_smallest_ring_that_holds_the_sequence_is_taken(pools: Callable) -> None:
    assert pools(4).run(ring_sizes_taken) == [[1, 2, 4, 4]] * 4
    assert pools(3).run(ring_sizes_taken) == [[1, 3, 3, 3]] * 3


def ring_sizes_taken() -> list[int]:
    return [
        made(RingAttention, dict(ring_attn=True, ring_seq_size=s, auto_shard_seq=True))
        .spread.shard(torch.zeros(1, 12, 12), None, {})
        .ring.size
        for s in (12, 6, 5, 1)
    ]


@pytest.mark.parametrize("size", SIZES)
def test_contexts_are_sharded_too(pools: Callable, size: int) -> None:
    batches = brought(size, 7)
    whole_ring = [
        Case(dict(ring_seq_size=2), batches, masked=masked, context=(m,) * size)
        for m, masked in product((1, 2, 7, 16), (False, True))
    ]
    clamped = [Case(dict(ring_seq_size=2, softclamp=0.5), batches, context=(9,) * size)]
    check(pools(size), attention_cases, whole_ring + clamped)


def test_contexts_of_different_rings_may_differ_in_length(pools: Callable) -> None:
    case = Case(dict(ring_seq_size=4), ((2, 7), (1, 7), (1, 8), (1, 8)), context=(5, 5, 11, 11))
    check(pools(4), attention_cases, [case])


# sharded by hand


def hand_cases(size: int) -> list[Case]:
    options = [
        dict(causal=causal, layout=layout, rotary_embed=True)
        for causal, layout in product((False, True), LAYOUTS)
    ]
    cases = [Case(o, ((2, n),), by_hand=True, masked=n == 13) for o in options for n in (13, 2)]
    cases += [
        Case(dict(causal=True, max_lookback_seq_len=4, layout=layout), ((2, 13),), by_hand=True)
        for layout in LAYOUTS
    ]
    cases += [Case(dict(layout=layout), ((2, 13),), True, angles=True) for layout in LAYOUTS]
    cases += [Case(dict(striped_ring_attn=True, causal=True, softclamp=0.5), ((2, 11),), True)]
    shards = ((3, 1, 0, 2), (0, 5, 4, 0), (1, 2, 3, 4))
    cases += [
        Case({}, ((2, 9),), by_hand=True, masked=masked, context=context[:size])
        for context, masked in product(shards, (False, True))
    ]
    return cases


@pytest.mark.parametrize("size", SIZES)
def test_sharded_by_hand_each_rank_gets_its_part_of_one_process(pools: Callable, size: int) -> None:
    check(pools(size), attention_cases, hand_cases(size))


def test_by_hand_too_rings_may_be_smaller_than_the_world(pools: Callable) -> None:
    cases = [
        Case(
            dict(causal=True, rotary_embed=True, layout=layout), ((2, 13), (1, 7)), by_hand=True,
            masked=True, call={"ring_size": 2},
        )
        for layout in LAYOUTS
    ]  # fmt: skip
    cross = Case({}, ((2, 9), (2, 9)), by_hand=True, context=(4, 1), call={"ring_size": 2})
    alone = Case({}, ((2, 9), (1, 2), (2, 5), (2, 1)), by_hand=True, call={"ring_size": 1})
    check(pools(4), attention_cases, [*cases, cross, alone])


# off the ring


def off_the_ring(case: str) -> Errors:
    """Everyone's own whole sequence, of lengths that no ring could share."""
    kind, layout = case.split()
    rank = dist.get_rank()
    shared = dict(causal=True, max_lookback_seq_len=4, softclamp=0.7, rotary_embed=True)
    ring = dict(ring_attn=True, auto_shard_seq=kind.startswith("auto"), layout=layout)
    if kind == "no-ring":
        ring = {}
    whole = made(RingAttention, dict(shared, force_regular_attn=True))
    module = made(RingAttention, dict(shared, **ring, force_regular_attn="regular" in kind))
    draw = torch.Generator().manual_seed(rank)
    x = torch.randn((2, 5 + 3 * rank, 12), generator=draw, dtype=torch.float64)
    mask = torch.rand((2, x.shape[1]), generator=draw) < 0.7
    call = {"force_ring_reduce_off": True} if "off" in kind else {}
    with traffic() as seen:
        got, want = module(x, mask, **call), whole(x, mask)
        cotangent = torch.randn(x.shape, generator=draw, dtype=x.dtype)
        got.backward(cotangent)
        want.backward(cotangent)
    assert seen.sent == []
    assert seen.gathered == []
    return {"out": relative_error(got, want)} | gradient_errors(module, whole, ranks="own")


def off_the_ring_cases(cases: list[str]) -> list[Errors]:
    return [off_the_ring(case) for case in cases]


def test_off_the_ring_every_rank_works_alone_on_its_whole_sequence(pools: Callable) -> None:
    kinds = ("no-ring", "hand-off", "auto-off", "hand-regular", "auto-regular")
    cases = [f"{kind} {layout}" for kind, layout in product(kinds, LAYOUTS)]
    check(pools(3), off_the_ring_cases, cases)


def one_rank_groups(layouts: list[str]) -> list[Errors]:
    found = []
    groups = [dist.new_group([r]) for r in range(dist.get_world_size())]
    for layout, auto in product(layouts, (False, True)):
        options = dict(
            causal=True, ring_attn=True, auto_shard_seq=auto, layout=layout, rotary_embed=True,
            group=groups[dist.get_rank()],
        )  # fmt: skip
        module = made(RingAttention, options)
        whole = made(RingAttention, dict(causal=True, rotary_embed=True, force_regular_attn=True))
        x = torch.randn(2, 7 + dist.get_rank(), 12, dtype=torch.float64)
        cotangent = torch.randn_like(x)
        got, want = module(x), whole(x)
        got.backward(cotangent)
        want.backward(cotangent)
        found.append(
            {"out": relative_error(got, want)} | gradient_errors(module, whole, ranks="own")
        )
    return found


def test_a_group_of_one_rank_is_one_process(pools: Callable) -> None:
    for found in pools(2).run(one_rank_groups, list(LAYOUTS)):
        for errors in found:
            assert_all_exact(errors)


# refused alike on every rank


def misuse(name: str) -> None:
    """Make a wrong call, on rank 1 or on all."""
    odd_one, size = dist.get_rank() == 1, dist.get_world_size()
    n = 8
    kind, _, what = name.partition(": ")
    auto = kind == "auto"
    causal, held = what == "context, causal", 8 if what == "rings of other sizes" else 1
    options: dict[str, Any] = dict(
        ring_attn=True, auto_shard_seq=auto, causal=causal, ring_seq_size=held,
        rotary_embed=what == "restarts on one rank" or (what == "rotated on one rank" and odd_one),
        rotary_restart=what == "restarts on one rank" and odd_one,
    )  # fmt: skip
    module = made(RingAttention, options)
    x = torch.randn(2, n if auto else n // size, 12, dtype=torch.float64)
    mask = torch.ones(x.shape[:2], dtype=torch.bool)
    one_more = torch.cat((x, x[:, :1]), dim=1)
    call: dict[str, Any] = {
        "mask on one rank": {"mask": mask} if odd_one else {},
        "mask too long on one rank": {"mask": mask.repeat(1, 2) if odd_one else mask},
        "mask of numbers on one rank": {"mask": mask.double() if odd_one else mask},
        "mask of fewer samples on one rank": {"mask": mask[:1] if odd_one else mask},
        "angles too short on one rank": {"rotary_emb": torch.zeros(n - odd_one, 4)},
        "context on one rank": {"context": x} if odd_one else {},
        "context, causal": {"context": x},
        "context of another width": {"context": x[..., :5] if odd_one else x},
        "context lengths differ": {"context": one_more if odd_one else x},
        "context mask too short": {
            "context": x, "context_mask": mask[:, 1:] if odd_one else mask,
        },
        "samples of the context differ": {"context": x[:1] if odd_one else x},
        "ring size": {"ring_size": 3 if size != 3 else 2},
        "ring sizes differ": {"ring_size": size if odd_one else 1},
    }.get(what, {})  # fmt: skip
    if odd_one:
        wrong = {
            "width": x[..., :5], "no batch": x[0], "dtype": x.float(), "lengths differ": one_more,
            "rings of other sizes": one_more,
        }  # fmt: skip
        x = wrong.get(what, x)
        if what == "dtype":
            module = module.float()
    if what == "lengths differ" and auto:
        call = {"ring_size": size}
    module(x, **call)


REFUSED = {
    "hand: rotated on one rank": "rotary_embed must be the same on every rank, got false on",
    "hand: restarts on one rank": "rotary_restart must be the same on every rank, got false on",
    "auto: mask on one rank": "mask must be the same on every rank, got false on rank",
    "auto: mask too long on one rank": "mask must be bool [2, 8]",
    "auto: mask of numbers on one rank": "mask must be bool [2, 8]",
    "auto: mask of fewer samples on one rank": "got torch.bool [1, 8] (on rank 1)",
    "auto: angles too short on one rank": "rotary_emb must be [8, 4], got [7, 4] (on rank 1)",
    "auto: context on one rank": "context must be the same on every rank",
    "auto: context, causal": "context is another sequence",
    "auto: context of another width": "context must be [batch, tokens, 12], got [2, 8, 5]",
    "auto: context lengths differ": "context length must be the same on every rank, got 8 on",
    "auto: context mask too short": "context_mask must be bool [2, 8]",
    "auto: samples of the context differ": "context must be of 2 samples as x is, got 1",
    "auto: ring size": "ring_size must divide the group's",
    "auto: ring sizes differ": "ring_size must be the same on every rank",
    "auto: width": "x must be [batch, tokens, 12], got [2, 8, 5] (on rank 1)",
    "auto: no batch": "x must be [batch, tokens, 12], got [8, 12] (on rank 1)",
    "auto: dtype": "dtype must be the same on every rank",
    "auto: lengths differ": "the ranks of one ring must bring equal lengths, got [8, 9",
    "auto: rings of other sizes": "the ranks of one ring must bring equal lengths, got [8, 9",
    "hand: mask on one rank": "must be the same on every rank",
    "hand: mask too long on one rank": "mask must be bool [2, ",
    "hand: mask of numbers on one rank": "mask must be bool [2, ",
    "hand: context, causal": "context is another sequence",
    "hand: context of another width": "context must be [batch, tokens, 12]",
    "hand: context mask too short": "context_mask must be bool",
    "hand: ring size": "ring_size must divide the group's",
    "hand: width": "x must be [batch, tokens, 12]",
    "hand: no batch": "x must be [batch, tokens, 12]",
    "hand: dtype": "dtype must be the same on every rank",
    "hand: lengths differ": "layout='contiguous' puts",
}


@pytest.mark.parametrize("size", [2, 4])
def test_what_cannot_be_is_refused_in_the_same_words_on_all_ranks(
    pools: Callable, size: int
) -> None:
    check_refused(pools(size), misuse, REFUSED)


# what travels


def travelled(length: int, ring_size: int) -> dict[str, Any]:
    """Return what a rank received."""
    module = made(RingAttention, dict(ring_attn=True, auto_shard_seq=True, causal=True))
    x = torch.randn(3, length, 12, dtype=torch.float64, requires_grad=True)
    with traffic() as seen:
        out = module(x, ring_size=ring_size)
    forward = seen.floats_received()
    with traffic() as seen:
        out.sum().backward()
    return {"forward": forward, "backward": seen.floats_received(), "notes": seen.gathered}


@pytest.mark.parametrize("ring_size", [2, 4])
def test_ranks_exchange_their_parts_and_never_gather_a_batch(
    pools: Callable, ring_size: int
) -> None:
    n, b, dim, key_width = 16, 3, 12, 2 * 4
    for found in pools(4).run(travelled, n, ring_size):
        held, others = n // ring_size, ring_size - 1
        tokens = others * b * held  # of x in, and as many of the result home
        keys = others * 2 * ring_size * b * held * key_width
        assert sum(found["forward"]) == 2 * tokens * dim + keys
        assert sum(found["backward"]) == 2 * tokens * dim + 2 * keys
        assert max(found["forward"]) == max(b * held * dim, 2 * ring_size * b * held * key_width)
        assert found["notes"] == []


def notes_of(length: int) -> list[int]:
    module = made(RingAttention, dict(ring_attn=True, auto_shard_seq=True))
    with traffic() as seen:
        module(torch.randn(2, length, 12, dtype=torch.float64), ring_size=4)
    return seen.gathered


def test_what_ranks_compare_is_small_however_long_the_sequence(pools: Callable) -> None:
    for found in pools(4).run(notes_of, 64):
        assert len(found) == 2
        assert max(found) <= 4096


# together with the rest of PyTorch


def checkpointed() -> list[Errors]:
    found = []
    draw = torch.Generator().manual_seed(dist.get_rank())
    for reentrant, auto in product((False, True), (False, True)):
        n = 8 if auto else 8 // dist.get_world_size()
        x = torch.randn((2, n, 12), generator=draw, dtype=torch.float64)
        cotangent = torch.randn(x.shape, generator=draw, dtype=x.dtype)
        results = []
        for again in (False, True):
            options = dict(causal=True, ring_attn=True, auto_shard_seq=auto, rotary_embed=True)
            module, mine = made(RingAttention, options), x.clone().requires_grad_()
            out = checkpoint(module, mine, use_reentrant=reentrant) if again else module(mine)
            out.backward(cotangent)
            results.append([out, mine.grad, *(p.grad for p in module.parameters())])
        found.append({str(i): relative_error(a, b) for i, (a, b) in enumerate(zip(*results))})
    return found


def test_activations_may_be_recomputed(pools: Callable) -> None:
    for found in pools(4).run(checkpointed):
        for errors in found:
            assert len(errors) == 5
            assert_all_exact(errors)


def under_ddp(layouts: list[str]) -> list[Errors]:
    """Each rank's own batch under DDP, whose average is the mean over everyone's."""
    found = []
    size, rank = dist.get_world_size(), dist.get_rank()
    for layout in layouts:
        options = dict(causal=True, rotary_embed=True)
        ring = dict(ring_attn=True, auto_shard_seq=True, layout=layout)
        module = made(RingAttention, options | ring)
        whole = made(RingAttention, dict(options, force_regular_attn=True))
        xs = torch.randn(
            (2 * size, 9, 12), generator=torch.Generator().manual_seed(3), dtype=torch.float64
        )
        want = whole(xs).square().mean()
        want.backward()
        wrapped = DistributedDataParallel(module)
        wrapped(xs[2 * rank : 2 * rank + 2], ring_size=size).square().mean().backward()
        pairs = zip(module.named_parameters(), whole.parameters())
        found.append({name: relative_error(p.grad, q.grad) for (name, p), q in pairs})
    return found


def test_under_ddp_gradients_are_those_of_one_process(pools: Callable) -> None:
    for found in pools(4).run(under_ddp, list(LAYOUTS)):
        for errors in found:
            assert_all_exact(errors)


def two_at_once() -> list[Errors]:
    """Forwards of two modules interleaved, backwards in the other order."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn((2, 12, 12), generator=draw, dtype=torch.float64)
    options = [dict(causal=True, layout="zigzag"), dict(softclamp=0.6, max_lookback_seq_len=2)]
    modules = [made(RingAttention, dict(o, ring_attn=True)) for o in options]
    wholes = [made(RingAttention, Case(o, ()).whole_options()) for o in options]
    layouts = [o.get("layout", "contiguous") for o in options]
    outs = [m(shard_sequence(x, layout=lay)) for m, lay in zip(modules, layouts)]
    want = [w(x) for w in wholes]
    for i in (0, 1):
        cotangent = torch.randn(x.shape, generator=draw, dtype=x.dtype)
        want[i].backward(cotangent)
        outs[i].backward(shard_sequence(cotangent, layout=layouts[i]))
    return [
        {"out": relative_error(o, shard_sequence(w, layout=lay))} | gradient_errors(m, r)
        for o, w, lay, m, r in zip(outs, want, layouts, modules, wholes)
    ]


def test_two_modules_do_not_get_in_each_others_way(pools: Callable) -> None:
    for found in pools(3).run(two_at_once):
        for errors in found:
            assert_all_exact(errors)


def frozen_and_without_grad() -> Errors:
    x = torch.randn((2, 8, 12), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    module = made(RingAttention, dict(causal=True, ring_attn=True, layout="zigzag"))
    whole = made(RingAttention, dict(causal=True, force_regular_attn=True))
    with torch.no_grad():
        plain = whole_again(module, x, "zigzag")
    with torch.inference_mode():
        inferred = whole_again(module, x, "zigzag").clone()
    for p in module.parameters():
        p.requires_grad_(False)
    mine = shard_sequence(x, layout="zigzag").requires_grad_()
    module(mine).sum().backward()
    x.requires_grad_()
    whole(x).sum().backward()
    return {
        "no_grad": relative_error(plain, whole(x)),
        "inference": relative_error(inferred, whole(x)),
        "dx": relative_error(mine.grad, shard_sequence(x.grad, layout="zigzag")),
    }


def test_frozen_weights_and_inference_are_right(pools: Callable) -> None:
    for errors in pools(2).run(frozen_and_without_grad):
        assert_all_exact(errors)
