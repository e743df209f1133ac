"""Models that take and return whole sequences, while each rank computes only its own tokens.

    whole ids, mask, labels         the same on all ranks of a ring
        │ hook before               shard_batch, the block of ring_forward
    the model, on this rank's tokens
        │ hook after                gathers its results for each token
    log-probabilities, scores       whole, the same on all ranks, with gradients

Every rank computes the same loss from them. Gradients averaged over ranks, as DDP and FSDP do,
equal the gradients of one process.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GenericForSequenceClassification

from ring_attention_pytorch.integrations.models import RingForward, ring_forward
from ring_attention_pytorch.plan.placement import note_whole
from ring_attention_pytorch.ranks.alone import in_one_process
from ring_attention_pytorch.training.batches import ShardedBatch

Shard = Callable[[Mapping[str, Any]], ShardedBatch]
_TAKEN = ("input_ids", "attention_mask", "position_ids", "labels")
_OF_IMAGES = ("pixel_", "image_", "video_", "mm_token_type_ids")
_IDLE = ("use_cache", "fused_lm_head", "return_dict")  # they don't depend on other tokens


class _Spread:
    """The state that one model's hooks share: how to shard, and the open blocks."""

    def __init__(self, model: nn.Module, shard: Shard, options: Mapping[str, Any]):
        self.name, self.shard, self.options = type(model).__name__, shard, dict(options)
        self.opened: list[RingForward] = []

    def enter(self, given: Mapping[str, Any]) -> RingForward:
        """Shard a model's whole inputs, and open their block."""
        more = [
            name for name, value in given.items()
            if name not in (*_TAKEN, *_IDLE) and value is not None and value is not False
        ]  # fmt: skip
        check_no_images(self.name, more)
        if more:
            raise ValueError(
                f"{self.name}: {', '.join(more)} can't be spread; leave it out of the dataset or "
                "the collator, or take it from the inputs in a compute_loss of your own. Models "
                "that score sequences are passed columns of one real number a row, [batch]"
            )
        whole = {name: given[name] for name in _TAKEN if given.get(name) is not None}
        forward = ring_forward(self.shard(whole), labels=False, **self.options)
        forward.__enter__()
        self.opened.append(forward)
        return forward

    def leave(self, failed: bool) -> ShardedBatch:
        """Close the block, and return its batch."""
        forward = self.opened.pop()
        forward.__exit__(RuntimeError if failed else None)
        return forward.batch


def check_no_images(caller: str, given: Iterable[str]) -> None:
    """Raise ValueError if inputs of a trainer's model, by their names, are of images."""
    if images := [name for name in given if name.startswith(_OF_IMAGES)]:
        raise ValueError(
            f"{caller}: {', '.join(images)} are of whole images, which trainers don't spread; do "
            "so in a loop of your own: shard_batch(merged(model, batch)), then text_states(model, "
            "inputs), both of ring_attention_pytorch.integrations.multimodal, which has the example"
        )


def spread_probabilities(model: nn.Module, shard: Shard, options: Mapping[str, Any]) -> None:
    """Spread a model with TRL's fused head, in calls with `fused_lm_head=True`.

    Its outputs per token are then `[b, length - 1]`, of whole sequences, as in one process.
    """
    spread = _Spread(model, shard, options)

    def before(_: nn.Module, args: Any, given: dict[str, Any]) -> Any:
        if not given.get("fused_lm_head") or in_one_process:
            return None  # generation, or sequences stay whole
        if args:
            raise ValueError(f"{spread.name}: whole sequences are given by name")
        forward = spread.enter(given)
        labels = forward.batch.labels
        return (), {
            **forward.inputs, "labels": labels, "shift_labels": labels, "fused_lm_head": True,
        }  # fmt: skip

    def after(_: nn.Module, args: Any, given: dict[str, Any], out: Any) -> Any:
        if not given.get("fused_lm_head") or not spread.opened:
            return None
        batch = spread.leave(out is None)
        return None if out is None else _of_whole_sequences(out, batch)

    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(after, with_kwargs=True, always_call=True)


def _of_whole_sequences(out: Any, batch: ShardedBatch) -> Any:
    """Gather a fused head's outputs per token, in one message forward and one backward."""
    mine = {name: t for name, t in out.items() if isinstance(t, Tensor) and t.ndim == 2}
    wide = out.log_probs.dtype
    rows = torch.stack([t.to(wide) for t in mine.values()], dim=2)
    whole = batch.unshard(rows)[:, :-1].movedim(2, 0)  # the last token predicts nothing
    whole = whole.contiguous()  # as DDP copies them: sums of other strides round differently
    pairs = zip(mine.items(), whole, strict=True)
    return type(out)(**{name: each.to(t.dtype) for (name, t), each in pairs})  # without its loss


def spread_scores(model: nn.Module, shard: Shard, options: Mapping[str, Any]) -> None:
    """Spread a transformers model that scores a sequence by its last token.

    Its layers see this rank's tokens. The scores of all tokens are gathered, and the model picks
    the last token's, as in one process.

    Raises:
        ValueError: the model pools in another way.
    """
    if not isinstance(model, GenericForSequenceClassification):
        raise ValueError(
            f"{type(model).__name__} pools in a way of its own; known are models that derive from "
            "transformers' GenericForSequenceClassification, as LlamaForSequenceClassification"
        )
    spread, base = _Spread(model, shard, options), getattr(model, model.base_model_prefix)

    def before(_: nn.Module, args: Any, given: dict[str, Any]) -> None:
        if in_one_process:
            return
        if args:
            raise ValueError(f"{spread.name}: whole sequences are given by name")
        rows = [name for name, value in given.items() if _is_of_rows(value)]  # as "margin"
        spread.enter({name: value for name, value in given.items() if name not in rows})

    def of_this_rank(_: nn.Module, args: Any, given: Any) -> Any:
        return ((), dict(spread.opened[-1].inputs)) if spread.opened else None

    def gather(_: nn.Module, args: Any, scores: Tensor) -> Tensor:
        return spread.opened[-1].batch.unshard(scores) if spread.opened else scores

    def after(_: nn.Module, args: Any, given: dict[str, Any], out: Any) -> None:
        if spread.opened:
            spread.leave(out is None)

    model.register_forward_pre_hook(before, with_kwargs=True)
    base.register_forward_pre_hook(of_this_rank, with_kwargs=True)
    model.score.register_forward_hook(gather)
    model.register_forward_hook(after, with_kwargs=True, always_call=True)


def _is_of_rows(value: Any) -> bool:
    """Return whether a value is a column of one real number a row, which no token depends on."""
    return isinstance(value, Tensor) and value.ndim == 1 and value.is_floating_point()


def without_loss(model: nn.Module) -> None:
    """Remove the loss from the output of TRL's fused head: a mean over this rank's tokens only.

    Trainers gather the log-probabilities, of whatever shape, and compute their own loss from them.
    """

    def before(_: nn.Module, args: Any, given: dict[str, Any]) -> None:
        if given.get("fused_lm_head"):
            note_whole("TRL's fused head")

    def after(_: nn.Module, args: Any, given: dict[str, Any], out: Any) -> Any:
        if not given.get("fused_lm_head"):
            return None
        return type(out)(**{name: t for name, t in out.items() if name != "loss"})

    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(after, with_kwargs=True)
