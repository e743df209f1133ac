"""The Triton passes through Triton's interpreter, in a process of its own, against PyTorch."""

from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from ring_attention_pytorch import CoordinateDescentRouter, coordinate_descent
from tests.support.interpreter import needs_triton


def descent_errors(n: int, n_iters: int, masked: bool, dtype: torch.dtype) -> list[float]:
    """Largest differences of gates and gradients; more iterations than the original's 20 too."""
    torch.manual_seed(n)
    s = (torch.randn(2, n, dtype=torch.float64) * 3).to(dtype).requires_grad_()
    mask = torch.rand(2, n) < 0.7 if masked else None
    dout, found = torch.randn_like(s), []
    options = dict(n_iters=n_iters, k=5, eps=0.05, eps_init=4.0, eps_decay=0.8, mask=mask)
    for use_triton in (False, True):
        p = coordinate_descent(s, use_triton=use_triton, **options)
        found.append((p.detach(), torch.autograd.grad(p, s, dout)[0]))
    return [(a - b).abs().max().item() for a, b in zip(*found)]


def router_errors() -> list[float]:
    """In a causal choice by windows."""
    from tests.support.routing_cases import Case, results

    found = []
    for use_triton in (False, True):
        case = Case("causal feedforward")
        module = case.make()
        made = CoordinateDescentRouter(8, n_iters=9, use_triton=use_triton, straight_through=False)
        made.double().load_state_dict(module.router.state_dict())
        module.router = made
        found.append(results(module, case, case.data()))
    return [(found[0][name] - found[1][name]).abs().max().item() for name in found[0]]


def negative_errors() -> list[float]:
    """Return the errors where memory has the other sign of scores."""
    from tests.support.lazy import negative

    s = torch.randn(2, 40, dtype=torch.float64)
    found = []
    for each in (s, negative(s)):
        leaf = each.requires_grad_()
        gates = coordinate_descent(leaf, n_iters=9, k=5, use_triton=True)
        found.append((gates, *torch.autograd.grad(gates.square().sum(), leaf)))
    return [(a - b).abs().max().item() for a, b in zip(*found)]


@needs_triton
def test_triton_reads_scores_and_not_their_memory(interpreted: ProcessPoolExecutor) -> None:
    assert max(interpreted.submit(negative_errors).result()) == 0


@needs_triton
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("n", "n_iters"), [(1, 3), (40, 1), (40, 60), (1024, 5), (3001, 25)])
def test_triton_gives_what_pytorch_gives(
    interpreted: ProcessPoolExecutor, n: int, n_iters: int, masked: bool
) -> None:
    errors = interpreted.submit(descent_errors, n, n_iters, masked, torch.float64).result()
    assert max(errors) < 1e-11


@needs_triton
def test_triton_in_float32_and_in_a_router(interpreted: ProcessPoolExecutor) -> None:
    assert max(interpreted.submit(descent_errors, 50, 30, True, torch.float32).result()) < 1e-5
    assert max(interpreted.submit(router_errors).result()) < 1e-11


def test_triton_is_refused_where_it_can_t_run() -> None:
    s = torch.randn(1, 9)
    with pytest.raises(ValueError, match="use_triton"):
        coordinate_descent(s, n_iters=3, k=2, use_triton=True)
    router = CoordinateDescentRouter(8, n_iters=3, use_triton=True)
    with pytest.raises(ValueError, match="use_triton"):
        router(torch.randn(1, 9, 8), num_tokens=2)
