"""Feed-forwards by chunks of tokens: the same numbers, and less memory."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call

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


class Scaled(nn.Module):
    """A feed-forward with tied weights and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(DIM, DIM, dtype=torch.float64) for _ in range(2))
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.randn(DIM, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(nn.functional.silu(self.first(x)) * self.scale)


@pytest.mark.parametrize("apart", [False, True], ids=["tied", "weights apart"])
def test_chunks_are_computed_again_with_the_weights_that_a_call_got(apart: bool) -> None:
    """`functional_call` gives a module weights for its forward alone; backward is later."""
    torch.manual_seed(3)
    module = Scaled()
    x, dy = torch.randn(2, 1, 9, DIM, dtype=torch.float64)
    names = ["first.weight", "first.bias", "second.bias", *["second.weight"] * apart]
    given = {name: torch.randn_like(module.get_parameter(name)) for name in names}
    given["scale"] = torch.randn(DIM, dtype=torch.float64)

    def found() -> list[Tensor]:
        inputs = [t.clone().requires_grad_() for t in (x, *given.values())]
        used = {name: 2 * t for name, t in zip(given, inputs[1:])}  # not leaves
        y = functional_call(module, used, (inputs[0],), tie_weights=not apart)
        return [y, *torch.autograd.grad(y, inputs, dy)]

    want = found()
    chunk_tokens(module, tokens=4)
    for got, right in zip(found(), want, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", ["first.weight", "second.bias", "scale"])
def test_weights_that_change_before_backward_are_an_error(name: str) -> None:
    """Of a plain module it is PyTorch's error, for what it saved."""
    module = Scaled()
    chunk_tokens(module, tokens=4)
    x = torch.randn(1, 9, DIM, dtype=torch.float64, requires_grad=True)
    y = module(x)
    changed = {**dict(module.named_parameters()), **dict(module.named_buffers())}[name]
    with torch.no_grad():
        changed.mul_(3.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    module(x).sum().backward()  # the next call is right


def test_an_optimizer_may_step_as_soon_as_a_weight_has_its_gradient() -> None:
    torch.manual_seed(4)

    @torch.no_grad()
    def step(p: Tensor) -> None:
        p.sub_(p.grad)

    modules = [Scaled()]
    modules.append(copy.deepcopy(modules[0]))
    chunk_tokens(modules[1], tokens=4)
    x = torch.randn(1, 9, DIM, dtype=torch.float64)
    for module in modules:
        for p in module.parameters():
            p.register_post_accumulate_grad_hook(step)
        for _ in range(2):
            module.zero_grad()
            module(x).square().sum().backward()
    for got, want in zip(modules[1].parameters(), modules[0].parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_saving_on_the_cpu_copies_no_weights() -> None:
    module = Gated()
    chunk_tokens(module, tokens=2)
    x = torch.randn(1, 16, DIM, dtype=torch.float64, requires_grad=True)
    packed: list[tuple[int, ...]] = []

    def pack(t: Tensor) -> Tensor:
        packed.append(tuple(t.shape))
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        module(x)
    assert {*packed} <= {(1, 2, DIM)}
    with save_on_cpu():
        y = module(x)
    y.sum().backward()


def trained(inside: bool, chunked: bool) -> list[Tensor]:
    """Return weights after two steps over two ranks, with FSDP around a module or inside it."""
    torch.manual_seed(5)
    module = Gated()
    if chunked:
        chunk_tokens(module, tokens=4)
    mesh = init_device_mesh("cpu", (2,))
    for each in (module.gate, module.up, module.down) if inside else ():
        fully_shard(each, mesh=mesh)
    fully_shard(module, mesh=mesh)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        module(torch.randn(1, 9, DIM, dtype=torch.float64)).square().sum().backward()
        optimizer.step()
    return [p.full_tensor().detach() for p in module.parameters()]


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "around"])
def test_weights_that_fsdp_gathers_are_those_that_chunks_read(inside: bool, pools) -> None:
    plain, chunked = (pools(2).run(trained, inside, chunked) for chunked in (False, True))
    for want, got in zip(plain, chunked, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
