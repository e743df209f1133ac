"""Checks before a cache loads the states of another one.

A state is one rank's part of a cache: `RingCache.state_dict`. A layer with a window saves its whole
circle and each sequence's longest length, and thus can roll back as far as before.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ring_attention_pytorch.inference.storage import PagedStorage
from ring_attention_pytorch.runtime.scaled import SCALED

_NAMES = ("lengths", "starts", "held")
_PARTS = ("keys", "values", "tokens", "scales of keys", "scales of values")


def check_states(cache: PagedStorage, states: Sequence[dict[str, Any]]) -> None:
    """Raise ValueError if a cache can't load these states. The cache is not changed."""
    if not states:
        raise ValueError("give the states of all ranks, there are none")
    for state in states:
        if missing := [name for name in _NAMES if name not in state]:
            raise ValueError(f"a state is what `state_dict` returned, and has {', '.join(missing)}")
        if any(state[name] != states[0][name] for name in ("lengths", "starts")):
            raise ValueError(
                "the states are of several caches, or of several times: lengths or starts differ"
            )
    _check_sizes(cache, states)
    _check_tokens(cache, states)


def _check_sizes(cache: PagedStorage, states: Sequence[dict[str, Any]]) -> None:
    lengths, starts = states[0]["lengths"], states[0]["starts"]
    was = [each for state in states for each in _longest(state)]
    for name, of in (("lengths", [lengths]), ("starts", [starts]), ("the longest lengths", was)):
        for each in of:
            if len(each) != cache.sequences or any(type(n) is not int or n < 0 for n in each):
                raise ValueError(
                    f"the states must have {name} of {cache.sequences} sequences, got {each}"
                )
    if cache.capacity is not None and max(lengths) > cache.capacity:
        raise ValueError(
            f"the states have up to {max(lengths)} tokens of a sequence, more than the capacity "
            f"of {cache.capacity}"
        )
    for state in states:
        layers = state["held"]
        if {len(layers), len(_longest(state) or layers)} != {cache.layers}:
            raise ValueError(f"the states must have {cache.layers} layers, got {len(layers)}")
        if any(len(each) != cache.sequences for each in layers):
            got = [len(each) for each in layers]
            raise ValueError(
                f"the states must hold {cache.sequences} sequences of each layer, got {got}"
            )
        for held in chain.from_iterable(layers):
            _check_kind(cache, held)


def _check_kind(cache: PagedStorage, held: Sequence[Tensor]) -> None:
    """Raise ValueError if shapes or dtypes of a sequence's tensors don't fit the cache."""
    n = len(held[2])
    dtype = torch.uint8 if cache.dtype in SCALED else cache.dtype  # as saved
    scales = (n, cache.key_heads, cache.scales), torch.float32
    wanted = [
        ((n, cache.key_heads, cache.head_dim), dtype),
        ((n, cache.key_heads, cache.value_dim), dtype),
        ((n,), torch.int64),
        scales,
        scales,
    ]
    if len(held) != len(wanted):
        raise ValueError(
            f"the states must have {', '.join(_PARTS)} of a sequence, got {len(held)} of them"
        )
    for name, t, (shape, of) in zip(_PARTS, held, wanted):
        if (tuple(t.shape), t.dtype) != (shape, of):
            raise ValueError(
                f"{name} of the states must be {[*shape]} in {of} for a cache of {cache.dtype}, "
                f"got {[*t.shape]} in {t.dtype}"
            )
    if cache.tied and not torch.equal(held[1], held[0][..., : cache.value_dim]):
        raise ValueError(
            "values of the states are not the first numbers of keys, as in a tied cache"
        )


def _check_tokens(cache: PagedStorage, states: Sequence[dict[str, Any]]) -> None:
    """Raise ValueError if tokens are missing or duplicated."""
    for layer in range(cache.layers):
        for sequence, length in enumerate(states[0]["lengths"]):
            tokens = _tokens_of(states, layer, sequence)
            first = length - len(tokens)
            least = cache.memory(layer).begin(length)
            if first > least or not torch.equal(tokens, torch.arange(first, length)):
                raise ValueError(
                    f"the states hold {len(tokens)} of the {length} tokens of sequence {sequence}; "
                    "give those of all ranks, once each"
                )


def _tokens_of(states: Sequence[dict[str, Any]], layer: int, sequence: int) -> Tensor:
    """Return the tokens of a sequence in all states together, ascending, on the host."""
    return torch.cat([s["held"][layer][sequence][2].cpu() for s in states]).sort().values


def longest_of(states: Sequence[dict[str, Any]], layer: int) -> list[int]:
    """Return each sequence's longest length in a layer; its length if no state has one."""
    lengths: list[int] = states[0]["lengths"]
    each = [_longest(state)[layer] for state in states if _longest(state)]
    return [max(found) for found in zip(lengths, *each)]


def _longest(state: dict[str, Any]) -> list[list[int]]:
    return state.get("longest", [])
