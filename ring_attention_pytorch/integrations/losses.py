"""Replace the losses of transformers' models in a block, and check the labels they get.

    ForCausalLM             shifted labels: each token's next one
    ForMaskedLM             labels in place: each token's own
    nn.CrossEntropyLoss     called by a model itself: labels in place, others are an error

transformers has a table of losses. Older models call PyTorch's loss instead.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import LOSS_MAPPING

from ring_attention_pytorch.ranks.ring import Group
from ring_attention_pytorch.training.batches import ShardedBatch
from ring_attention_pytorch.training.loss_inputs import reads_at_once
from ring_attention_pytorch.training.losses import counted_cross_entropy, ring_cross_entropy

_MOVED: Final = ("ForCausalLM", "ForConditionalGeneration")
_IN_PLACE: Final = ("ForMaskedLM", "ForTokenClassification")
_original = nn.CrossEntropyLoss.forward


def labels_in_place(model: Any) -> bool:
    """Return whether a model's labels are of the tokens themselves, and need no shift.

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
    """Replace models' losses by `loss`, and PyTorch's cross entropy by `inline`, in the block.

    `inline` returns None for a call that is not a model's loss. Other losses raise, unless
    `of_wholes()` returns True: their inputs are whole sequences, and they run unchanged.
    """
    losses: dict[str, Any] = LOSS_MAPPING
    entropies: Any = nn.CrossEntropyLoss
    before = dict(losses)

    def forward(entropy: nn.CrossEntropyLoss, x: Tensor, labels: Tensor) -> Tensor:
        found = inline(entropy, x, labels)
        return _original(entropy, x, labels) if found is None else found

    outer = entropies.forward
    for kind, own in before.items():
        known = kind in (*_MOVED, *_IN_PLACE)
        other = partial(_other_loss, kind, own, of_wholes)
        losses[kind] = partial(loss, in_place=kind in _IN_PLACE) if known else other
    entropies.forward = forward
    try:
        yield
    finally:
        entropies.forward = outer
        losses.update(before)


def check_labels(
    batch: ShardedBatch, labels: Tensor | None, moved: Tensor | None, in_place: bool, counted: bool
) -> None:
    """Raise ValueError if a model computes its loss from other labels than the batch's.

    Args:
        labels, moved: the model's arguments `labels` and `shift_labels`.
        in_place: whether labels are of the tokens themselves in this model.
        counted: whether the caller has counted the labels, to divide the loss by.
    """
    ahead, here = batch.get("shift_labels"), batch.in_place
    mine = ahead if here is None or not in_place else here
    if in_place or moved is None:
        right = are_equal(labels, mine) or (not in_place and are_equal(labels, here))
    else:
        right = labels is not None and are_equal(moved, mine)
    if not right:
        raise ValueError(
            "labels are not the batch's; a label is of the next token, which may be on another "
            "rank: give labels to shard_batch, and call model(**inputs)"
        )
    if counted and "loss_weights" in batch:
        raise ValueError(
            "num_items counts labels that all weigh the same, so loss_weights would be ignored; "
            "leave one of them out"
        )
    if mine is here and (counted or "loss_weights" in batch):
        raise ValueError(
            "labels predict the tokens themselves in this model, and what counts them was moved "
            "ahead; give shard_batch shift_labels=False"
        )


def check_items(given: Any, known: Sequence[Tensor | None]) -> None:
    """Raise ValueError if a model's `num_items_in_batch` is none of the block's.

    Values on a GPU are not read: `nan_for_other_items` is for them.
    """
    if not _on_gpu(given) and not bool(_equals_any(torch.as_tensor(given), known)):
        raise ValueError(
            f"num_items_in_batch={given} is not the block's: the loss is the mean over this "
            "batch's real tokens; to accumulate several batches multiply each loss by the batch's "
            "share of their tokens, or set num_items of what ring_forward returns"
        )


def nan_for_other_items(loss: Tensor, given: Any, known: Sequence[Tensor | None]) -> Tensor:
    """Return a loss, or NaN if a model's `num_items_in_batch` on a GPU is none of the block's."""
    return loss.where(_equals_any(given, known), torch.nan) if _on_gpu(given) else loss


def _equals_any(given: Tensor, known: Sequence[Tensor | None]) -> Tensor:
    """Return whether a number equals one of these, cast alike: FSDP casts inputs to 16 bits."""
    dtype = given.dtype if given.is_floating_point() else torch.float64
    equal = [given == items.to(given.device, dtype) for items in known if items is not None]
    return torch.stack(equal).any() if equal else torch.zeros_like(given, dtype=torch.bool)


def _on_gpu(given: Any) -> bool:
    return isinstance(given, Tensor) and not reads_at_once(given)


def check_entropy(
    model: str, function: nn.CrossEntropyLoss, labels: Tensor, mine: Tensor | None
) -> None:
    """Raise ValueError if a model's own call of PyTorch's cross entropy can't be spread."""
    plain = function.weight is None and function.label_smoothing == 0
    if plain and function.reduction == "mean" and are_equal(labels, mine):
        return
    raise ValueError(
        f"{model} computes a cross entropy by itself, of labels that are not the batch's in place, "
        "or weighted, or smoothed; leave labels out, with ring_forward(batch, labels=False), and "
        "compute ring_cross_entropy(logits, batch.labels)"
    )


def loss_of(
    batch: ShardedBatch,
    logits: Tensor,
    in_place: bool,
    *,
    group: Group,
    num_items: Tensor | None,
    ignore_index: int,
) -> Tensor:
    """Compute the loss of a batch's logits `[b, n, classes]`: the mean over all ranks' tokens.

    With `num_items` it is the sum over this rank's tokens, divided by `num_items`.
    """
    here = in_place and batch.in_place is not None
    labels: Any = batch.in_place if here else batch.labels
    labels = labels.to(logits.device)
    if num_items is None:
        weights = batch.get("loss_weights")
        return ring_cross_entropy(
            logits, labels, weights=weights, group=group, ignore_index=ignore_index
        )
    return counted_cross_entropy(logits, labels, num_items, group, ignore_index)


def are_equal(a: Tensor | None, b: Tensor | None) -> bool:
    """Return whether two tensors have the same values, in any shape, dtype and device."""
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
