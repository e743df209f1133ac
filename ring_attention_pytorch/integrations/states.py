"""States of recurrent layers in `RingHFCache`: transformers' own, whole on every rank.

a new token     all ranks compute it, states by transformers' functions
a prompt ahead  each rank computes a part; the states after it go to all ranks
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from ring_attention_pytorch.integrations.layers import is_recurrent
from ring_attention_pytorch.integrations.recurrent import chunk_now
from ring_attention_pytorch.recurrent.halo import last_tokens


class States(LinearAttentionLayer):
    """The states of one layer, by transformers' interface."""

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Store the last tokens of all ranks `[b, c, n]`; return tokens for the convolution."""
        chunk = chunk_now()
        if chunk is None:
            return super().update_conv_state(
                conv_states, state_idx, conv_kernel_size=conv_kernel_size
            )
        assert conv_kernel_size is not None  # transformers' layers give it
        before = self.conv_states[state_idx] if self.has_previous_state[state_idx] else None
        chunk.tail = None if before is None else before[..., 1:].mT
        last = last_tokens(
            conv_states.mT, conv_kernel_size, plan=chunk.runs,
            initial=None if before is None else before.mT,
        ).mT  # fmt: skip
        if not self.is_conv_states_initialized[state_idx]:
            self.lazy_initialization(
                conv_states=last, state_idx=state_idx, conv_kernel_size=conv_kernel_size
            )
        self.conv_states[state_idx].copy_(last)
        self.has_previous_state[state_idx] = True
        return conv_states

    def forget(self) -> None:
        """Remove all states."""
        LinearAttentionLayer.__init__(self, number_of_states=self.number_of_states)


def states_of(layers: Sequence[Any]) -> list[States]:
    """List the layers of a cache that have states."""
    return [layer for layer in layers if isinstance(layer, States)]


def cache_layers(config: Any, keys: type[Any], make: Callable[[type[Any], int], Any]) -> list[Any]:
    """Make the layers of a cache, of the kinds that transformers' own cache has for this config.

    Args:
        keys: the class of layers with keys; one with states, too, is of both.
        make: makes a layer of a class, by its number.
    """
    if not is_recurrent(config):
        return [make(keys, number) for number in range(config.num_hidden_layers)]
    both = type("StatesAndKeys", (States, keys), {})
    found: list[Any] = []
    for number, theirs in enumerate(DynamicCache(config=config).layers):
        stateful = isinstance(theirs, LinearAttentionLayer)
        if isinstance(theirs, CacheLayerMixin):
            found.append(make(both if stateful else keys, number))
        else:
            found.append(States(theirs.number_of_states) if stateful else theirs)
    return found
