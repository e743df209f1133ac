"""Angles follow global positions, in every layout and every precision."""

import copy
import math
from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ring_attention_pytorch import RingRotaryEmbedding, apply_rotary_pos_emb, positions
from tests.support.reference import relative_error

LAYOUTS = ("contiguous", "striped", "zigzag")


def angles(at: Tensor, dim: int, theta: float = 10000.0) -> Tensor:
    """By the definition, in float64."""
    frequencies = torch.tensor([theta ** (-2 * i / dim) for i in range(dim // 2)]).double()
    return torch.outer(at.double(), frequencies).repeat(1, 2)


def rotated(at: Tensor, t: Tensor) -> Tensor:
    """Each pair (t[i], t[i + d / 2]) as a complex number, turned by its angle."""
    d = t.shape[-1]
    pairs = torch.complex(t[..., : d // 2].double(), t[..., d // 2 :].double())
    turned = pairs * torch.polar(torch.ones(()).double(), angles(at, d)[:, : d // 2])[:, None]
    return torch.cat((turned.real, turned.imag), dim=-1)


@pytest.mark.parametrize(("dim", "theta"), [(2, 10000), (8, 10000), (64, 500000.0), (6, 10)])
def test_angles_are_positions_times_frequencies(dim: int, theta: float) -> None:
    rotary = RingRotaryEmbedding(dim, theta=theta)
    at = torch.tensor([0, 5, 1, 1000])
    got = rotary(at)
    assert (got.dtype, got.shape) == (torch.float32, (4, dim))
    assert relative_error(got, angles(at, dim, theta)) < 1e-6
    assert torch.equal(rotary(7), rotary(torch.arange(7)))
    assert rotary(0).shape == (0, dim)


def test_turning_is_multiplication_by_complex_units() -> None:
    t, at = torch.randn(2, 5, 3, 8, dtype=torch.float64), torch.tensor([0, 1, 2, 30, 7])
    assert relative_error(apply_rotary_pos_emb(angles(at, 8), t), rotated(at, t)) < 1e-14
    heads_first = apply_rotary_pos_emb(angles(at, 8), t.transpose(1, 2), head_dim_first=True)
    assert relative_error(heads_first.transpose(1, 2), rotated(at, t)) < 1e-14


def test_scores_depend_on_distances_only() -> None:
    q, k = (
        torch.randn(1, 1, 1, 8, dtype=torch.float64),
        torch.randn(1, 1, 1, 8, dtype=torch.float64),
    )

    def score(i: int, j: int) -> float:
        turned = [
            apply_rotary_pos_emb(angles(torch.tensor([at]), 8), t) for at, t in ((i, q), (j, k))
        ]
        return (turned[0] * turned[1]).sum().item()

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-12)
    assert score(9, 4) != pytest.approx(score(4, 9), abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_what_is_turned_keeps_its_dtype_and_is_turned_in_float32_at_least(
    dtype: torch.dtype,
) -> None:
    t, at = torch.randn(1, 64, 2, 16, dtype=torch.float64).to(dtype), torch.arange(64)
    got = apply_rotary_pos_emb(RingRotaryEmbedding(16)(at), t)
    assert got.dtype == dtype
    assert relative_error(got, rotated(at, t)) < max(torch.finfo(dtype).eps, 1e-5) / 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_in_16_bits_all_is_rounded_once(dtype: torch.dtype) -> None:
    """Each number, and each gradient: no product, no cosine and no sum is of 16 bits."""
    at = torch.arange(64)
    t, cotangent = torch.randn(2, 1, 64, 3, 16, dtype=torch.float64).to(dtype)
    turned = apply_rotary_pos_emb(angles(at, 16).float(), t.requires_grad_())
    (grad,) = torch.autograd.grad(turned, t, cotangent)
    for got, want, size in (
        (turned, rotated(at, t.detach()), t.detach()),
        (grad, rotated(-at, cotangent), cotangent),
    ):
        pair = size.double().abs() + size.double().abs().roll(8, -1)
        once = torch.finfo(dtype).eps / 2 * want.abs() + 1e-5 * pair
        assert ((got.double() - want).abs() <= once).all()


def test_gradients_are_turned_back() -> None:
    t = torch.randn(1, 5, 2, 8, dtype=torch.float64, requires_grad=True)
    cotangent = torch.randn_like(t)
    at = torch.arange(5)
    (grad,) = torch.autograd.grad(apply_rotary_pos_emb(angles(at, 8), t), t, cotangent)
    assert relative_error(grad, rotated(-at, cotangent)) < 1e-14


def by_layout(cases: list[tuple[str, int, bool]]) -> list[Tensor]:
    found = []
    for layout, per_rank, striped in cases:
        named = {"striped": True} if striped else {"layout": layout}
        found.append(RingRotaryEmbedding(8, ring=True, **named)(per_rank))
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_rank_gets_the_angles_of_its_global_positions(pools: Callable, size: int) -> None:
    cases = [(layout, n, False) for layout, n in product(LAYOUTS, (1, 6))] + [("striped", 6, True)]
    for rank, found in enumerate(pools(size).run(by_layout, cases)):
        for (layout, n, _), got in zip(cases, found):
            at = positions(layout, rank=rank, ring_size=size, length=n * size)
            assert relative_error(got, angles(at, 8)) < 1e-6


def in_a_pair() -> tuple[Tensor, Tensor]:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    of_the_pair = RingRotaryEmbedding(
        8, ring=True, layout="striped", group=groups[dist.get_rank() % 2]
    )
    return of_the_pair(3), RingRotaryEmbedding(8)(3)


def test_positions_are_those_of_the_group_and_not_of_the_world(pools: Callable) -> None:
    for rank, (of_the_pair, of_nobody) in enumerate(pools(4).run(in_a_pair)):
        at = positions("striped", rank=rank // 2, ring_size=2, length=6)
        assert relative_error(of_the_pair, angles(at, 8)) < 1e-6
        assert relative_error(of_nobody, angles(torch.arange(3), 8)) < 1e-6


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_ring_of_nobody_else_holds_positions_in_order(layout: str) -> None:
    rotary = RingRotaryEmbedding(8, ring=True, layout=layout)
    assert torch.equal(rotary(9), RingRotaryEmbedding(8)(9))


@pytest.mark.parametrize("cast", ["bfloat16", "half", "double", "float"])
def test_no_cast_of_the_module_costs_positions(cast: str) -> None:
    whole = RingRotaryEmbedding(16)
    model = torch.nn.Sequential(copy.deepcopy(whole), torch.nn.Linear(16, 16))
    rotary = getattr(model, cast)()[0]
    assert model[1].weight.dtype == getattr(torch, {"half": "float16"}.get(cast, cast), None)
    assert torch.equal(rotary.inv_freq, whole.inv_freq)
    got = rotary(4096)
    assert len(got[:, 0].unique()) == 4096
    assert torch.equal(got, whole(4096))
    again = model.to(torch.float16).to("cpu").to(torch.float32)[0]
    assert torch.equal(again.inv_freq, whole.inv_freq)


def test_autocast_costs_no_positions() -> None:
    rotary = RingRotaryEmbedding(16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = rotary(4096)
    assert torch.equal(got, rotary(4096))
    assert len(got[:, 0].unique()) == 4096


def test_heads_turned_in_bfloat16_tell_4096_positions_apart() -> None:
    """Turned by the exact angle and rounded once, however far along the sequence."""
    rotary = RingRotaryEmbedding(16).bfloat16()
    t = torch.randn(1, 4096, 1, 16).bfloat16()
    want = rotated(torch.arange(4096), t)
    got = apply_rotary_pos_emb(rotary(4096), t)
    late = slice(3072, 4096)
    assert relative_error(got[:, late], want[:, late]) < 2**-8


def test_frequencies_are_saved_and_loaded() -> None:
    rotary = RingRotaryEmbedding(8, theta=100)
    state = rotary.state_dict()
    assert set(state) == {"inv_freq"}
    assert state["inv_freq"].tolist() == pytest.approx([100 ** (-i / 4) for i in range(4)])
    other = RingRotaryEmbedding(8, ring=True, layout="zigzag")
    other.load_state_dict(state)
    assert torch.equal(other(5), rotary(5))
    assert list(rotary.parameters()) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dim": 5}, "an even dim, got 5"),
        ({"dim": 0}, "an even dim, got 0"),
        ({"dim": 8, "buckets": 2, "striped": True, "ring": True}, "buckets must be 1, got 2"),
        ({"dim": 8, "striped": True}, "needs ring=True"),
        ({"dim": 8, "layout": "zigzag"}, "needs ring=True"),
        ({"dim": 8, "ring": True, "layout": "spiral"}, "layout must be one of"),
        ({"dim": 8, "ring": True, "striped": True, "layout": "zigzag"}, "is layout='striped'"),
    ],
)
def test_what_cannot_be_is_refused(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RingRotaryEmbedding(**options)


def test_the_longest_wavelength_is_theta_times_two_pi() -> None:
    frequencies = RingRotaryEmbedding(64, theta=10000).inv_freq
    assert frequencies[0] == 1.0
    wavelengths = 2 * math.pi / frequencies.double()
    assert wavelengths[-1].item() == pytest.approx(2 * math.pi * 10000 ** (62 / 64), rel=1e-6)


def test_angles_on_the_meta_device_have_a_shape() -> None:
    module = RingRotaryEmbedding(8).to("meta")
    for found in (module(6), module(torch.arange(6, device="meta"))):
        assert (found.shape, found.dtype, found.device.type) == ((6, 8), torch.float32, "meta")


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("theta", [100, 10_000, 5e6])
def test_a_checkpoint_in_16_bits_costs_no_positions(
    dtype: torch.dtype, theta: float, assign: bool
) -> None:
    """As many are saved; frequencies that are rounded so turn token 8000 by a radian too much."""
    module = torch.nn.Sequential(RingRotaryEmbedding(16, theta=theta))
    saved = {name: t.to(dtype) for name, t in module.state_dict().items()}
    loaded = torch.nn.Sequential(RingRotaryEmbedding(16, theta=theta))
    loaded.load_state_dict(saved, assign=assign)
    assert loaded[0](8000).equal(module[0](8000))
    assert saved["0.inv_freq"].dtype == dtype  # the caller's
    other = torch.nn.Sequential(RingRotaryEmbedding(16, theta=1.5 * theta))
    with pytest.raises(RuntimeError, match=r"0.inv_freq was saved in .* of another theta than"):
        other.load_state_dict(saved)


def test_frequencies_in_16_bits_are_refused() -> None:
    """FSDP and DDP cast buffers by their data, past the module."""
    module = RingRotaryEmbedding(16)
    module.inv_freq.data = module.inv_freq.data.bfloat16()
    with pytest.raises(ValueError, match=r"inv_freq must stay in float32, got torch\.bfloat16"):
        module(4)
