"""The loss of routers: that of transformers for the whole batch, on every rank of a ring."""

import sys

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from transformers.models.llama import modeling_llama
from transformers.models.mixtral import modeling_mixtral

from ring_attention_pytorch.integrations.routers import balance, own_router_loss, with_router_loss
from ring_attention_pytorch.ranks.ring import Ring
from tests.support import threads
from tests.support.reference import relative_error

LOGITS = tuple(torch.randn(2, 12, 5, generator=torch.Generator().manual_seed(i)) for i in (0, 1))
MASK = torch.ones(2, 12).long()
MASK[0, 9:], MASK[1, :2] = 0, 0


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("top_k", [1, 2])
def test_it_is_the_loss_of_the_whole_batch(size: int, top_k: int, masked: bool) -> None:
    whole = [t.clone().requires_grad_() for t in LOGITS]
    flat, mask = tuple(t.flatten(0, 1) for t in whole), MASK if masked else None
    want = modeling_mixtral.load_balancing_loss_func(flat, 5, top_k, mask)
    grads = torch.autograd.grad(want, whole)

    def main(ring: Ring) -> tuple[slice, list[Tensor]]:
        n = 12 // size
        at = slice(ring.rank * n, ring.rank * n + n)
        mine = [t[:, at].clone().requires_grad_() for t in LOGITS]
        flat = tuple(t.flatten(0, 1) for t in mine)
        found = balance(flat, top_k, MASK[:, at] if masked else None, ring)
        assert relative_error(found, want) < 1e-6
        return at, [grad / size for grad in torch.autograd.grad(found, mine)]  # averaged

    for at, found in threads.run(size, main)[0]:
        for grad, of_whole in zip(found, grads):
            assert relative_error(grad, of_whole[:, at]) < 1e-5


def test_models_call_ours_inside_and_their_own_afterwards() -> None:
    before = modeling_mixtral.load_balancing_loss_func
    with own_router_loss([modeling_mixtral], "ours"):
        assert modeling_mixtral.load_balancing_loss_func == "ours"
    with pytest.raises(ZeroDivisionError), own_router_loss([modeling_mixtral], "ours"):
        raise ZeroDivisionError
    assert modeling_mixtral.load_balancing_loss_func is before


def test_only_models_with_such_a_loss_are_listed() -> None:
    """By their Python modules, each once."""

    def model_of(module) -> object:
        return type("Model", (), {"__module__": module.__name__})()

    some = [model_of(modeling_mixtral), model_of(modeling_llama), model_of(modeling_mixtral)]
    assert with_router_loss(some) == [sys.modules[modeling_mixtral.__name__]]
    assert with_router_loss([]) == []
