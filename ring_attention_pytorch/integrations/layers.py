"""Checks of transformers' models: layers, heads and positions that can't be spread."""

import sys
from typing import Any

_SLIDING = "sliding_attention"
_SPREAD = {_SLIDING, "full_attention", "attention", "mlp", "moe", "dense", "sparse"}
_RECURRENT = {"linear_attention", "hybrid", "hybrid_sliding", "mamba"}
_KINDS = ("layer_types", "layers_block_type")  # where a config lists its layers' kinds
_SEARCHING = ("SplinterForQuestionAnswering", "SplinterForPreTraining")
_OF_LENGTH = ("dynamic", "longrope")  # rotary frequencies depend on a sequence's length


def check_layers(config: Any, length: int, recurrent: int = 0) -> None:
    """Raise ValueError if a model's config has something that can't be spread.

    Args:
        config: the model's, or its text model's.
        length: tokens of the whole sequence if it is spread; 0 if each rank has it whole.
        recurrent: the model's layers whose states are carried from rank to rank.
    """
    others: set[str] = set()
    for name in _KINDS:
        kinds = [kind for kind in getattr(config, name, None) or () if kind not in _SPREAD]
        if recurrent and len(kinds) == recurrent:
            kinds = [kind for kind in kinds if kind not in _RECURRENT]
        others |= {*kinds}
    if other := sorted(others):
        raise ValueError(
            f"the model has layers of {', '.join(other)}, whose state along the sequence would end "
            "at each shard; only full and sliding attention can be spread"
        )
    _check_sequences(config)
    if length:
        _check_counting(config)
    _check_rotary(config, length)


def is_recurrent(config: Any) -> bool:
    """Return whether a text model's config has layers that carry a state along the sequence."""
    kinds = {kind for name in _KINDS for kind in getattr(config, name, None) or ()}
    return not kinds.isdisjoint(_RECURRENT)


def _check_sequences(config: Any) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            "the model has an encoder and a decoder, two sequences; only one can be spread"
        )


def check_reading(model: Any) -> None:
    """Raise ValueError if a model, its head or its loss must read a whole sequence.

    Args:
        model: a model of transformers.
    """
    if (name := type(model).__name__) in _SEARCHING:
        raise ValueError(
            f"{name} looks for the question's token in a whole sequence, of which ranks have "
            "parts; give hidden states of the model below it to a head of your own"
        )
    if getattr(model, "z_loss_coefficient", 0) > 0:
        raise ValueError(
            f"{name} adds to its loss a mean over its own tokens (z_loss_coefficient), which are "
            "this rank's alone; set model.z_loss_coefficient = 0, or compute the loss yourself"
        )
    _check_sequences(model.config)


def check_own_attention(model: Any, name: str) -> None:
    """Raise ValueError if a text model computes attention itself, not by transformers' interface.

    Args:
        model: a model of transformers.
    """
    by_name = any("VISION" not in table for table in _own_tables(model))
    is_text = hasattr(model.config, "vocab_size") and _is_whole(model.config)
    if not is_text or (model._can_set_attn_implementation() and not by_name):
        return
    raise ValueError(
        f'attn_implementation="{name}": {type(model).__name__} computes attention by itself, and '
        "does not ask transformers' attention interface for it; only models that do can be spread"
    )


def is_tower_by_name(model: Any) -> bool:
    """Return whether a vision model picks its attention from a table of its own, without ours.

    Args:
        model: a model of transformers.
    """
    is_tower = not hasattr(model.config, "vocab_size") and _is_whole(model.config)
    return is_tower and any("VISION" in table for table in _own_tables(model))


def _own_tables(model: Any) -> list[str]:
    """List the names of attention tables in the Python module of a model's class."""
    return [n for n in vars(sys.modules[type(model).__module__]) if "ATTENTION_CLASSES" in n]


def _is_whole(config: Any) -> bool:
    """Return whether a config has no text model's config inside."""
    return config.get_text_config() is config


def windows_of(config: Any) -> list[int | None]:
    """Return each layer's window: the visible tokens before a token; None is all.

    >>> from types import SimpleNamespace
    >>> layers = ["full_attention", "sliding_attention"]
    >>> windows_of(SimpleNamespace(num_hidden_layers=2, sliding_window=8, layer_types=layers))
    [None, 7]
    """
    window = getattr(config, "sliding_window", None)
    if window is None:
        return [None] * config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or [_SLIDING] * config.num_hidden_layers
    return [window - 1 if kind == _SLIDING else None for kind in kinds]  # without itself


def _check_counting(config: Any) -> None:
    """Raise ValueError if a layer counts tokens from 0 on each rank, or reads their neighbours."""
    ropes = getattr(config, "no_rope_layers", None) or ()  # 1 for a layer with rotary embeddings
    if getattr(config, "attn_temperature_tuning", False) and not all(ropes):
        raise ValueError(
            "layers without rotary embeddings scale queries by a token's number, which the model "
            "counts from 0 on each rank (attn_temperature_tuning); it can't be spread"
        )
    if getattr(config, "trigram_input", False):
        raise ValueError(
            "embeddings are of three tokens side by side (trigram_input), and those at a shard's "
            "ends have other neighbours; it can't be spread"
        )


def _check_rotary(config: Any, length: int) -> None:
    given = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in given.values() if isinstance(value, dict)]
    for rope in nested or [given]:
        kind = rope.get("rope_type")
        if kind not in _OF_LENGTH:
            continue
        trained = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        if length > trained:
            raise ValueError(
                f"rotary embeddings of type {kind} depend on the longest position that a rank has "
                f"beyond {trained}, and ranks differ in it; got {length} tokens"
            )
