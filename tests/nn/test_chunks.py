"""Feed-forwards by chunks of tokens: the same numbers, and less memory."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ring_attention_pytorch import RingTransformer, chunk_tokens

DIM = 8


class Gated(nn.Module):
    """A feed-forward of the kind of Llama's."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(DIM, 4 * DIM, dtype=dtype) for _ in range(2))
        self.down = nn.Linear(4 * DIM, DIM, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def results(module: Callable[[Tensor], Tensor], of: nn.Module, x: Tensor, dy: Tensor):
    """Return the output, and gradients of the input and of all parameters."""
    x = x.clone().requires_grad_()
    y = module(x)
    return [y, *torch.autograd.grad(y, [x, *of.parameters()], dy)]


@pytest.mark.parametrize(("n", "tokens", "dim"), [(23, 5, 1), (23, 1, -2), (5, 8, 1), (16, 4, 0)])
def test_chunks_change_no_result_and_no_gradient(n: int, tokens: int, dim: int) -> None:
    torch.manual_seed(n)
    module = Gated()
    shape = (n, 2, DIM) if dim == 0 else (2, n, DIM)
    x, dy = torch.randn(2, *shape, dtype=torch.float64)
    want = results(module, module, x, dy)
    names = [*module.state_dict()]
    chunk_tokens(module, tokens=tokens, dim=dim)
    for got, right in zip(results(module, module, x, dy), want, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-13, atol=1e-13)
    with torch.no_grad():
        torch.testing.assert_close(module(x), want[0].detach(), rtol=1e-13, atol=1e-13)
    assert [*module.state_dict()] == names


def test_dropout_is_the_same_when_a_chunk_is_computed_again() -> None:
    module = nn.Sequential(nn.Linear(DIM, DIM), nn.Dropout(0.5))
    chunk_tokens(module, tokens=3)
    x = torch.ones(1, 10, DIM, requires_grad=True)
    y = module(x)
    (dx,) = torch.autograd.grad(y.sum(), x)
    kept = (y != 0).double() / 0.5
    torch.testing.assert_close(dx.double(), kept @ module[0].weight.double())


def test_only_the_input_is_kept() -> None:
    """Backward of a plain one needs the inner activations, four times as wide."""
    x = torch.randn(1, 64, DIM, requires_grad=True, dtype=torch.float64)

    def kept(module: nn.Module) -> int:
        storages: dict[int, int] = {}
        weights = {p.untyped_storage().data_ptr() for p in module.parameters()}

        def pack(t: Tensor) -> Tensor:
            storage = t.untyped_storage()
            if storage.data_ptr() not in weights:
                storages[storage.data_ptr()] = storage.nbytes()
            return t

        with saved_tensors_hooks(pack, lambda t: t):
            module(x)
        return sum(storages.values())

    module = Gated()
    plain = kept(module)
    chunk_tokens(module, tokens=8)
    assert kept(module) <= x.untyped_storage().nbytes()
    assert plain > 10 * x.untyped_storage().nbytes()


def test_a_model_s_feed_forwards_by_chunks() -> None:
    torch.manual_seed(0)
    model = RingTransformer(num_tokens=16, dim=DIM, depth=2, heads=2, dim_head=4, causal=True)
    other = copy.deepcopy(model)
    chunk_tokens(*(feed_forward for _, feed_forward in model.layers), tokens=4)
    copied = copy.deepcopy(model)
    ids = torch.randint(0, 16, (1, 13))
    want = other(ids, return_loss=True)
    for each in (model, copied):
        torch.testing.assert_close(each(ids, return_loss=True), want)
    copied.load_state_dict(other.state_dict())


def test_modules_that_are_not_of_single_tokens_are_refused() -> None:
    chunked = nn.Linear(DIM, DIM)
    chunk_tokens(chunked, tokens=2)
    with pytest.raises(ValueError, match="Linear already computes 2 tokens at a time"):
        chunk_tokens(nn.Linear(DIM, DIM), chunked, tokens=3)
    with pytest.raises(ValueError, match="tokens must be at least 1"):
        chunk_tokens(nn.Linear(DIM, DIM), tokens=0)
    with pytest.raises(ValueError, match="pass the modules that are to compute by chunks"):
        chunk_tokens(tokens=3)
    once = nn.Linear(DIM, DIM)
    with pytest.raises(ValueError, match="among the modules twice"):
        chunk_tokens(once, once, tokens=3)
    with pytest.raises(ValueError, match="takes one tensor, got 1 more arguments"):
        chunked(torch.zeros(1, 4, DIM), torch.zeros(1))
    pooled = nn.AdaptiveAvgPool1d(1)
    chunk_tokens(pooled, tokens=2, dim=2)
    with pytest.raises(ValueError, match="as many tokens as it got, in dimension 2"):
        pooled(torch.zeros(1, DIM, 4))
    several = nn.LSTM(DIM, DIM, batch_first=True)
    chunk_tokens(several, tokens=2)
    with pytest.raises(ValueError, match="got tuple for"):
        several(torch.zeros(1, 4, DIM))
