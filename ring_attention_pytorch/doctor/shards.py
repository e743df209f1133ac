"""Find out from the records of a rank's model which tokens of a whole batch it received."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_attention_pytorch.doctor.evidence import Evidence
from ring_attention_pytorch.geometry.layouts import (
    LAYOUTS,
    Layout,
    all_segments,
    segment_positions,
)
from ring_attention_pytorch.ranks.ring import Ring

_TOKENS = ("input_ids", "inputs_embeds")
EVERYTHING = "everything"


class Held(NamedTuple):
    """The positions `[n]` of a rank's tokens in the whole sequence, and their layout."""

    positions: Tensor
    layout: Layout


def whole_tokens(batch: Mapping[str, Any]) -> Tensor | None:
    """Return the tokens of a batch `[b, n, ...]`: its ids, or its first tensor of such a shape.

    >>> whole_tokens({"labels": torch.zeros(1, 4), "input_ids": torch.ones(1, 4)}).sum().item()
    4.0
    """
    named = [batch[name] for name in _TOKENS if isinstance(batch.get(name), Tensor)]
    others = [t for t in batch.values() if isinstance(t, Tensor) and t.ndim >= 2]
    return next(iter(named + others), None)


def tokens_of(seen: Evidence, whole: Evidence, tokens: Tensor) -> Tensor | None:
    """Return the argument that the model gets in place of the whole `tokens` of one process."""
    for name, t in whole.inputs.items():
        if name in seen.inputs and t.shape == tokens.shape and torch.equal(t, tokens):
            return seen.inputs[name]
    return None


def held(mine: Tensor, tokens: Tensor, ring: Ring, seen: Evidence) -> Held | None:
    """Find the layout by which `mine` is this rank's part of tokens; None if there is none.

    If tokens repeat, several layouts can fit. Attention's layout is tried first.
    """
    length = tokens.shape[1]
    if ring.size > 1 and mine.shape == tokens.shape and torch.equal(mine, tokens):
        return Held(torch.arange(length), EVERYTHING)
    for layout in _candidates(seen):
        try:
            segments = all_segments(layout, ring.size, length)
        except ValueError:  # a balanced layout for another length
            continue
        positions = segment_positions(segments[ring.rank])
        part = tokens[:, positions.to(tokens.device)]
        if part.shape == mine.shape and torch.equal(part, mine):
            return Held(positions, layout)
    return None


def _candidates(seen: Evidence) -> Iterator[Layout]:
    yield from dict.fromkeys([*(plan.layout for plan in seen.plans), *LAYOUTS])
