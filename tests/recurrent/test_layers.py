"""Recurrent layers over rings of threads, against the recurrence token by token."""

import pytest
import torch

from ring_attention_pytorch.recurrent import (
    RunPlan,
    ring_gated_delta_rule,
    ring_kda,
    ring_mamba2,
)
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
from tests.support.reference import relative_error


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


def zeros(spread, ring, **given):
    """Tensors of a call for one rank, `given` ones of a spread-out sequence among them."""
    shape = spread.batch, len(spread.held(ring.rank))
    q, v, g = ((2, 3), (4, 5), (4,))
    return {
        name: torch.zeros(*shape, *of_token)
        for name, of_token in dict(q=q, k=q, v=v, g=g, beta=g).items()
    } | given


STATE = torch.zeros(1, 4, 3, 5)


@pytest.mark.parametrize("borders", [None, [[0, 4, 8]]], ids=["one", "whole documents"])
@pytest.mark.parametrize(
    ("same", "other"),
    [({}, {"final": True}), ({}, {"initial": STATE}), ({"scale": 1.0}, {"scale": 2.0}),
     ({}, {"normalize": True}), ({}, {"v": torch.zeros(1, 4, 4, 6)}),
     ({}, {"q": torch.zeros(1, 4, 2, 3, requires_grad=True)})],
)  # fmt: skip
def test_ranks_must_make_the_same_call(borders, same, other) -> None:
    """All of them raise, and none waits in forward or backward for another one."""
    spread = Spread(2, 8, 1, "contiguous", borders)

    def main(ring):
        given = zeros(spread, ring, **(other if ring.rank else same))
        with pytest.raises(ValueError, match="must be the same on every rank"):
            ring_gated_delta_rule(**given, plan=spread.plan(ring))

    threads.run(2, main)


@pytest.mark.parametrize(
    ("name", "given"),
    [("v", torch.zeros(1, 4, 4, 5, dtype=torch.long)),
     ("v", torch.zeros(1, 4, 4, 5, dtype=torch.complex64)),
     ("q", torch.zeros(1, 4, 2, 3, dtype=torch.float64)), ("g", torch.ones(1, 4, 4).bool()),
     ("beta", torch.zeros(1, 4, 4).double()), ("initial", STATE.double()),
     ("initial", STATE.to("meta"))],
)  # fmt: skip
def test_no_tensor_is_cast_to_what_holds_less(name, given) -> None:
    spread = Spread(1, 4, 1, "contiguous", None)

    def main(ring):
        match = f"{name} must be floating, at most torch.float32, and on cpu, got {given.dtype}"
        with pytest.raises(ValueError, match=match):
            ring_gated_delta_rule(**zeros(spread, ring, **{name: given}), plan=spread.plan(ring))

    threads.run(1, main)


@pytest.mark.parametrize("name", ["a", "skip"])
def test_parameters_of_mamba_2_are_not_cast_either(name) -> None:
    spread, x, b = Spread(1, 4, 1, "contiguous", None), torch.zeros(1, 4, 2, 5), torch.ones(2)
    given = dict(dt=x[..., 0], a=-b, b=x, c=x, skip=b) | {name: b.double()}

    def main(ring):
        with pytest.raises(ValueError, match=f"{name} must be floating, at most torch.float32"):
            ring_mamba2(x, **given, plan=spread.plan(ring))

    threads.run(1, main)


def test_ranks_must_all_give_a_skip_or_none() -> None:
    spread, x = Spread(2, 8, 1, "contiguous", None), torch.zeros(1, 4, 2, 5)

    def main(ring):
        skip = torch.ones(2) if ring.rank else None
        with pytest.raises(ValueError, match="ring_mamba2: skip must be the same on every rank"):
            ring_mamba2(x, x[..., 0], -torch.ones(2), x, x, plan=spread.plan(ring), skip=skip)

    threads.run(2, main)


@pytest.mark.parametrize("shape", [(2,), (2, 5)])
def test_the_gradients_of_a_skip_and_of_what_it_multiplies(shape) -> None:
    torch.manual_seed(0)
    x, dt, b, c = (
        torch.randn(2, 9, *more, dtype=torch.float64) for more in ((2, 5), (2,), (1, 3), (1, 3))
    )
    leaves = [x, dt.abs(), torch.tensor([-0.5, -1.5]).double(), torch.randn(shape).double()]
    leaves, dout = [t.requires_grad_() for t in leaves], torch.randn_like(x)
    x, dt, a, skip = leaves
    out, _ = ring_mamba2(x, dt, a, b, c, plan=RunPlan.make(x), skip=skip)
    state, outs = torch.zeros(2, 2, 5, 3).double(), []
    for t in range(9):
        state = state * (dt[:, t] * a).exp()[..., None, None]
        state = state + torch.einsum("bh,bhp,bd->bhpd", dt[:, t], x[:, t], b[:, t, 0])
        seen = torch.einsum("bhpd,bd->bhp", state, c[:, t, 0])
        outs.append(seen + x[:, t] * (skip if skip.ndim == 2 else skip[:, None]))
    want = torch.stack(outs, 1)
    assert relative_error(out, want) < 1e-10
    grads = zip(*(torch.autograd.grad(each, leaves, dout) for each in (out, want)))
    assert max(relative_error(*pair) for pair in grads) < 1e-10


@pytest.mark.parametrize("rule", [ring_gated_delta_rule, ring_kda])
def test_a_scale_may_be_an_int(rule) -> None:
    spread = Spread(1, 9, 1, "contiguous", None)
    sharded, _ = data(spread, rule is ring_kda, 0)

    def main(ring):
        plan = spread.plan(ring)
        assert torch.equal(*(rule(**sharded, plan=plan, scale=scale)[0] for scale in (2, 2.0)))

    threads.run(1, main)


@pytest.mark.parametrize("name", ["q", "v"])
def test_heads_and_their_sizes_are_not_0(name) -> None:
    spread = Spread(1, 4, 1, "contiguous", None)

    def main(ring):
        given = zeros(spread, ring)
        empty = {each: given[each][..., :0] for each in (("q", "k") if name == "q" else ("v",))}
        with pytest.raises(ValueError, match="none of these 0"):
            ring_gated_delta_rule(**{**given, **empty}, plan=spread.plan(ring))

    threads.run(1, main)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [({"c": torch.zeros(1, 3, 2, 6)}, r"ring_mamba2: c must be \[1, 4\] and more on cpu"),
     ({"b": torch.zeros(1, 4, 2, 5)}, r"b and c .*, \[1, 4, 2, 5\], \[1, 4, 2, 6\]"),
     ({"a": torch.zeros(3)}, r"a \[h\], .*, \[3\],"),
     ({"dt": torch.zeros(1, 4, 3)}, r"dt \[b, n, h\], .*, \[1, 4, 3\],"),
     ({"skip": torch.zeros(4, 6)}, r"skip \[h\] or \[h, p\], .* and \[4, 6\]"),
     ({"initial": torch.zeros(1, 4, 6, 5)}, r"initial must be \[1, 4, 5, 6\], got \[1, 4, 6, 5\]")],
)  # fmt: skip
def test_errors_about_mamba_2_are_in_its_own_words(wrong, match) -> None:
    """Its tensors are b, c and x, not keys, queries and values; states are given transposed."""
    spread, x, b = (
        Spread(1, 4, 1, "contiguous", None),
        torch.zeros(1, 4, 4, 5),
        torch.zeros(1, 4, 2, 6),
    )
    given = dict(x=x, dt=x[..., 0], a=x[0, 0, :, 0], b=b, c=b) | wrong

    def main(ring):
        with pytest.raises(ValueError, match=match):
            ring_mamba2(**given, plan=spread.plan(ring))

    threads.run(1, main)


@pytest.mark.parametrize("shape", [(2,), (2, 4)], ids=["of heads", "of channels"])
def test_a_skip_on_one_rank_alone_is_an_error_on_all(shape, pools) -> None:
    for told in pools(2).run(skip_of_one, shape):
        assert "skip" in told
        assert "differ" in told or "rank" in told


def skip_of_one(shape: tuple[int, ...]) -> str:
    """The error of a call in which rank 1 has another skip, or none."""
    x, dt, b = torch.randn(1, 6, 2, 4), torch.rand(1, 6, 2), torch.randn(1, 6, 1, 3)
    plan = RunPlan.make(x)
    skip = torch.ones(shape) if plan.ring.rank == 0 else None
    try:
        ring_mamba2(x, dt, -torch.ones(2), b, b, plan=plan, skip=skip)
    except ValueError as error:
        return str(error)
    return "no error"
