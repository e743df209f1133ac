"""The layers of `RingHFCache`: keys are spread over ranks, states are whole on every rank.

a new token     all ranks compute it, states by transformers' functions
a prompt ahead  each rank computes a part; the states after it go to all ranks
"""

from collections.abc import Sequence
from typing import Any, Self

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from ring_attention_pytorch.geometry.layouts import all_segments
from ring_attention_pytorch.integrations.layers import is_recurrent
from ring_attention_pytorch.integrations.recurrent import PromptChunk, chunk_now
from ring_attention_pytorch.plan.option_types import LayoutName
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.recurrent.halo import last_tokens
from ring_attention_pytorch.recurrent.plan import RunPlan
from ring_attention_pytorch.recurrent.runs import Runs


class CachedLength(int):
    """A number of keys with a reference to its cache, which the mask function needs."""

    cache: Any  # a RingHFCache, which imports this file

    @classmethod
    def of(cls, n: int, cache: Any) -> Self:
        """Make the number `n` of a cache's keys."""
        found = cls(n)
        found.cache = cache
        return found


class KeysLayer(CacheLayerMixin):
    """One layer, by transformers' interface; one `RingCache` has the keys of all layers."""

    is_croppable, is_compileable, supports_early_init = True, False, False
    whole: Any  # the RingHFCache
    index: int

    @classmethod
    def of(cls, whole: Any, index: int) -> Self:
        """Make the layer of this number."""
        layer = cls()
        layer.whole, layer.index = whole, index
        return layer

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the first call of attention allocates the cache."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        self.whole.expect(self.index, key_states, value_states)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        length = self.whole.new_length(self.index, int(query_length))
        return CachedLength.of(length, self.whole), 0

    def get_seq_length(self) -> int:
        return self.whole.length(self.index)

    def get_max_length(self) -> int:
        return self.whole.sizes["capacity"] or -1


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
        chunk.tail = None if before is None else before[..., 1:].mT.clone()  # `kept` changes
        last = last_tokens(
            conv_states.mT, conv_kernel_size, plan=chunk.runs,
            initial=None if before is None else before.mT,
        ).mT  # fmt: skip
        if not self.is_conv_states_initialized[state_idx]:
            self.lazy_initialization(
                conv_states=last, state_idx=state_idx, conv_kernel_size=conv_kernel_size
            )
        kept = self.conv_states[state_idx]
        assert kept is not None  # made at once
        kept.copy_(last)
        self.has_previous_state[state_idx] = True
        return conv_states

    def reorder(self, beam_idx: Tensor) -> None:
        """Replace sequence i by sequence `beam_idx[i]`."""
        LinearAttentionLayer.reorder_cache(self, beam_idx)  # type: ignore[arg-type]

    def forget(self) -> None:
        """Remove all states."""
        LinearAttentionLayer.__init__(self, number_of_states=self.number_of_states)


def states_of(layers: Sequence[Any]) -> list[States]:
    """List the layers of a cache that have states."""
    return [layer for layer in layers if isinstance(layer, States)]


class StatesAndKeys(States, KeysLayer):  # type: ignore[misc, override]
    """A layer with attention beside a recurrence."""


def cache_layers(config: Any, whole: Any) -> list[Any]:
    """Make the layers of a `RingHFCache`, of the kinds of transformers' own cache for a config."""
    if not is_recurrent(config):
        return [KeysLayer.of(whole, number) for number in range(config.num_hidden_layers)]
    found: list[Any] = []
    for number, theirs in enumerate(DynamicCache(config=config).layers):
        with_keys = isinstance(theirs, CacheLayerMixin)
        if isinstance(theirs, LinearAttentionLayer):
            states = States(theirs.number_of_states)
            found.append(StatesAndKeys.of(whole, number) if with_keys else states)
        else:
            found.append(KeysLayer.of(whole, number) if with_keys else theirs)
    return found


def chunk_of(ring: Ring, layout: LayoutName, length: int, mask: Tensor) -> PromptChunk:
    """Return a spread chunk of `length` tokens of all ranks; `mask` is of this rank's."""
    runs = Runs.of(all_segments(layout, ring.size, length), None, len(mask))
    return PromptChunk(RunPlan(ring, runs, mask.device), mask)
