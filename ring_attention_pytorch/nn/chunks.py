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

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ring_attention_pytorch.arguments import check_least, checked, checks_of


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
        module.forward = _ByChunks(module.forward, tokens, dim)


class _ByChunks:
    """A module's forward, for a chunk of tokens after the other."""

    def __init__(self, forward: Callable[[Tensor], Tensor], tokens: int, dim: int) -> None:
        self.forward, self.tokens, self.dim = forward, tokens, dim

    def __call__(self, x: Tensor, *others: object, **options: object) -> Tensor:
        if others or options:
            raise ValueError(
                "chunk_tokens: a module that computes by chunks takes one tensor, "
                f"got {len(others) + len(options)} more arguments; leave this module out"
            )
        again = partial(checkpoint, self._one, use_reentrant=False)
        compute = again if torch.is_grad_enabled() else self._one
        return torch.cat([compute(part) for part in x.split(self.tokens, self.dim)], self.dim)

    def _one(self, part: Tensor) -> Tensor:
        out = self.forward(part)
        if not isinstance(out, Tensor) or out.shape[self.dim] != part.shape[self.dim]:
            got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(
                "chunk_tokens: a module must return a tensor with as many tokens as it got, in "
                f"dimension {self.dim}: got {got} for {tuple(part.shape)}; leave this module out"
            )
        return out
