"""Questions about derivatives, and Functions under torch.func and outside of it."""

from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from ring_attention_pytorch.runtime import torch_func
from tests.support.lazy import LAZY


class Cube(torch_func.Function):
    """x ** 3, which notes how its backward is run."""

    first_order: ClassVar[list[bool]] = []

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        Cube.first_order.append(torch_func.is_first_order())
        (x,) = ctx.saved_tensors
        return None if grad is None else 3 * x**2 * grad

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * tangent


X = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)


def test_it_is_the_same_under_transforms_and_outside():
    x = X.clone().requires_grad_()
    (got,) = torch.autograd.grad(Cube.apply(x).sum(), x)
    assert torch.equal(got, 3 * X**2)
    assert torch.equal(torch.func.grad(lambda t: Cube.apply(t).sum())(X), 3 * X**2)
    twice = torch.func.grad(lambda t: torch.func.grad(lambda u: Cube.apply(u).sum())(t).sum())
    assert torch.equal(twice(X), 6 * X)


def test_forward_mode_saves_what_it_needs():
    with forward_ad.dual_level():
        out = Cube.apply(forward_ad.make_dual(X, torch.ones_like(X)))
        assert torch.equal(forward_ad.unpack_dual(out).tangent, 3 * X**2)
    _, tangent = torch.func.jvp(Cube.apply, (X,), (torch.ones_like(X),))
    assert torch.equal(tangent, 3 * X**2)


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_backward_knows_whether_it_is_differentiated(create_graph):
    Cube.first_order.clear()
    x = X.clone().requires_grad_()
    torch.autograd.grad(Cube.apply(x).sum(), x, create_graph=create_graph)
    assert Cube.first_order == [not create_graph]


def test_who_needs_derivatives():
    leaf = X.clone().requires_grad_()
    assert torch_func.needs_derivatives((X, None, leaf))
    assert not torch_func.needs_derivatives((X, None))
    with torch.no_grad():
        assert not torch_func.needs_derivatives((leaf,))
        with forward_ad.dual_level():
            assert torch_func.needs_derivatives((X,))
    asked: list[bool] = []
    torch.func.vmap(lambda t: asked.append(torch_func.needs_derivatives(())) or t)(X)
    assert asked == [True]


def test_a_second_order_that_is_not_there_is_refused():
    with torch.no_grad():
        torch_func.refuse_second_order("this")
    with pytest.raises(NotImplementedError, match="this can't be differentiated twice"):
        torch_func.refuse_second_order("this")


def test_tangents_are_what_ranks_compare():
    assert torch_func.tangents_note(X, None) == {"tangents": False}
    with forward_ad.dual_level():
        assert torch_func.tangents_note(X, None) == {"tangents": False}
        dual = forward_ad.make_dual(X, torch.ones_like(X))
        assert torch_func.tangents_note(X, None, dual) == {"tangents": True}


def test_what_runs_apart_is_no_part_of_an_export():
    with (
        mock.patch.object(torch.compiler, "_is_exporting_flag", True),
        pytest.raises(NotImplementedError, match="can't be exported"),
    ):
        torch_func.run_apart(torch.sum, X)
    assert torch_func.run_apart(torch.sum, X) == X.sum()


def test_plain_tensors_are_themselves():
    t = torch.randn(3, 4, requires_grad=True)
    view = t.T[::2]
    for one in (None, t, view, t.detach()):
        assert torch_func.resolved(one) is one


def test_memory_holds_what_is_meant():
    z = torch.randn(5, dtype=torch.complex128)
    imag = z.conj().imag
    got = torch_func.resolved(imag)
    assert imag.is_neg()
    assert not got.is_neg()
    assert torch.equal(got, -z.imag)


def test_it_is_differentiable():
    z = torch.randn(5, dtype=torch.complex128, requires_grad=True)
    weights = torch.randn(5, dtype=torch.float64)
    (got,) = torch.autograd.grad((torch_func.resolved(z.conj().imag) * weights).sum(), z)
    (want,) = torch.autograd.grad((-z.imag * weights).sum(), z)
    assert torch.equal(got, want)


def test_every_kind_of_lazy_tensor_is_resolved():
    t = torch.randn(2, 3, 1, 4)
    for kind, make in LAZY.items():
        lazy = make(t)
        got = torch_func.resolved(lazy)
        assert type(got) is torch.Tensor, kind
        assert not got.is_neg(), kind
