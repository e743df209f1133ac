"""States that follow maps, and the kernels, through Triton's interpreter."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ring_attention_pytorch.recurrent import levels
from ring_attention_pytorch.recurrent.levels import Levels, followed, kernel_fits, last_states
from tests.support.interpreter import needs_triton
from tests.support.reference import relative_error


def spread(t: torch.Tensor) -> torch.Tensor:
    """Return t as every other column of a tensor."""
    return torch.stack((t, t.neg()), -1).flatten(-2)[..., ::2]


def follows_maps(d_k: int, d_v: int) -> list[float]:
    """Relative errors of states, gradients and second derivatives, with a map that none follows."""
    draw = torch.Generator().manual_seed(0)
    way = Levels.of([[2], [4, 5, 3], [], [0]], torch.device("cpu"))
    both = torch.randn(6, 2, d_k, d_v + d_k, generator=draw) / d_k**0.5
    first = torch.randn(4, 2, d_k, d_v, generator=draw)
    drawn = both[..., d_v:], both[..., :d_v], first  # as maps travel: views of one tensor
    grad = torch.randn(len(way.order), 2, d_k, d_v, generator=draw)
    found = []
    for kernel, dtype in ((False, torch.float64), (True, torch.float32)):
        levels.kernel_fits = lambda m, u, kernel=kernel: kernel
        own = [t.to(dtype).detach().requires_grad_() for t in drawn]
        states = followed(*own, way)
        grads = torch.autograd.grad(states.square().sum(), own, create_graph=True)
        plain = torch.autograd.grad(followed(*own, way).square().sum(), own)
        second = torch.autograd.grad(sum(t.square().sum() for t in grads), own)
        m, u, first = (spread(t.to(dtype)).detach().requires_grad_() for t in drawn)
        apart = torch.autograd.grad(
            followed(m, u, first, way), (m, u, first), spread(grad.to(dtype))
        )
        alone = torch.autograd.grad(followed(m, u.detach(), first.detach(), way).sum(), m)
        every = states, *grads, *plain, *second, *apart, *alone
        found.append([t.detach() for t in every])
    return [relative_error(ours, want) for want, ours in zip(*found)]


@needs_triton
@pytest.mark.parametrize(("d_k", "d_v"), [(16, 40), (12, 8)])
def test_the_kernel_follows_maps_forward_and_back(interpreted, d_k, d_v) -> None:
    assert max(interpreted.submit(follows_maps, d_k, d_v).result()) < 1e-5


@pytest.mark.parametrize("seed", range(6))
def test_states_of_each_chain_are_stored_one_after_another(seed) -> None:
    """The first one of a chain, then that after each of its maps."""
    draw = random.Random(seed)
    maps = draw.sample(range(9), 9)
    cuts = sorted(draw.randrange(10) for _ in range(4))
    chains = [maps[a:b] for a, b in zip((0, *cuts), (*cuts, 9))]
    way = Levels.of(chains, torch.device("cpu"))
    m, u, first = (torch.randn(n, 1, 2, 2).double() for n in (9, 9, len(chains)))
    want, before, offsets = [], [], [0]
    for state, chain in zip(first, chains):
        want.append(state)
        for number in chain:
            before.append(len(want) - 1)
            want.append(m[number] @ want[-1] + u[number])
        offsets.append(len(want))
    assert relative_error(followed(m, u, first, way), torch.stack(want)) < 1e-12
    assert (way.places.tolist(), way.before.tolist()) == (maps, before)
    assert way.offsets.tolist() == offsets
    assert {way.places.dtype, way.offsets.dtype} == {torch.int32}  # as kernels read them


def test_a_sample_without_tokens_keeps_its_first_state() -> None:
    states, initial, samples = torch.ones(1, 1), torch.tensor([[5.0], [6.0]]), torch.tensor([1])
    assert last_states(2, samples, states, initial).tolist() == [[5.0], [1.0]]
    assert last_states(2, samples, states, None).tolist() == [[0.0], [1.0]]


FITS: dict[str, dict[str, Any]] = {
    "full maps": {},
    "the largest": {"d_k": 128, "fits": True},
    "larger ones": {"d_k": 129, "fits": False},
    "a diagonal": {"ndim": 3, "fits": False},
    "float64": {"dtype": torch.float64, "fits": False},
    "CPUs": {"is_cuda": False, "fits": False},
    "no Triton": {"has_triton": False, "fits": False},
}


@pytest.mark.parametrize("case", FITS)
def test_where_the_kernel_fits(case, monkeypatch) -> None:
    given = {
        "d_k": 16, "ndim": 4, "dtype": torch.float32, "is_cuda": True, "has_triton": True,
        "fits": True, **FITS[case],
    }  # fmt: skip
    monkeypatch.setattr(levels, "has_triton", lambda: given["has_triton"])
    m = SimpleNamespace(ndim=given["ndim"], shape=(1, 1, given["d_k"] + 1, given["d_k"]))
    u = SimpleNamespace(is_cuda=given["is_cuda"], dtype=given["dtype"])
    assert kernel_fits(m, u) == given["fits"]


def test_the_kernel_follows_maps_that_there_are(monkeypatch) -> None:
    """What it is given, in this order; without any map there is nothing to launch."""
    given, cpu = [], torch.device("cpu")
    monkeypatch.setattr(levels, "kernel_fits", lambda m, u: (len(m), len(u)) == (2, 3))
    monkeypatch.setattr(levels._Follow, "apply", lambda *args: given.append(args))
    m, u, first = (torch.zeros(n, 1, 1, 1) for n in (2, 3, 4))
    followed(m, u, first, one := Levels.of([[1]], cpu))
    assert followed(m, u, first, Levels.of([[]] * 4, cpu)).shape == first.shape
    ((*tensors, way),) = given
    assert way is one
    assert all(a is b for a, b in zip(tensors, (m, u, first), strict=True))
