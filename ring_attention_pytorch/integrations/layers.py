"""Layers of transformers' models that see more of a sequence than attention does."""

from typing import Any

_SLIDING = "sliding_attention"
_SPREAD = {_SLIDING, "full_attention", "attention", "mlp", "moe", "dense", "sparse"}
_OF_LENGTH = ("dynamic", "longrope")  # rotary frequencies depend on how long a sequence is


def layers_problem(config: Any, length: int) -> str | None:
    """Say what in a model's config can't be spread; None if nothing.

    Args:
        config: the model's, or its text model's.
        length: tokens of the whole sequence, of which ranks have parts; 0 if all have all.
    """
    kinds: set[str] = set()
    for name in ("layer_types", "layers_block_type"):
        kinds |= {*(getattr(config, name, None) or ())}
    if other := sorted(kinds - _SPREAD):
        return (
            f"the model has layers of {', '.join(other)}, whose state along the sequence would end "
            "at each shard; only full and sliding attention can be spread"
        )
    if getattr(config, "is_encoder_decoder", False):
        return "the model has an encoder and a decoder, two sequences; only one can be spread"
    if getattr(config, "output_router_logits", False):
        return (
            "output_router_logits=True: the routers' loss would be that of each shard; set it to "
            "False, or add such a loss yourself"
        )
    return _rotary_problem(config, length)


def windows_of(config: Any) -> list[int | None]:
    """Return how many tokens before its own each layer sees; None is all.

    >>> from types import SimpleNamespace
    >>> layers = ["full_attention", "sliding_attention"]
    >>> windows_of(SimpleNamespace(num_hidden_layers=2, sliding_window=8, layer_types=layers))
    [None, 7]
    """
    window = getattr(config, "sliding_window", None)
    if window is None:
        return [None] * config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or [_SLIDING] * config.num_hidden_layers
    return [window - 1 if kind == _SLIDING else None for kind in kinds]  # it counts the token


def _rotary_problem(config: Any, length: int) -> str | None:
    given = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in given.values() if isinstance(value, dict)]
    for rope in nested or [given]:
        kind = rope.get("rope_type")
        if kind not in _OF_LENGTH:
            continue
        trained = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        if length > trained:
            return (
                f"rotary embeddings of type {kind} depend on the longest position that a rank has "
                f"beyond {trained}, and ranks differ in it; got {length} tokens"
            )
    return None
