"""Labels where they are, or moved ahead: which a model takes."""

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from ring_attention_pytorch import shard_batch
from ring_attention_pytorch.integrations.losses import labels_in_place
from ring_attention_pytorch.integrations.transformers import register, ring_forward
from tests.support import hf_kinds
from tests.support.hf import raised
from tests.support.hf_kinds import LENGTH, OTHERS, make


def test_models_say_where_their_labels_are():
    for name, (family, head, sizes) in OTHERS.items():
        in_place = head in ("ForMaskedLM", "ForTokenClassification")
        assert labels_in_place(make(family, head, sizes, "eager")) == in_place, name


def test_labels_that_were_counted_where_they_predict_are_not_in_place():
    register()
    forward = ring_forward(shard_batch(hf_kinds.whole("a loss of its own", False)))
    forward.num_items = torch.tensor(LENGTH)

    def step() -> Any:
        with forward as inputs:
            return make(*OTHERS["a loss of its own"])(**inputs)

    assert "give shard_batch shift_labels=False" in raised(step)
