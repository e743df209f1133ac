"""Feed-forwards by chunks of tokens: memory that doesn't grow with the sequence.

    x  [ chunk | chunk | chunk | chunk ]      forward keeps x, and nothing from inside a chunk
          │       │       │       │
         feed-forward, one after another      backward computes a chunk again, and frees it
          │       │       │       │
    y  [ chunk | chunk | chunk | chunk ]

With a long sequence it is not attention that fills a GPU. The inner activations of a feed-forward
are several times as wide as the model: with 128k tokens a GPU, one layer of a Llama 8B has three of
3.8 GB each, while backward computes a checkpointed layer again.
Jacobs et al. 2025, "Arctic Long Sequence Training", section 3, has the same for its loss and MLPs.
"""

import sys
from collections.abc import Mapping
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ring_attention_pytorch.arguments import check_least, checked, checks_of
from ring_attention_pytorch.runtime.recompute import recomputed


@checked
def chunk_tokens(*modules: nn.Module, tokens: int, dim: int = 1) -> None:
    """Let modules compute a chunk of tokens at a time, and again in backward.

    Args:
        modules: each maps a tensor to one with as many tokens, every token by itself:
            feed-forwards, norms, and projections. Names of parameters and the state dict stay as
            they are. A mixture of experts that has a capacity, or sums over all tokens, is none of
            these.
        tokens: of a chunk; the last may have fewer.
        dim: the dimension of tokens.

    Raises:
        ValueError: `tokens` is less than 1, there is no module, or one is passed twice or already
            computes by chunks; or, in a call, a module got more than one argument, or its result
            has another number of tokens.
        RuntimeError: in backward, if a parameter or buffer was changed in place since the call.

    >>> mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    >>> chunk_tokens(mlp, tokens=256)
    >>> mlp(torch.zeros(1, 1000, 8)).shape
    torch.Size([1, 1000, 8])
    """
    with checks_of("chunk_tokens"):
        check_least(1, tokens=tokens)
    if not modules:
        raise ValueError("chunk_tokens: pass the modules that are to compute by chunks, got none")
    if len({*map(id, modules)}) < len(modules):
        raise ValueError("chunk_tokens: a module is among the modules twice; pass each once")
    for module in modules:
        if isinstance(module.forward, _ByChunks):
            raise ValueError(
                f"chunk_tokens: {type(module).__name__} already computes {module.forward.tokens} "
                "tokens at a time; pass each module once"
            )
    for module in modules:
        module.forward = _ByChunks(module, tokens, dim)


class _ByChunks:
    """A module's forward, for a chunk of tokens after the other."""

    def __init__(self, module: nn.Module, tokens: int, dim: int) -> None:
        self.module, self.forward, self.tokens, self.dim = module, module.forward, tokens, dim

    def __call__(self, x: Tensor, *others: object, **options: object) -> Tensor:
        if others or options:
            raise ValueError(
                "chunk_tokens: a module that computes by chunks takes one tensor, "
                f"got {len(others) + len(options)} more arguments; leave this module out"
            )
        compute = self._one
        if torch.is_grad_enabled():
            read = {} if is_compiling() else _read(self.module)
            compute = partial(recomputed, partial(self._by, read), reads=read.values())
        return torch.cat([compute(part) for part in x.split(self.tokens, self.dim)], self.dim)

    def _by(self, read: Mapping[str, Tensor], part: Tensor) -> Tensor:
        """Compute a chunk with these parameters and buffers, whichever the module has now."""
        now = {} if is_compiling() else _read(self.module)
        if all(now.get(name) is t for name, t in read.items()):
            return self._one(part)
        # as after torch.func.functional_call
        by_name = {f"module.{name}": t for name, t in read.items()}
        return torch.func.functional_call(_Called(self), by_name, (part,), tie_weights=False)

    def _one(self, part: Tensor) -> Tensor:
        out = self.forward(part)
        if not isinstance(out, Tensor) or out.shape[self.dim] != part.shape[self.dim]:
            got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(
                "chunk_tokens: a module must return a tensor with as many tokens as it got, in "
                f"dimension {self.dim}: got {got} for {tuple(part.shape)}; leave this module out"
            )
        return out


class _Called(nn.Module):
    """A module that computes one chunk, without the hooks of the module by chunks."""

    def __init__(self, chunks: _ByChunks) -> None:
        super().__init__()
        self.module, self.chunks = chunks.module, chunks

    def forward(self, part: Tensor) -> Tensor:
        return self.chunks._one(part)


def _read(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters and buffers by name, as it reads them now.

    FSDP modules inside are left out: FSDP gathers their parameters for each of their calls.
    """
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    apart = tuple(
        f"{name}." for name, each in module.named_modules() if name and isinstance(each, fsdp)
    )
    found = chain(
        module.named_parameters(remove_duplicate=False),
        module.named_buffers(remove_duplicate=False),
    )
    return {name: t for name, t in found if not name.startswith(apart)}
