"""Models of images and text: images are merged into embeddings while a sequence is whole.

    whole = merged(model, {"input_ids": ..., "pixel_values": ..., "image_grid_thw": ..., ...})
    batch = shard_batch(whole)                     embeddings, and positions of three rows
    with ring_forward(batch, labels=False) as inputs:
        hidden = text_states(model, inputs)
        loss = ring_cross_entropy(hidden, batch.labels, **head_of(model))

A rank has only some of an image's tokens, and the model would look for all of them.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ring_attention_pytorch.arguments import checked
from ring_attention_pytorch.integrations.calls import names
from ring_attention_pytorch.integrations.outputs import model_in, name_of

_DEEP = "deepstack_visual_embeds"
_OURS = ("labels", "loss_weights", "documents", "cu_seqlens", "attention_mask", "key_mask")
_TAKEN = {"inputs_embeds", "position_ids", "attention_mask", "visual_pos_masks", _DEEP}


@checked
def merged(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of a model's text model for a whole batch, to pass to `shard_batch`.

    The model embeds words, encodes images and puts them among the words; its text model does not
    run. Every rank does this for the whole batch.

    Args:
        model: a transformers model with a text model in it: Qwen2-VL, Qwen3-VL, Llava and so on.
        batch: a processor's output. Labels, documents and weights are passed on unchanged, for
            `shard_batch`.

    Returns:
        "inputs_embeds" `[b, n, d]`, "position_ids" `[3, b, n]` if the model makes them, and the
        image features that layers of the text model add.

    Raises:
        ValueError: the model has no text model, or gives it inputs that can't be spread: a mask in
            which an image's tokens see one another both ways, states for cross attention.

    >>> import transformers
    >>> text = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, vocab_size=9)
    >>> text |= dict(num_attention_heads=2, num_key_value_heads=1, pad_token_id=0)
    >>> vision = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, image_size=4)
    >>> vision |= dict(num_attention_heads=2)
    >>> config = transformers.LlavaConfig(
    ...     text_config=transformers.LlamaConfig(**text),
    ...     vision_config=transformers.CLIPVisionConfig(**vision, patch_size=2),
    ... )
    >>> model = transformers.LlavaForConditionalGeneration(config)
    >>> merged(model, {"input_ids": torch.tensor([[4, 5, 6]])})["inputs_embeds"].shape
    torch.Size([1, 3, 8])
    """
    whole = _model_in(model)
    kept = {name: batch[name] for name in _OURS if batch.get(name) is not None}
    given = {name: value for name, value in batch.items() if name not in kept}
    if "attention_mask" in kept:
        given["attention_mask"] = kept["attention_mask"]
    found = _given_to_text(whole, given)
    mask, known = found.get("attention_mask"), kept.get("attention_mask")
    if mask is not None and mask is not known:
        raise ValueError(
            f"merged: {type(whole).__name__} makes a mask of its own for its text model, in which "
            "tokens of an image may see one another both ways; such a mask can't be spread"
        )
    more = sorted(name for name, value in found.items() if name not in _TAKEN and _says(value))
    if more or not isinstance(found.get("inputs_embeds"), Tensor):
        raise ValueError(
            f"merged: {type(whole).__name__} gives its text model {', '.join(more) or 'no'}"
            f"{'' if more else ' inputs_embeds'}; only embeddings and positions can be spread"
        )
    made = {"inputs_embeds": found["inputs_embeds"], **kept}
    if found.get("position_ids") is not None:
        made["position_ids"] = found["position_ids"]
    if found.get(_DEEP) is not None:
        made[_DEEP] = _of_all_tokens(found[_DEEP], found["visual_pos_masks"])
    return made


@checked
def text_states(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    """Return the last hidden states `[b, n, d]` of a model's text model, of this rank's tokens.

    Args:
        inputs: from `ring_forward`, for a batch that `merged` made.
    """
    given = dict(inputs)
    if (deep := given.pop(_DEEP, None)) is not None:
        given[_DEEP] = list(deep.flatten(0, 1).unbind(1))  # 0 at tokens without an image
        given["visual_pos_masks"] = deep.new_ones(deep.shape[:2], dtype=torch.bool)
    return _text_in(_model_in(model))(**given).last_hidden_state


def _model_in(model: nn.Module) -> PreTrainedModel:
    found = model_in(model)
    if found is None or _text_in(found) is found:
        raise ValueError(
            f"merged: needs a model of transformers with a text model in it, got {name_of(model)}"
        )
    return found


def _text_in(model: PreTrainedModel) -> Any:
    found = model.get_decoder()
    return model if found is None else found


def _says(value: Any) -> bool:
    return value is not None and not isinstance(value, bool | str)


class _Reached(Exception):
    """The text model has been called."""


def _given_to_text(model: PreTrainedModel, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with which a model calls its text model."""
    text, found = _text_in(model), {}

    def forward(*args: Any, **given: Any) -> None:
        found.update(given)
        raise _Reached

    before = vars(text).get("forward")
    text.forward = forward
    try:
        with _own_attention(model):
            model(**batch, use_cache=False)
    except _Reached:
        return found
    finally:
        if before is None:
            del text.forward
        else:
            text.forward = before
    raise ValueError(f"merged: {type(model).__name__} does not call its text model")


@contextmanager
def _own_attention(model: PreTrainedModel) -> Iterator[None]:
    """Make a model encode images by PyTorch's attention in the block: each rank has them whole."""
    configs = {id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}
    before = [(config, config._attn_implementation) for config in configs.values()]
    try:
        for config, name in before:
            config._attn_implementation = "sdpa" if name in names else name
        yield
    finally:
        for config, name in before:
            config._attn_implementation = name


def _of_all_tokens(embeds: list[Tensor], mask: Tensor) -> Tensor:
    """Return layers' image features for all tokens, `[b, n, layers, d]`, 0 without an image."""
    made = []
    for each in embeds:
        whole = each.new_zeros(*mask.shape, each.shape[-1])
        made.append(whole.masked_scatter(mask[..., None].to(each.device), each))
    return torch.stack(made, 2)
