"""Losses of transformers' models, in a block: which labels they take, and that they are ours.

    ForCausalLM             what a token predicts: labels that were moved ahead
    ForMaskedLM             what a token is: labels in place
    nn.CrossEntropyLoss     called by a model itself: labels in place, or nobody's

transformers keeps losses in a table. Older models call PyTorch's own loss.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import LOSS_MAPPING

_MOVED: Final = ("ForCausalLM", "ForConditionalGeneration")
_IN_PLACE: Final = ("ForMaskedLM", "ForTokenClassification")
_original = nn.CrossEntropyLoss.forward


def labels_in_place(model: Any) -> bool:
    """Tell whether a model's labels are of the tokens themselves: `shard_batch` need not move them.

    >>> from transformers import ModernBertConfig, ModernBertForMaskedLM
    >>> sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, vocab_size=9)
    >>> config = ModernBertConfig(**sizes, num_attention_heads=2, pad_token_id=0)
    >>> labels_in_place(ModernBertForMaskedLM(config))
    True
    """
    return getattr(model, "loss_type", None) in _IN_PLACE


@contextmanager
def own_losses(
    loss: Callable[..., Tensor],
    inline: Callable[..., Tensor | None],
    of_wholes: Callable[[], bool],
) -> Iterator[None]:
    """Let models call `loss` for theirs, and `inline` for PyTorch's cross entropy.

    `inline` returns None for what is none of a model's losses. `of_wholes` tells whether other
    losses are now of whole sequences: then they stay as they are.
    """
    before = dict(LOSS_MAPPING)

    def forward(entropy: nn.CrossEntropyLoss, x: Tensor, labels: Tensor) -> Tensor:
        found = inline(entropy, x, labels)
        return _original(entropy, x, labels) if found is None else found

    outer = nn.CrossEntropyLoss.forward
    for kind, own in before.items():
        known = kind in (*_MOVED, *_IN_PLACE)
        other = partial(_other_loss, kind, own, of_wholes)
        LOSS_MAPPING[kind] = partial(loss, in_place=kind in _IN_PLACE) if known else other
    nn.CrossEntropyLoss.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.CrossEntropyLoss.forward = outer  # type: ignore[method-assign]
        LOSS_MAPPING.update(before)


def same_labels(a: Tensor | None, b: Tensor | None) -> bool:
    """Tell whether these are the same labels, in whatever shape."""
    if a is None or b is None or a.numel() != b.numel():
        return False
    return a is b or torch.equal(a.to(b.device, b.dtype).reshape(b.shape), b)


def _other_loss(
    kind: str, own: Callable[..., Tensor], of_wholes: Callable[[], bool], *args: Any, **given: Any
) -> Tensor:
    if of_wholes():
        return own(*args, **given)
    raise ValueError(
        f"ring_forward: a model's loss is spread for {', '.join((*_MOVED, *_IN_PLACE))}, not for "
        f"{kind}; leave labels out, and compute the loss of what batch.unshard gathers"
    )
