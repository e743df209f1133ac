"""Halos and short convolutions over rings of threads, against loops over tokens."""

import pytest
import torch

from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.recurrent import RunPlan, ring_halo, ring_short_conv
from ring_attention_pytorch.recurrent.halo import last_tokens
from tests.support import threads
from tests.support.recurrent_cases import Spread, check
from tests.support.recurrent_reference import convolved


@pytest.mark.parametrize("seed", range(16))
def test_convolutions_equal_one_process(seed) -> None:
    spread, width = Spread.drawn(seed), 1 + seed % 6  # often wider than a run
    draw = torch.Generator().manual_seed(seed)
    x, weight, bias = (
        torch.randn(*shape, generator=draw, dtype=torch.float64)
        for shape in ((spread.batch, spread.length, 3), (3, width), (3,))
    )
    same = {"weight": weight} | ({"bias": bias} if seed % 2 else {})

    def reference(*, spread, x, weight, bias=None):
        return {"out": convolved(x, weight, bias, spread.documents)}

    check(
        spread, {"x": x}, same, lambda **given: {"out": ring_short_conv(**given)}, reference, 1e-12
    )


@pytest.mark.parametrize("seed", range(16))
def test_a_convolution_goes_on_after_the_tokens_before(seed) -> None:
    """Only a sample's first document does; its last tokens are those of its last document."""
    spread, width = Spread.drawn(seed), 2 + seed % 5
    draw = torch.Generator().manual_seed(seed)
    x, weight, initial = (
        torch.randn(*shape, generator=draw, dtype=torch.float64)
        for shape in (
            (spread.batch, spread.length, 3), (3, width), (spread.batch, width - 1, 3),
        )
    )  # fmt: skip

    def ours(*, plan, x, weight, initial):
        out = ring_short_conv(x, weight, plan=plan, initial=initial)
        return {"out": out, "last": last_tokens(x, width - 1, plan=plan, initial=initial)}

    def reference(*, spread, x, weight, initial):
        before = spread.documents[:, :1].expand(-1, width - 1)
        documents, whole = torch.cat((before, spread.documents), 1), torch.cat((initial, x), 1)
        out = convolved(whole, weight, None, documents)[:, width - 1 :]
        same = (documents == documents[:, -1:])[:, 1 - width :, None]
        return {"out": out, "last": torch.where(same, whole[:, 1 - width :], 0.0)}

    check(spread, {"x": x}, {"weight": weight, "initial": initial}, ours, reference, 1e-12)


def test_tokens_before_a_sample_that_dont_fit() -> None:
    spread, x = Spread(1, 4, 1, "contiguous", None), torch.zeros(1, 4, 2)
    initial = torch.zeros(1, 4, 2)

    def main(ring):
        for call in (ring_halo, last_tokens):
            with pytest.raises(ValueError, match=r"initial must be \[1, 3, 2\] on cpu"):
                call(x, 3, plan=spread.plan(ring), initial=initial)

    threads.run(1, main)


def test_a_halo_spans_ranks_and_begins_with_zeros() -> None:
    spread = Spread(4, 4, 1, "contiguous", [[0, 1, 4]])

    def main(ring):
        x = torch.tensor([[[10.0 + ring.rank, 20.0]]])
        return ring_halo(x, 3, plan=spread.plan(ring))[0, :, 0].tolist()

    assert threads.run(4, main)[0] == [[0, 0, 0], [0, 0, 0], [0, 0, 11], [0, 11, 12]]


@pytest.mark.parametrize(
    ("x", "width", "match"),
    [
        (torch.zeros(1, 5, 2), 1, r"x must be \[1, 4\] and more on cpu by the plan"),
        (torch.zeros(1, 4, 2), -1, "width must be at least 0"),
    ],
)
def test_wrong_arguments(monkeypatch, x, width, match) -> None:
    """Ranks that wait for this one are told."""
    told = []
    monkeypatch.setattr(Ring, "report_failure", lambda _, error: told.append(str(error)))
    spread = Spread(1, 4, 1, "contiguous", None)
    with pytest.raises(ValueError, match=match) as error:
        threads.run(1, lambda ring: ring_halo(x, width, plan=spread.plan(ring)))
    assert told == [str(error.value)]


@pytest.mark.parametrize("weight", [torch.zeros(3, 2), torch.zeros(2), torch.zeros(2, 0)])
def test_wrong_weights(weight) -> None:
    spread = Spread(1, 4, 1, "contiguous", None)
    with pytest.raises(ValueError, match="x must be \\[b, n, c\\] and weight"):
        threads.run(
            1, lambda ring: ring_short_conv(torch.zeros(1, 4, 2), weight, plan=spread.plan(ring))
        )


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (dict(x=torch.ones(1, 4, 2).long()), "x must be floating"),
        (dict(weight=torch.ones(2, 3).long()), "weight must be floating"),
        (dict(weight=torch.ones(2, 3, device="meta")), "and on cpu, got torch.float32 on meta"),
        (dict(bias=torch.ones(2).double()), "bias must be floating, at most torch.float32"),
        (dict(bias=torch.ones(2).half()), "bias must be of the weight's dtype"),
        (dict(dtype=torch.int32), "dtype floating, got None and torch.int32"),
        (dict(initial=torch.ones(1, 2, 2).double()), "must fit into torch.float32"),
    ],
)
def test_a_convolution_casts_nothing_to_what_holds_less(given, match) -> None:
    spread = Spread(1, 4, 1, "contiguous", None)
    given = dict(x=torch.ones(1, 4, 2), weight=torch.ones(2, 3)) | given
    with pytest.raises(ValueError, match=match):
        threads.run(1, lambda ring: ring_short_conv(**given, plan=spread.plan(ring)))


@pytest.mark.parametrize("call", [ring_halo, last_tokens])
@pytest.mark.parametrize("name", ["width", "requires_grad", "initial"])
@pytest.mark.parametrize("borders", [None, [[0, 4, 8]]], ids=["one", "whole documents"])
def test_ranks_must_ask_for_the_same_halo(call, name, borders) -> None:
    spread = Spread(2, 8, 1, "contiguous", borders)

    def main(ring):
        x = torch.zeros(1, 4, 2, requires_grad=name == "requires_grad" and ring.rank == 1)
        width = 0 if name == "width" and ring.rank else 3
        initial = torch.zeros(1, 3, 2) if name == "initial" and ring.rank else None
        with pytest.raises(ValueError, match=f"{name} must be the same on every rank"):
            call(x, width, plan=spread.plan(ring), initial=initial)

    threads.run(2, main)


def test_rings_of_one_group_agree_in_the_same_calls() -> None:
    """Also where the documents of one are whole on its ranks, and those of another one are not."""

    def main(everyone):
        borders = [0, 4, 8] if everyone.rank < 2 else [0, 8]
        ring, x = threads.PartRing(everyone, 2), torch.full((1, 4, 1), 1.0 + everyone.rank)
        plan = RunPlan.make(x, cu_seqlens=borders, group=ring)
        halo, last = ring_halo(x, 1, plan=plan), last_tokens(x, 1, plan=plan)
        return halo.item(), last.item()

    assert threads.run(4, main)[0] == [(0, 2), (0, 2), (0, 4), (3, 4)]


def test_errors_about_the_tokens_before_name_the_convolution() -> None:
    spread, x = Spread(1, 4, 1, "contiguous", None), torch.zeros(1, 4, 2)

    def main(ring):
        with pytest.raises(ValueError, match=r"^ring_short_conv: initial must be \[1, 2, 2\]"):
            ring_short_conv(x, torch.zeros(2, 3), plan=spread.plan(ring), initial=x)

    threads.run(1, main)


def test_a_halo_is_no_wider_than_a_sample_unless_tokens_before_it_are_given() -> None:
    spread, x = Spread(2, 8, 1, "contiguous", None), torch.zeros(1, 4, 2)

    def main(ring):
        plan = spread.plan(ring)
        with pytest.raises(ValueError, match=r"width must be at most 8, the .*, got 1099511627776"):
            ring_halo(x, 2**40, plan=plan)
        assert ring_halo(x, 8, plan=plan).shape == (1, 8, 2)
        return ring_halo(x, 12, plan=plan, initial=torch.ones(1, 12, 2)).sum().item()

    assert threads.run(2, main)[0] == [24.0, 16.0]


def test_under_autocast_a_convolution_is_pytorchs() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(1, 9, 3), torch.randn(3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        out = ring_short_conv(x, weight, plan=RunPlan.make(x))
        padded = torch.nn.functional.pad(x.mT, (3, 0))
        want = torch.nn.functional.conv1d(padded, weight[:, None], groups=3).mT
    assert out.dtype == torch.float32
    assert torch.equal(out, want.float())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_convolutions_result_has_the_dtype_that_is_asked_for(dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(1, 9, 3), torch.randn(3, 4)
    for n in (9, 0):
        mine = x[:, :n]
        out = ring_short_conv(mine, weight, plan=RunPlan.make(mine), dtype=dtype)
        want = ring_short_conv(mine, weight, plan=RunPlan.make(mine))
        assert out.dtype == dtype
        assert torch.equal(out, want.to(dtype))


def test_what_is_not_dense_or_is_transformed_is_refused() -> None:
    spread, x = Spread(2, 8, 1, "contiguous", None), torch.ones(1, 4, 2)

    def main(ring):
        plan = spread.plan(ring)
        with pytest.raises(ValueError, match="ring_halo: x must be dense"):
            ring_halo(x.to_sparse(), 2, plan=plan)
        with pytest.raises(ValueError, match="weight must be dense"):
            ring_short_conv(x, torch.ones(2, 3).to_sparse(), plan=plan)
        with pytest.raises(ValueError, match="ring_halo: x is transformed by"):
            torch.func.grad(lambda t: ring_halo(t, 2, plan=plan).sum())(x)

    threads.run(2, main)
