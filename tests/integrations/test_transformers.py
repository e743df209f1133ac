"""Models of transformers over a spread batch are those of one process; what is forgotten raises."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import transformers
from transformers import AttentionInterface, masking_utils

from ring_attention_pytorch import shard_batch
from ring_attention_pytorch.integrations.masks import visible_by
from ring_attention_pytorch.integrations.transformers import register, ring_forward
from tests.support import hf
from tests.support.hf import KINDS, LENGTH, MODELS, WORDS, batch_of, model_of, ring_of
from tests.support.reference import relative_error

EXACT = 1e-10
NAMES = list(MODELS)


def errors(got: tuple[Tensor, list[Tensor]], want: tuple[Tensor, list[Tensor]]) -> float:
    pairs = zip((got[0], *got[1]), (want[0], *want[1]), strict=True)
    return max(relative_error(a, b) for a, b in pairs)


def all_of(
    cases: list[tuple[str, str]], size: int, layout: str, options: dict[str, Any]
) -> dict[str, float]:
    """For a pool: the worst error of each model and kind of batch, in rings of a size."""
    found = {}
    with hf.losses_as_they_were():
        for name, kind in cases:
            got = hf.spread(name, kind, ring_of(size), layout, **options)
            found[f"{name}, {kind}"] = errors(got, hf.dense_once(name, kind))
    return found


@pytest.mark.parametrize(
    ("size", "layout", "options"),
    [
        (2, "zigzag", dict(checkpointed=False)),
        (3, "auto", {}),
        (4, "auto", dict(ulysses=2, checkpointed=True)),
    ],
)
def test_loss_and_gradients_are_those_of_one_process(size, layout, options, pools):
    """Each model with one kind of batch, another one in each ring."""
    cases = [(name, KINDS[(i + size) % 3]) for i, name in enumerate(MODELS)]
    for found in pools(4).run(all_of, cases, size, layout, options):
        assert max(found.values()) < EXACT, found


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("size", "layout", "options"),
    [
        (1, "zigzag", {}),
        (2, "zigzag", {}),
        (2, "balanced", dict(ulysses=2)),
        (3, "balanced", dict(checkpointed=False)),
        (3, "zigzag", dict(transport="gather")),
        (4, "zigzag", dict(ulysses=2)),
        (4, "balanced", dict(checkpointed=True)),
        (4, "contiguous", {}),
    ],
)
def test_every_model_with_every_kind_of_batch(size, layout, options, pools):
    cases = [(name, kind) for name in MODELS for kind in KINDS]
    for found in pools(4).run(all_of, cases, size, layout, options):
        assert max(found.values()) < EXACT, found
