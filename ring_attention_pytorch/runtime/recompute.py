"""Functions whose insides backward computes again, by PyTorch's checkpoint.

Autograd raises if a tensor that it saved was changed in place. A checkpoint saves a function's
arguments only: weights, say, could be other numbers when it is run again.
"""

from collections.abc import Callable, Iterable

from torch import Tensor
from torch.compiler import is_compiling
from torch.utils.checkpoint import checkpoint


def recomputed(
    function: Callable[..., Tensor],
    *args: Tensor | None,
    reads: Iterable[Tensor | None],
    preserve_rng_state: bool = True,
) -> Tensor:
    """Call a function, and again in backward, which raises RuntimeError if it reads other numbers.

    Args:
        function: is called with `args`.
        reads: all other tensors whose values it reads. They are not packed by hooks of saved
            tensors, which would copy them once for each call.
        preserve_rng_state: as of PyTorch's checkpoint.

    >>> w = torch.ones(2, requires_grad=True)
    >>> y = recomputed(lambda x: torch.exp(w * x), torch.ones(2), reads=[w])
    >>> torch.autograd.grad(y.sum(), w)[0].tolist()
    [2.7182817459106445, 2.7182817459106445]
    """
    # a compiled graph saves all that it reads
    versions = [] if is_compiling() else [(t, version_of(t)) for t in reads if t is not None]

    def call(*given: Tensor | None) -> Tensor:
        for t, version in versions:
            if (now := version_of(t)) != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an "
                    f"inplace operation: [{t.type()} {list(t.shape)}] is at version {now}; "
                    f"expected version {version} instead. Backward computes chunks of tokens again "
                    "with it: change it after backward, or a clone of it"
                )
        return function(*given)

    return checkpoint(call, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)


def version_of(t: Tensor) -> int:
    """Return how often a tensor was changed in place; 0 for one of inference mode."""
    return 0 if t.is_inference() else t._version
