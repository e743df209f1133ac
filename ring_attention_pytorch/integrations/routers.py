"""The load-balancing loss of routers to experts, over all ranks' tokens.

transformers' models call `load_balancing_loss_func` of their own Python module. It multiplies two
means over tokens, so a mean of shards' losses is not the loss of the whole sequence.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ring_attention_pytorch.nn.loss import mean_over_ranks
from ring_attention_pytorch.ranks.ring import Ring

_NAME: Final = "load_balancing_loss_func"
_PARAMETERS: Final = ["gate_logits", "num_experts", "top_k", "attention_mask"]


@contextmanager
def own_router_loss(files: Sequence[Any], loss: Callable[..., Any]) -> Iterator[None]:
    """Replace the routers' loss of the models in these Python modules by `loss`, in the block."""
    before = [(module, getattr(module, _NAME)) for module in files]
    for module, _ in before:
        setattr(module, _NAME, loss)
    try:
        yield
    finally:
        for module, function in before:
            setattr(module, _NAME, function)


def with_router_loss(models: Sequence[PreTrainedModel]) -> list[Any]:
    """List the models' Python modules that define a routers' loss."""
    files = {type(m).__module__: sys.modules.get(type(m).__module__) for m in models}
    return [file for file in files.values() if _has_loss(file)]


def _has_loss(file: Any) -> bool:
    function = getattr(file, _NAME, None)
    return function is not None and [*inspect.signature(function).parameters] == _PARAMETERS


def balance(
    gate_logits: tuple[Tensor, ...], top_k: int, attention_mask: Tensor | None, ring: Ring
) -> Tensor:
    """Compute how unevenly all ranks' tokens are routed, 1 at best; the same on all ranks.

    Args:
        gate_logits: of each layer, `[b * n, experts]`, for this rank's tokens.
        top_k: experts per token.
        attention_mask: `[b, n]`, 0 or False for padding.
        ring: the ranks. Gradients averaged over them equal the gradients of one process.

    >>> from ring_attention_pytorch.ranks.ring import as_ring
    >>> round(balance((torch.eye(2),), 1, None, as_ring(None)).item(), 6)
    1.0
    """
    device, experts = gate_logits[0].device, gate_logits[0].shape[-1]
    chosen, chances, rows = [], [], torch.zeros((), device=device)
    for logits in gate_logits:
        weights = logits.to(device).softmax(-1)
        real = torch.ones_like(weights[:, 0], dtype=torch.float32)
        if attention_mask is not None:
            real = attention_mask.reshape(-1).to(real)
        taken = torch.zeros_like(weights, dtype=torch.float32)
        taken.scatter_(1, weights.topk(top_k, -1).indices, 1.0)
        chosen.append((taken * real[:, None]).sum(0))
        chances.append((weights.float() * real[:, None]).sum(0))
        rows = rows + real.sum()
    means = [
        mean_over_ranks(torch.stack(each).sum(0), rows.clone(), ring) for each in (chosen, chances)
    ]
    return experts * (means[0] * means[1]).sum()
