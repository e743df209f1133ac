"""Options in a transformers layer's call of attention, other than its tensors and its mask."""

from collections.abc import Mapping
from typing import Any

from ring_attention_pytorch.integrations.masks import Visible

# options of the model that reach attention and don't concern it
_IDLE = {
    "use_cache", "cache", "past_key_values", "cache_position", "output_hidden_states",
    "num_items_in_batch", "shift_labels", "logits_to_keep", "return_dict", "position_embeddings",
    "output_router_logits",
    "sliding_window", "is_causal",  # these two are compared with the mask
}  # fmt: skip
# score terms: ring_attn's name, transformers' name, and the default
SCORES = {"scale": ("scaling", None), "softclamp": ("softcap", None), "dropout": ("dropout", 0.0)}
names: set[str] = set()  # of attention, as given to `register`


def check_call(visible: Visible, given: Mapping[str, Any]) -> None:
    """Raise ValueError if an option of a layer's call contradicts its mask or is not supported."""
    window, is_causal = given.get("sliding_window"), given.get("is_causal")
    inclusive = 1 if visible.causal else 0  # the token itself counts in transformers
    if window is not None and visible.window not in (window - 1, window - inclusive):
        raise ValueError(f"a layer's sliding_window={window}, but its mask's is {visible.window}")
    if is_causal is not None and is_causal != visible.causal:
        raise ValueError(f"a layer's is_causal={is_causal}, but its mask's is {visible.causal}")
    asked = {name for name, value in given.items() if value is not None and value is not False}
    if unknown := sorted(asked - _IDLE):
        raise ValueError(
            f"attention was given {', '.join(unknown)}, which ring attention does not have"
        )
